from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.models import Ensemble
from bnzoo.surgery import fold_batch_norm
from export.first_difference import first_difference
from tests.export.runs import small_network

INPUTS = {
    "images": tf.constant(np.random.default_rng(2).normal(size=(4, 12, 10, 3)).astype(np.float32))
}


def ensemble() -> keras.Model:
    return Ensemble([small_network(), small_network()])


def nested() -> keras.Model:
    """A Sequential inside of a functional model, called twice, with operations between."""
    body = keras.Sequential(small_network().layers[:-2], name="body")
    image = keras.Input((12, 10, 3))
    x = keras.ops.concatenate([body(image), body(image[:, ::-1])], axis=-1)
    x = keras.layers.Reshape((2, 8))(x)
    x = keras.layers.TimeDistributed(keras.layers.Dense(5, name="inner"), name="timed")(x)
    return keras.Model(image, keras.layers.Flatten(name="flatten")(x))


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (small_network, ("conv_1",)),
        (ensemble, ("member_2", "conv_1")),
        (nested, ("body", "conv_1")),
        (nested, ("timed",)),
    ],
    ids=["plain", "ensemble", "nested", "wrapped"],
)
def test_the_first_layer_that_differs_is_named_by_its_path(build: Any, path: tuple) -> None:
    network = build()
    folded, report = fold_batch_norm(network, return_report=True)
    # Folding reorders float32 sums.
    assert first_difference(network, folded, report, INPUTS, 1e-5) is None
    layer = folded
    for name in path:
        layer = layer.get_layer(name)
    weights = layer.get_weights()
    layer.set_weights([weights[0], weights[1] + 0.1])
    found = first_difference(network, folded, report, INPUTS, 1e-5)
    assert found is not None
    assert found.startswith(f"it starts at layer {'/'.join(path)!r}, which ")
