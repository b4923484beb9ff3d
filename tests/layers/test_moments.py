"""The two-pass moments where rounding is worst; BatchNormalization's tests hold the rest."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers.moments import moments


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_many_values_far_from_zero(jit: bool) -> None:
    # XLA on CPU adds one after the other: near a sum of 2e8 float32 has steps of 16, and the
    # first mean is off by about 0.006. The second pass makes up for it.
    x = (1000 + 0.1 * np.random.default_rng(3).normal(size=(1 << 18, 1))).astype("float32")
    mean, variance, count = tf.function(lambda x: moments(x, [0]), jit_compile=jit)(tf.constant(x))
    assert float(count[0, 0]) == 1 << 18
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
def test_the_variance_of_a_constant_is_not_negative(jit: bool) -> None:
    """The mean of a thousand 0.1 is not quite 0.1; with an epsilon of 0 there is a root of this."""
    _, variance, _ = tf.function(lambda x: moments(x, [0]), jit_compile=jit)(
        tf.fill([1000, 1], 0.1)
    )
    # The mean is off by some 2^-24 of 0.1, and the variance by the square of that.
    assert 0 <= float(variance[0, 0]) < 1e-15


def test_valid_values_are_counted_beyond_what_float32_can_add() -> None:
    """Ones that the CPU adds in float32 come to 2^24 and no further, in sums for each channel."""
    many = (1 << 24) + (1 << 20)

    @tf.function
    def count(mask: tf.Tensor) -> tf.Tensor:
        return moments(tf.zeros([many, 2]), [0], mask)[2]

    np.testing.assert_array_equal(count(tf.ones([many, 2], tf.bool)), [[many, many]])
