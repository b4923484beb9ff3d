"""BatchNormalization for any shape, axis, dtype, scale and offset, against NumPy float64."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from bnzoo.layers import BatchNormalization
from tests import oracles
from tests.layers.modes import MODES


@st.composite
def layers_and_inputs(draw: st.DrawFn) -> dict:
    rank = draw(st.integers(2, 5))
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=rank, max_size=rank)))
    # A batch of one dense row has one value per statistic: the variance is 0 and the rest
    # trivial, which other tests hold.
    shape = (shape[0] + 1, *shape[1:])
    axes = st.lists(st.integers(1, rank - 1), min_size=1, max_size=rank - 1, unique=True)
    axis = draw(st.one_of(st.integers(1, rank - 1), st.just(-1), axes))
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    scale = 10.0 ** draw(st.floats(-3, 4))
    # At most 1e3 deviations from zero: beyond that the input's own rounding to float32 shows.
    offset = scale * draw(st.floats(-1e3, 1e3))
    return {
        "x": random.normal(size=shape) * scale + offset,
        "dy": random.normal(size=shape),
        "axis": axis,
        "random": random,
        "dtype": draw(st.sampled_from(["float32", "float32", "float64"])),
        "epsilon": draw(st.sampled_from([1e-3, 1e-5, 1e-10])),
        "momentum": draw(st.sampled_from([0.0, 0.9, 0.99])),
        "run_by": draw(st.sampled_from(["eager", "graph", "small"])),
    }


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layers_and_inputs())
def test_training_step_and_gradients(case: dict) -> None:
    x = case["x"].astype(case["dtype"])
    axis, epsilon, momentum = case["axis"], case["epsilon"], case["momentum"]
    layer = BatchNormalization(axis=axis, epsilon=epsilon, momentum=momentum, dtype=case["dtype"])
    layer.build(x.shape)
    gamma, beta = case["random"].normal(1.0, 0.5, (2, *layer.gamma.shape))
    layer.gamma.assign(gamma)
    layer.beta.assign(beta)

    def step(x: tf.Tensor, dy: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return [y, *tape.gradient(y, [x, layer.gamma.value, layer.beta.value], dy)]

    dy = case["dy"].astype(case["dtype"])
    run = MODES[case["run_by"]](step)
    y, dx, dgamma, dbeta = (np.asarray(v, "float64") for v in run(tf.constant(x), tf.constant(dy)))

    axis = tuple(axis) if isinstance(axis, list) else axis
    expected = oracles.batch_norm_step(x, gamma, beta, epsilon, axis)
    want_dx, want_dgamma, want_dbeta = oracles.batch_norm_gradients(x, gamma, epsilon, axis, dy)
    # The error of `x - mean` is the rounding of the mean, half a unit in its last place (and
    # a few more from summing); in units of the deviation it reaches the output.
    unit = np.finfo(case["dtype"]).eps
    deviation = np.sqrt(expected.biased_variance + epsilon)
    relative = 8 * unit * (1 + np.abs(x).max() / deviation)
    gain = np.abs(gamma).max() + np.abs(beta).max() + 1
    assert (np.abs(y - expected.y) <= relative * gain * 4).all()
    slope = np.abs(gamma).reshape(deviation.shape) / deviation
    size = np.abs(dy).max() * (1 + np.abs(expected.y).max() ** 2)
    assert (np.abs(dx - want_dx) <= relative * slope * size * 16).all()
    for got, want in ((dgamma, want_dgamma), (dbeta, want_dbeta)):
        bound = relative * size * expected.count * 4
        assert (np.abs(got.reshape(want.shape) - want) <= bound).all()

    moved = momentum * 0.0 + (1 - momentum) * expected.mean
    got = layer.moving_mean.numpy().reshape(moved.shape)
    assert (np.abs(got - moved) <= 8 * unit * (1 + np.abs(x).max())).all()
    moved = momentum * 1.0 + (1 - momentum) * expected.unbiased_variance
    got = layer.moving_variance.numpy().reshape(moved.shape)
    error = relative * expected.unbiased_variance * 16 + 8 * unit * (momentum > 0)
    assert (np.abs(got - moved) <= error).all()
    assert (got >= 0).all()
