"""Graphs in which the layers have gradients of their own are freed when nobody has them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

# See graph_gradients.py.
from tensorflow.python.framework.ops import gradient_registry

from bnzoo.layers import BatchNormalization, PReLU
from bnzoo.layers.graph_gradients import custom_gradient


def registered() -> set[str]:
    return {name for name in gradient_registry.list() if name.startswith("CustomGradient")}


def collect() -> None:
    for _ in range(4):  # What one pass frees may have held more.
        gc.collect()


def trained_once(layer: Any, channels: int) -> weakref.ref:
    """The graph of a step of `layer`, which nobody has any more."""
    layer.build((None, 4, 4, channels))

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        return tape.gradient(loss, x)

    concrete = step.get_concrete_function(tf.TensorSpec([None, 4, 4, channels]))
    assert np.isfinite(concrete(tf.ones([2, 4, 4, channels]))).all()
    return weakref.ref(concrete.graph)


@pytest.mark.parametrize("layer", [BatchNormalization, PReLU])
def test_graphs_are_freed(layer: type) -> None:
    collect()
    before = registered()
    graphs = [trained_once(layer(), channels) for channels in (2, 3)]
    collect()
    assert [graph() for graph in graphs] == [None, None]
    assert registered() <= before


def test_a_graph_that_is_there_keeps_its_gradients() -> None:
    """Also those inside of loops, which TensorFlow asks for late."""
    layer = BatchNormalization(epsilon=0.1)
    layer.build((None, 3, 3, 2))
    x = np.random.default_rng(6).normal(size=(4, 5, 3, 3, 2)).astype(np.float32)

    @tf.function
    def forward(x: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(lambda one: layer(one, training=True) ** 3, x)

    forward.get_concrete_function(tf.TensorSpec(x.shape))
    collect()
    with tf.GradientTape() as tape:
        tape.watch(x := tf.constant(x))
        y = forward(x)
        collect()
    found = tape.gradient(y, x)
    with tf.GradientTape() as tape:
        tape.watch(wide := tf.cast(x, tf.float64))
        mean = tf.reduce_mean(wide, [1, 2, 3], keepdims=True)
        variance = tf.reduce_mean((wide - mean) ** 2, [1, 2, 3], keepdims=True)
        y = ((wide - mean) / tf.sqrt(variance + 0.1)) ** 3
    np.testing.assert_allclose(found, tape.gradient(y, wide), atol=2e-5)


def test_it_is_a_custom_gradient() -> None:
    @custom_gradient
    def double(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return 2 * x, lambda upstream: -7 * upstream

    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = double(x)
        return tape.gradient(y, x)

    assert float(gradient(tf.constant(3.0))) == -7
    assert float(tf.function(gradient)(tf.constant(3.0))) == -7
    with tf.Graph().as_default() as graph:
        x = tf.constant(3.0)
        (found,) = tf.gradients(double(x), x)
        with tf.compat.v1.Session(graph=graph) as session:
            assert session.run(found) == -7
