"""BatchNormalization on inputs from the field, by their numbers, with their right values."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import BatchNormalization
from tests.layers.modes import MODES, small


@pytest.mark.parametrize("mode", MODES)
def test_case_1_unbiased_variance_is_stored_and_biased_used(mode: str) -> None:
    layer = BatchNormalization(momentum=0.0)
    layer.build((None, 1))
    y = MODES[mode](lambda x: layer(x, training=True))(tf.constant([[1.0], [2.0], [3.0], [4.0]]))
    assert float(layer.moving_mean[0]) == pytest.approx(2.5)
    assert float(layer.moving_variance[0]) == pytest.approx(5 / 3, rel=1e-6)
    assert float(y[0, 0]) == pytest.approx(-1.341104, abs=1e-6)

    layer = BatchNormalization(momentum=0.9)
    layer(tf.constant([[8.0], [12.0]]), training=True)
    assert float(layer.moving_mean[0]) == pytest.approx(1.0)
    assert float(layer.moving_variance[0]) == pytest.approx(1.7)


@pytest.mark.parametrize("mode", MODES)
def test_case_3_one_value_per_channel(mode: str) -> None:
    layer = BatchNormalization(momentum=0.99)
    layer.build((None, None, None, 2))
    layer.beta.assign([0.5, -0.5])
    y = MODES[mode](lambda x: layer(x, training=True))(tf.fill([1, 1, 1, 2], 5.0))
    np.testing.assert_allclose(tf.reshape(y, [2]), [0.5, -0.5], atol=1e-6)
    np.testing.assert_allclose(layer.moving_mean, [0.05, 0.05], rtol=1e-5)
    np.testing.assert_array_equal(layer.moving_variance, [1.0, 1.0])


@pytest.mark.parametrize("mode", ["graph", "small", "xla"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_case_3_of_unknown_sizes(axis: int, mode: str) -> None:
    """The values behind each statistic are counted as the graph runs."""
    layer = BatchNormalization(axis=axis, momentum=0.5)
    shape = [None, 2, None, None] if axis == 1 else [None, None, None, 2]
    layer.build(shape)
    step = tf.function(
        lambda x: layer(x, training=True),
        input_signature=[tf.TensorSpec(shape)],
        jit_compile=mode == "xla",
    )
    if mode == "small":
        step = small(step)
    rng = np.random.default_rng(3)
    for others in ([1, 1, 1], [3, 2, 4], [2, 1, 1]):
        x = rng.normal(3, 2, [*others, 2]).astype("float32")
        mean, variance = layer.moving_mean.numpy(), layer.moving_variance.numpy()
        step(tf.constant(np.moveaxis(x, -1, axis)))
        values = x.reshape(-1, 2).astype("float64")
        mean = (mean + values.mean(0)) / 2
        if len(values) > 1:
            variance = (variance + values.var(0, ddof=1)) / 2
        np.testing.assert_allclose(layer.moving_mean, mean, rtol=1e-5)
        np.testing.assert_allclose(layer.moving_variance, variance, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("center", "deviation"), [(1000, 1.0), (100, 0.1), (1000, 0.1)])
def test_case_5_no_cancellation(center: float, deviation: float, mode: str) -> None:
    layer = BatchNormalization(momentum=0.0)
    layer.build((None, 16, 16, 1))
    x = (center + deviation * np.random.default_rng(5).normal(size=(8, 16, 16, 1))).astype(
        "float32"
    )
    y = MODES[mode](lambda x: layer(x, training=True))(tf.constant(x))
    true = x.astype("float64").var(ddof=1)
    assert float(layer.moving_variance[0]) == pytest.approx(true, rel=0.02)
    biased = x.astype("float64").var()
    assert float(np.std(y)) == pytest.approx(np.sqrt(biased / (biased + 1e-3)), rel=0.01)


def test_case_7_a_frozen_layer_runs_in_inference_mode() -> None:
    x = np.array([[10.0], [20.0]], "float32")
    layer = BatchNormalization(trainable=False)
    np.testing.assert_allclose(layer(x, training=True), [[9.995004], [19.990007]], rtol=1e-6)
    np.testing.assert_array_equal(layer.moving_mean, [0.0])

    inner = keras.Sequential([keras.Input((1,)), BatchNormalization()])
    outer = keras.Sequential([keras.Input((1,)), inner])
    outer.trainable = False
    outer.compile("sgd", "mse")
    outer.fit(x, x, verbose=0)
    np.testing.assert_array_equal(inner.layers[0].moving_mean, [0.0])
    outer.trainable = True
    outer.compile("sgd", "mse")
    outer.fit(x, x, verbose=0)
    np.testing.assert_allclose(inner.layers[0].moving_mean, [0.15], rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_case_9_one_layer_on_two_branches(mode: str) -> None:
    layer = BatchNormalization(momentum=0.5)
    layer.build((None, 1))

    def branches(a: tf.Tensor, b: tf.Tensor) -> list[tf.Tensor]:
        return [layer(a, training=True), layer(b, training=True)]

    MODES[mode](branches)(tf.constant([[0.0], [2.0]]), tf.constant([[10.0], [14.0]]))
    # One after the other: ((0 + 1) / 2 + 12) / 2 and ((1 + 2) / 2 + 8) / 2.
    assert float(layer.moving_mean[0]) == pytest.approx(6.25)
    assert float(layer.moving_variance[0]) == pytest.approx(4.75)
