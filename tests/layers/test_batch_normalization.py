"""BatchNormalization against the equations of the paper, and the cases from the field."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import BatchNormalization
from tests import oracles
from tests.layers.modes import MODES

# Every path: fused with channels last, first and in the middle, ranks 2 to 5, per-activation
# statistics that the kernel can see as one axis, and those that it cannot.
SHAPES = {
    "dense": ((6, 3), -1),
    "sequence": ((4, 5, 3), -1),
    "sequence_first": ((4, 3, 5), 1),
    "image": ((3, 4, 5, 3), -1),
    "image_first": ((3, 3, 4, 5), 1),
    "image_middle": ((3, 4, 3, 5), 2),
    "volume": ((2, 3, 4, 2, 3), -1),
    "volume_first": ((2, 3, 3, 4, 2), 1),
    "activation": ((9, 2, 3, 4), (1, 2, 3)),
    "rows": ((5, 2, 3, 4), (1, 2)),
    "rows_and_channels": ((5, 2, 3, 4), [-1, 1]),
}
EPSILON = 1e-3


class Case:
    """A built layer with parameters and statistics that are not those it starts with."""

    def __init__(self, name: str, seed: int = 7, **arguments: Any) -> None:
        self.shape, self.axis = SHAPES[name]
        self.random = np.random.default_rng(seed)
        reduced = oracles.reduction_axes(len(self.shape), self.axis)
        kept = tuple(n for i, n in enumerate(self.shape) if i not in reduced)
        per_channel = tuple(1 if i in reduced else n for i, n in enumerate(self.shape))
        deviation = self.random.uniform(0.3, 3.0, per_channel)
        center = self.random.normal(0.0, 2.0, per_channel)
        self.x = (self.random.normal(size=self.shape) * deviation + center).astype("float32")
        self.dy = self.random.normal(size=self.shape).astype("float32")
        self.gamma, self.beta, self.mean = self.random.normal(1.0, 1.0, (3, *kept))
        self.variance = self.random.uniform(0.2, 4.0, kept)
        self.layer = BatchNormalization(axis=self.axis, epsilon=EPSILON, **arguments)
        self.layer.build((None, *self.shape[1:]))
        self.layer.set_weights([self.gamma, self.beta, self.mean, self.variance])

    def moved(self, old: np.ndarray, batch: np.ndarray, momentum: float) -> np.ndarray:
        """The rule of the moving statistics."""
        return momentum * old + (1 - momentum) * batch.reshape(old.shape)


def value(variable: keras.Variable) -> np.ndarray:
    return np.asarray(variable.numpy(), "float64")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHAPES)
def test_training_step(name: str, mode: str) -> None:
    case = Case(name, momentum=0.7)

    def step(x: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = case.layer(x, training=True)
        return y, tape.gradient(y, [x, case.layer.gamma.value, case.layer.beta.value], dy)

    y, gradients = MODES[mode](step)(tf.constant(case.x), tf.constant(case.dy))

    expected = oracles.batch_norm_step(case.x, case.gamma, case.beta, EPSILON, case.axis)
    # float32 with values of order 1 to 10: some 1e-7 of rounding, times the few dozen sums.
    np.testing.assert_allclose(y, expected.y, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(
        value(case.layer.moving_mean),
        case.moved(case.mean, expected.mean, 0.7),
        rtol=1e-5,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        value(case.layer.moving_variance),
        case.moved(case.variance, expected.unbiased_variance, 0.7),
        rtol=1e-5,
    )
    of_gradients = oracles.batch_norm_gradients(case.x, case.gamma, EPSILON, case.axis, case.dy)
    for got, want in zip(gradients, of_gradients, strict=True):
        np.testing.assert_allclose(got, want.reshape(got.shape), rtol=2e-4, atol=5e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("frozen", [False, True], ids=["inference", "frozen"])
def test_inference(name: str, mode: str, frozen: bool) -> None:
    case = Case(name)
    case.layer.trainable = not frozen

    def step(x: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = case.layer(x, training=frozen)
        return y, tape.gradient(y, x, dy)

    y, dx = MODES[mode](step)(tf.constant(case.x), tf.constant(case.dy))
    arguments = (case.gamma, case.beta, case.mean, case.variance, EPSILON, case.axis)
    expected = oracles.batch_norm_inference(case.x, *arguments)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=2e-5)
    slope = oracles.batch_norm_inference(np.ones_like(case.x), *arguments)
    slope -= oracles.batch_norm_inference(np.zeros_like(case.x), *arguments)
    np.testing.assert_allclose(dx, slope * case.dy, rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(case.layer.moving_mean, case.mean.astype("float32"))
    np.testing.assert_array_equal(case.layer.moving_variance, case.variance.astype("float32"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("policy", "variables", "tolerance"),
    [
        # Half precision: the arithmetic is float32, but inputs and outputs are rounded. Values
        # of about 8 then have steps of 2^-8 (float16 inputs of 4 to 8) and 2^-5 (bfloat16).
        ("float16", "float16", 2e-2),
        ("mixed_float16", "float32", 2e-2),
        ("bfloat16", "bfloat16", 1e-1),
        ("mixed_bfloat16", "float32", 1e-1),
        ("float64", "float64", 1e-12),
    ],
)
def test_dtype_policies(policy: str, variables: str, tolerance: float, mode: str) -> None:
    case = Case("image", momentum=0.0, dtype=policy)
    y = MODES[mode](lambda x: case.layer(x, training=True))(tf.constant(case.x, "float64"))
    assert y.dtype == case.layer.compute_dtype
    assert case.layer.gamma.dtype == variables
    assert case.layer.moving_variance.dtype == ("float64" if policy == "float64" else "float32")
    gamma, beta = value(case.layer.gamma), value(case.layer.beta)
    rounded = tf.cast(tf.constant(case.x), y.dtype).numpy()
    expected = oracles.batch_norm_step(rounded, gamma, beta, EPSILON, case.axis)
    np.testing.assert_allclose(np.asarray(y, "float64"), expected.y, atol=tolerance, rtol=0)
    # The statistics are of the rounded inputs, and themselves not rounded to half.
    rtol = 1e-12 if policy == "float64" else 1e-5
    want = expected.unbiased_variance.ravel()
    np.testing.assert_allclose(value(case.layer.moving_variance), want, rtol=rtol)
    inferred = case.layer(tf.constant(case.x, "float64"))
    assert inferred.dtype == case.layer.compute_dtype


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", [-1, 1, (1, 2, 3), (1, 3)])
def test_an_empty_batch_moves_nothing_and_has_zero_gradients(axis: Any, mode: str) -> None:
    layer = BatchNormalization(axis=axis, momentum=0.5)
    layer.build((None, 2, 3, 4))

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            y = layer(x, training=True)
        return [y, *tape.gradient(y, [layer.gamma.value, layer.beta.value])]

    y, dgamma, dbeta = MODES[mode](step)(tf.zeros([0, 2, 3, 4]))
    assert y.shape == (0, 2, 3, 4)
    assert layer(tf.zeros([0, 2, 3, 4])).shape == (0, 2, 3, 4)
    for got, want in ((dgamma, 0), (dbeta, 0), (layer.moving_mean, 0), (layer.moving_variance, 1)):
        np.testing.assert_array_equal(got, np.full(got.shape, want, "float32"))


@pytest.mark.parametrize("mode", MODES)
def test_cumulative_average(mode: str) -> None:
    layer = BatchNormalization(momentum=None, moving_variance_initializer="zeros")
    layer.build((None, 1))
    step = MODES[mode](lambda x: layer(x, training=True))
    # Batches of one value and of none in between: the first counts for the mean alone.
    for batch in ([0.0, 2.0], [5.0], [], [10.0, 14.0]):
        step(tf.reshape(tf.constant(batch), [-1, 1]))
    assert float(layer.moving_mean[0]) == pytest.approx((1 + 5 + 12) / 3)
    assert float(layer.moving_variance[0]) == pytest.approx((2 + 8) / 2)
    assert [weight.name for weight in layer.weights][-1] == "batches_seen"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "mask_shape"),
    [
        ("sequence", (4, 5, 1)),
        ("sequence_first", (4, 1, 5)),
        ("dense", (6, 1)),
        ("image", (3, 4, 5, 1)),
        ("activation", (9, 2, 3, 1)),
    ],
)
def test_masked(name: str, mask_shape: tuple[int, ...], mode: str) -> None:
    case = Case(name, momentum=0.0)
    mask = case.random.uniform(size=mask_shape) < 0.6
    mask[:2] = True  # Two valid values for each statistic.
    poisoned = np.where(mask, case.x, np.nan).astype("float32")
    given = np.squeeze(mask, mask_shape.index(1))
    y = MODES[mode](lambda x: case.layer(x, training=True, mask=given))(tf.constant(poisoned))

    expected = oracles.batch_norm_step(case.x, case.gamma, case.beta, EPSILON, case.axis, mask)
    valid = np.broadcast_to(mask, case.shape)
    np.testing.assert_allclose(y.numpy()[valid], expected.y[valid], rtol=1e-4, atol=2e-5)
    for got, want in (
        (case.layer.moving_mean, expected.mean),
        (case.layer.moving_variance, expected.unbiased_variance),
    ):
        np.testing.assert_allclose(value(got), want.reshape(got.shape), rtol=1e-5, atol=1e-6)


def test_a_mask_without_valid_values_moves_nothing() -> None:
    layer = BatchNormalization(momentum=0.0)
    y = layer(tf.fill([2, 3, 4], 7.0), training=True, mask=tf.zeros([2, 3], tf.bool))
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(layer.moving_mean, np.zeros(4))
    np.testing.assert_array_equal(layer.moving_variance, np.ones(4))


def test_a_mask_from_a_masking_layer_arrives() -> None:
    x = np.array([[[1.0], [2.0], [0.0]], [[6.0], [0.0], [0.0]]], "float32")
    layer = BatchNormalization(momentum=0.0)
    keras.Sequential([keras.layers.Masking(), layer])(x, training=True)
    assert float(layer.moving_mean[0]) == pytest.approx(3.0)
    assert float(layer.moving_variance[0]) == pytest.approx(7.0)


@pytest.mark.parametrize("features", [2, 4])
def test_a_mask_of_sequences_with_statistics_for_each_step(features: int) -> None:
    """It says which steps are there, whatever `axis` is, also where there are as many features."""
    x = np.random.default_rng(8).normal(3, 2, (5, 4, features)).astype(np.float32)
    x[2:, 3:] = 0
    mine, keras_layer = BatchNormalization(axis=1), keras.layers.BatchNormalization(axis=1)
    for layer in (mine, keras_layer):
        layer.momentum = 0.0
        keras.Sequential([keras.layers.Masking(), layer])(x, training=True)
    np.testing.assert_allclose(mine.moving_mean, keras_layer.moving_mean, rtol=1e-5)
    count = np.array([5, 5, 5, 2]) * features
    expected = np.array(keras_layer.moving_variance) * count / (count - 1)
    np.testing.assert_allclose(mine.moving_variance, expected, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("scale", "center"), [(False, True), (True, False), (False, False)])
def test_without_gamma_or_beta(scale: bool, center: bool, training: bool, mode: str) -> None:
    case = Case("image")
    layer = BatchNormalization(scale=scale, center=center, epsilon=EPSILON)
    layer.build(case.shape)
    y = MODES[mode](lambda x: layer(x, training=training))(tf.constant(case.x))
    ones, zeros = np.ones(3), np.zeros(3)
    if training:
        expected = oracles.batch_norm_step(case.x, ones, zeros, EPSILON, -1).y
    else:
        expected = oracles.batch_norm_inference(case.x, ones, zeros, zeros, ones, EPSILON, -1)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=2e-5)
    names = ["gamma"] * scale + ["beta"] * center + ["moving_mean", "moving_variance"]
    assert [weight.name for weight in layer.weights] == names


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("epsilon", [0.0, 1e-10, 1e-5])
def test_a_tiny_epsilon(epsilon: float, mode: str) -> None:
    x = np.random.default_rng(2).normal(size=(16, 3)).astype("float32") * 1e-4
    layer = BatchNormalization(epsilon=epsilon, momentum=0.0)
    layer.build(x.shape)
    ones, zeros = np.ones(3), np.zeros(3)
    y = MODES[mode](lambda x: layer(x, training=True))(tf.constant(x))
    expected = oracles.batch_norm_step(x, ones, zeros, epsilon, -1)
    np.testing.assert_allclose(y, expected.y, rtol=1e-4, atol=1e-5)
    y = MODES[mode](lambda x: layer(x))(tf.constant(x))
    statistics = expected.mean, expected.unbiased_variance
    expected_y = oracles.batch_norm_inference(x, ones, zeros, *statistics, epsilon, -1)
    np.testing.assert_allclose(y, expected_y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_unknown_batch_height_and_width_do_not_retrace(mode: str) -> None:
    layer = BatchNormalization(momentum=0.0)
    layer.build((None, None, None, 3))
    traces = []

    def step(x: tf.Tensor) -> tf.Tensor:
        traces.append(x.shape)
        return layer(x, training=True)

    signature = [tf.TensorSpec([None, None, None, 3])]
    compiled = tf.function(step, input_signature=signature, jit_compile=mode == "xla")
    for shape in ((2, 3, 4, 3), (5, 6, 2, 3), (1, 1, 1, 3)):
        x = np.random.default_rng(1).normal(1.0, 2.0, shape).astype("float32")
        y = compiled(tf.constant(x))
        expected = oracles.batch_norm_step(x, np.ones(3), np.zeros(3), EPSILON, -1)
        np.testing.assert_allclose(y, expected.y, rtol=1e-4, atol=2e-5)
    assert len(traces) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["dense", "image", "image_first", "rows_and_channels"])
def test_gradient_of_the_gradient(name: str, mode: str) -> None:
    case = Case(name)

    def squared_norm_of_gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = case.layer(x, training=True)
        return tf.reduce_sum(tape.gradient(y, x, case.dy) ** 2)

    def second(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            norm = squared_norm_of_gradient(x)
        return tape.gradient(norm, x)

    got = MODES[mode](second)(tf.constant(case.x)).numpy().ravel()

    def oracle(x: np.ndarray) -> float:
        dx, _, _ = oracles.batch_norm_gradients(x, case.gamma, EPSILON, case.axis, case.dy)
        return float((dx**2).sum())

    x, step = case.x.astype("float64"), 1e-5
    for index in case.random.choice(x.size, 10, replace=False):
        shift = np.zeros(x.size)
        shift[index] = step
        shift = shift.reshape(x.shape)
        # Central differences in float64 are good to about step^2 = 1e-10.
        want = (oracle(x + shift) - oracle(x - shift)) / (2 * step)
        assert got[index] == pytest.approx(want, rel=2e-3, abs=2e-3)


def test_a_bias_before_the_layer_does_not_drift() -> None:
    """Section 2: the gradient must pass through the statistics, so a bias gets none."""
    dense = keras.layers.Dense(3)
    layer = BatchNormalization()
    x = tf.random.normal([8, 4], seed=1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(dense(x), training=True) ** 3)
    gradient = tape.gradient(loss, dense.bias.value)
    np.testing.assert_allclose(gradient, np.zeros(3), atol=1e-5)


def test_larger_weights_get_smaller_gradients() -> None:
    """Section 3.3: BN((aW)u) = BN(Wu), and its gradient by aW is 1/a of that by W."""
    u = tf.random.normal([16, 4], seed=1)
    w = tf.random.normal([4, 3], seed=2)
    layer = BatchNormalization(epsilon=0.0)

    def outputs_and_gradient(w: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = layer(u @ w, training=True)
            loss = tf.reduce_sum(y**3)
        return y, tape.gradient(loss, w)

    (y, gradient), (y_scaled, gradient_scaled) = (
        outputs_and_gradient(w),
        outputs_and_gradient(8 * w),
    )
    np.testing.assert_allclose(y, y_scaled, atol=1e-5)
    np.testing.assert_allclose(gradient, 8 * gradient_scaled, rtol=1e-4, atol=1e-4)
