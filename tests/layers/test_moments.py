"""The two-pass moments where rounding is worst; BatchNormalization's tests hold the rest."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers.moments import moments


@pytest.mark.parametrize("known", [False, True], ids=["any_size", "known_size"])
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("size", [1 << 18, 3_000_001])
def test_many_values_far_from_zero(size: int, jit: bool, known: bool) -> None:
    # XLA on CPU adds one after the other: near a sum of 2e8 float32 has steps of 16, and a mean
    # from it is off by about 0.006; near 3e9, with steps of 256, by tens.
    x = (1000 + 0.1 * np.random.default_rng(3).normal(size=(size, 1))).astype("float32")
    signature = [tf.TensorSpec([size if known else None, 1])]
    function = tf.function(lambda x: moments(x, [0]), signature, jit_compile=jit)
    mean, variance, count = function(tf.constant(x))
    assert float(count[0, 0]) == size
    assert float(mean[0, 0]) == pytest.approx(x.astype("float64").mean(), abs=2e-4)
    assert float(variance[0, 0]) == pytest.approx(x.astype("float64").var(), rel=1e-3)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3)])
def test_no_values(shape: tuple[int, ...]) -> None:
    mean, variance, count = moments(tf.zeros(shape), [0, 1])
    for got in (mean, variance, count):
        np.testing.assert_array_equal(got, np.zeros((1, 1, 3)))


def test_a_masked_value_may_be_anything() -> None:
    x = tf.constant([[1.0], [np.nan], [5.0], [np.inf]])
    mask = tf.constant([[True], [False], [True], [False]])
    statistics = moments(x, [0], mask)
    assert [float(value[0, 0]) for value in statistics] == [3.0, 4.0, 2.0]


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((1500, 3, 40, 25), [0, 2, 3]), ((4, 3, 1 << 19), [0, 2]), ((1 << 19, 2, 1, 3), [0, 1, 2])],
)
def test_any_axes_and_a_mask(shape: tuple[int, ...], axes: list[int], jit: bool) -> None:
    random = np.random.default_rng(5)
    x = (1000 + 0.1 * random.normal(size=shape)).astype("float32")
    mask = random.uniform(size=shape) < 0.7
    function = tf.function(lambda x, mask: moments(x, axes, mask), jit_compile=jit)
    mean, variance, count = function(tf.constant(x), tf.constant(mask))
    wide = np.ma.masked_array(x.astype("float64"), ~mask)
    assert mean.shape == variance.shape == wide.mean(tuple(axes), keepdims=True).shape
    np.testing.assert_array_equal(count, mask.sum(tuple(axes), keepdims=True))
    np.testing.assert_allclose(mean, wide.mean(tuple(axes), keepdims=True), atol=2e-4)
    np.testing.assert_allclose(variance, wide.var(tuple(axes), keepdims=True), rtol=1e-3)


@pytest.mark.parametrize("rows", [0, 1, 1023, 1024, 1025, 5000])
def test_gradients_through_blocks(rows: int) -> None:
    # Of an unknown number of rows, so that they are added in blocks.
    x = np.random.default_rng(6).normal(1.0, 2.0, (rows, 2))

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean, variance, _ = moments(x, [0])
            value = tf.reduce_sum(mean * [[2.0, 3.0]] + variance * [[5.0, 7.0]])
        return tape.gradient(value, x)

    divisor = max(rows, 1)
    center = x.sum(0) / divisor
    expected = np.array([2.0, 3.0]) / divisor + [[10.0, 14.0]] * (x - center) / divisor
    np.testing.assert_allclose(gradient(tf.constant(x, tf.float32)), expected, atol=1e-5)
