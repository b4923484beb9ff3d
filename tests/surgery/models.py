"""Models with statistics that are not trivial, and what they compute."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


def batch_norms(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """All BatchNormalization layers, at any depth (bnzoo's are derived from Keras')."""
    layers = model._flatten_layers()
    return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]


def randomize(
    model: keras.Model, seed: int = 0, variances: tuple[float, float] = (0.2, 4.0)
) -> keras.Model:
    """Gives each channel values of its own; of each layer the first gamma is 0, the next < 0."""
    rng = np.random.default_rng(seed)
    for layer in model._flatten_layers(include_self=False):
        for variable in layer._trainable_variables:
            fan_in = max(1, int(np.prod(variable.shape[:-1])))
            variable.assign(rng.normal(0, fan_in**-0.5, variable.shape))
        if isinstance(layer, keras.layers.BatchNormalization):
            shape = layer.moving_mean.shape
            layer.moving_mean.assign(rng.normal(0, 0.5, shape))
            low, high = np.log(variances)
            layer.moving_variance.assign(np.exp(rng.uniform(low, high, shape)))
            if layer.beta is not None:
                layer.beta.assign(rng.normal(0, 0.5, shape))
            if layer.gamma is not None:
                gamma = rng.uniform(0.5, 1.5, int(np.prod(shape)))
                gamma[:2] = [0.0, -0.7][: gamma.size]
                layer.gamma.assign(gamma.reshape(shape))
    return model


def example(model: keras.Model, batch: int = 3, seed: int = 1) -> Any:
    """Random inputs in the structure that the model takes; unknown sizes are 5."""
    rng = np.random.default_rng(seed)
    inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return keras.tree.map_structure(
        lambda x: rng.normal(size=[batch, *(n or 5 for n in x.shape[1:])]).astype(x.dtype), inputs
    )


def run(model: keras.Model, inputs: Any, jit: bool = False) -> list[np.ndarray]:
    """The outputs in inference mode, flattened.

    `jit` has XLA run it: on CPU, TensorFlow's own kernels know neither most convolutions
    with channels first nor transposed ones with dilation.
    """
    call = tf.function(model, jit_compile=True) if jit else model
    inputs = keras.tree.map_structure(tf.constant, inputs)
    return [np.asarray(output) for output in keras.tree.flatten(call(inputs, training=False))]


def relative_error(
    model: keras.Model, other: keras.Model, inputs: Any = None, jit: bool = False
) -> float:
    """The largest difference of their outputs, relative to the largest value of that output."""
    inputs = example(model) if inputs is None else inputs
    pairs = list(zip(run(model, inputs, jit), run(other, inputs, jit), strict=True))
    for expected, got in pairs:
        assert expected.shape == got.shape
        assert expected.dtype == got.dtype
        assert np.isfinite(expected).all()
        assert expected.any()
    return max(
        float(np.abs(expected.astype("float64") - got).max() / np.abs(expected).max())
        for expected, got in pairs
    )
