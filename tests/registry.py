"""Small instances of every layer and model, for the tests that all of them must pass.

A new layer or model gets those tests by adding a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import bnzoo
from bnzoo.layers import (
    BatchNormalization,
    ChannelAffine,
    LocalResponseNormalization,
    PReLU,
    SlidingSpatialPyramidPooling,
    SpatialPyramidPooling,
)


class Instance(NamedTuple):
    """How to make one, and what it is fed."""

    make: Callable[[], keras.Layer]
    input_shape: tuple[int, ...]
    """Without the batch."""
    weights: int
    """Number of weight variables, seed generators' states left out."""


def _l2() -> keras.regularizers.Regularizer:
    return keras.regularizers.L2(0.01)


LAYERS: Mapping[str, Instance] = {
    "batch_normalization": Instance(lambda: BatchNormalization(name="it"), (4, 4, 3), 4),
    "batch_normalization_first": Instance(
        lambda: BatchNormalization(axis=1, gamma_regularizer=_l2(), name="it"), (3, 4, 4), 4
    ),
    "batch_normalization_activation": Instance(
        lambda: BatchNormalization(axis=(1, 2, 3), momentum=None, name="it"), (2, 3, 3), 5
    ),
    "batch_normalization_synchronized": Instance(
        lambda: BatchNormalization(synchronized=True, scale=False, name="it"), (4, 4, 3), 3
    ),
    "batch_normalization_dense": Instance(
        lambda: BatchNormalization(epsilon=1e-10, center=False, name="it"), (5,), 3
    ),
    "channel_affine": Instance(lambda: ChannelAffine(name="it"), (4, 4, 3), 2),
    "local_response_normalization": Instance(
        lambda: LocalResponseNormalization(name="it"), (4, 4, 7), 0
    ),
    "prelu": Instance(lambda: PReLU(alpha_regularizer=_l2(), name="it"), (4, 4, 3), 1),
    "prelu_shared": Instance(lambda: PReLU(shared=True, name="it"), (4, 4, 3), 1),
    "spatial_pyramid_pooling": Instance(
        lambda: SpatialPyramidPooling(bins=(3, 2, 1), name="it"), (6, 6, 3), 0
    ),
    "sliding_spatial_pyramid_pooling": Instance(
        lambda: SlidingSpatialPyramidPooling((6, 6), bins=(3, 2, 1), name="it"), (6, 6, 3), 0
    ),
}

_SMALL = {"input_shape": (32, 32, 3), "classes": 5, "stem": "small", "width_multiplier": 0.1}
_PRELU_NET = {"input_shape": (224, 224, 3), "classes": 3, "width_multiplier": 0.02}


def _ensemble() -> keras.Model:
    members = [bnzoo.models.mnist_mlp(name=f"member_{index}") for index in range(2)]
    return bnzoo.models.Ensemble(members)


MODELS: Mapping[str, Instance] = {
    "bn_inception": Instance(lambda: bnzoo.models.bn_inception(**_SMALL), (32, 32, 3), 69 * 5 + 2),
    "bn_inception_prelu": Instance(
        lambda: bnzoo.models.bn_inception(**_SMALL, activation="prelu", padding="symmetric"),
        (32, 32, 3),
        69 * 6 + 2,
    ),
    "inception": Instance(lambda: bnzoo.models.inception(**_SMALL), (32, 32, 3), 69 * 2 + 2),
    "mnist_mlp": Instance(bnzoo.models.mnist_mlp, (28, 28, 1), 3 * 5 + 2),
    "ensemble": Instance(_ensemble, (28, 28, 1), 2 * (3 * 5 + 2)),
    "prelu_net_14": Instance(lambda: bnzoo.models.prelu_net_14(**_PRELU_NET), (224, 224, 3), 41),
}


def as_model(instance: Instance) -> keras.Model:
    """A model, or a model around a layer, seeded; its weights are not those it starts with."""
    keras.utils.set_random_seed(17)
    made = instance.make()
    if not isinstance(made, keras.Model):
        inputs = keras.Input(instance.input_shape)
        made = keras.Model(inputs, made(inputs))
    random = np.random.default_rng(17)
    for variable in made.variables:
        if keras.backend.is_float_dtype(variable.dtype) and variable.name != "batches_seen":
            value = variable.numpy() * random.uniform(0.8, 1.2, variable.shape)
            if len(variable.shape) == 1:  # Not the kernels: they are to keep their variance.
                value += random.uniform(-0.1, 0.1, variable.shape)
            variable.assign(value)
    return made


def inputs_for(instance: Instance, batch: int, dtype: str = "float32") -> tf.Tensor:
    """Seeded inputs, different in each channel."""
    random = np.random.default_rng(19)
    shape = instance.input_shape
    values = random.normal(size=(batch, *shape)) * random.uniform(0.5, 2.0, shape[-1])
    return tf.cast(tf.constant(values + random.normal(size=shape[-1])), dtype)
