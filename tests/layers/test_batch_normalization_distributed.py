"""BatchNormalization in the replicas of a MirroredStrategy on two logical CPU devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import BatchNormalization
from tests import oracles


@pytest.fixture
def strategy() -> tf.distribute.Strategy:
    devices = tf.config.list_logical_devices("CPU")
    assert len(devices) == 2, "these tests need the two logical devices of conftest.py"
    return tf.distribute.MirroredStrategy(
        devices=[device.name for device in devices],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def build(
    strategy: tf.distribute.Strategy, shape: Sequence[int | None], **arguments: object
) -> BatchNormalization:
    with strategy.scope():
        layer = BatchNormalization(**arguments)
        layer.build(shape)
    return layer


def on_replicas(
    strategy: tf.distribute.Strategy, function: Callable, parts: Sequence[np.ndarray]
) -> list[list[np.ndarray]]:
    """Each result of `function`, for each replica called with its part."""
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group], tf.float32)
    )
    run = tf.function(lambda values: strategy.run(function, (values,)))
    results = run(values)
    local = [strategy.experimental_local_results(result) for result in results]
    return [[part.numpy() for part in result] for result in local]


def local_values(strategy: tf.distribute.Strategy, variable: keras.Variable) -> list[np.ndarray]:
    """What the variable holds on each replica."""
    return [v.numpy() for v in strategy.experimental_local_results(variable.value)]


def training_step(layer: BatchNormalization) -> Callable:
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(y**3)
        return [y, *tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])]

    return step


def column(*values: float) -> np.ndarray:
    return np.array(values, "float32").reshape(-1, 1)


def test_case_11_synchronized_counts_the_global_batch(strategy: tf.distribute.Strategy) -> None:
    layer = build(strategy, (None, 1), synchronized=True, momentum=0.0)
    on_replicas(strategy, training_step(layer), [column(0, 2), column(10)])
    for mean, variance in zip(
        local_values(strategy, layer.moving_mean),
        local_values(strategy, layer.moving_variance),
        strict=True,
    ):
        np.testing.assert_allclose([mean[0], variance[0]], [4.0, 28.0], rtol=1e-6)
    assert float(layer.moving_variance.numpy()[0]) == pytest.approx(28.0)


@pytest.mark.parametrize("axis", [-1, 1, (1, 3)])
def test_synchronized_equals_one_device(strategy: tf.distribute.Strategy, axis: object) -> None:
    random = np.random.default_rng(11)
    x = (random.normal(size=(7, 3, 4, 3)) * [0.5, 1.0, 3.0] + [5.0, 0.0, -2.0]).astype("float32")
    layer = build(strategy, x.shape, axis=axis, synchronized=True, momentum=0.0, epsilon=1e-3)
    gamma, beta = random.normal(1.0, 0.5, (2, *layer.gamma.shape))
    layer.gamma.assign(gamma)
    layer.beta.assign(beta)
    y, dx, dgamma, dbeta = on_replicas(strategy, training_step(layer), [x[:4], x[4:]])

    expected = oracles.batch_norm_step(x, gamma, beta, 1e-3, axis)
    dy = 3 * expected.y**2
    want_dx, want_dgamma, want_dbeta = oracles.batch_norm_gradients(x, gamma, 1e-3, axis, dy)
    # 1e-5 of values of order 10: sums in another order, in float32.
    np.testing.assert_allclose(np.concatenate(y), expected.y, atol=1e-4)
    np.testing.assert_allclose(np.concatenate(dx), want_dx, rtol=1e-4, atol=1e-3)
    # A replica has the gradient of its part of the loss by its copy; the sum is the whole.
    for parts, want in ((dgamma, want_dgamma), (dbeta, want_dbeta)):
        np.testing.assert_allclose(sum(parts), want.reshape(parts[0].shape), rtol=1e-4, atol=1e-3)
    variance = layer.moving_variance.numpy()
    want = expected.unbiased_variance.reshape(variance.shape)
    np.testing.assert_allclose(variance, want, rtol=1e-5)


def test_case_13_an_empty_slice_on_one_replica(strategy: tf.distribute.Strategy) -> None:
    synchronized = build(strategy, (None, 1), synchronized=True, momentum=0.0)
    on_replicas(strategy, training_step(synchronized), [column(0, 2), column()])
    for variable, want in ((synchronized.moving_mean, 1.0), (synchronized.moving_variance, 2.0)):
        np.testing.assert_allclose(local_values(strategy, variable), [[want], [want]], rtol=1e-6)

    apart = build(strategy, (None, 1), momentum=0.0)
    results = on_replicas(strategy, training_step(apart), [column(0, 2), column()])
    assert all(np.isfinite(part).all() for result in results for part in result)
    # The replica without values keeps what it had; reading gives the mean of both.
    np.testing.assert_allclose(local_values(strategy, apart.moving_variance), [[2.0], [1.0]])
    np.testing.assert_allclose(apart.moving_variance.numpy(), [1.5])


@pytest.mark.parametrize("synchronized", [False, True])
def test_case_13_fit_with_a_last_batch_for_one_replica(
    strategy: tf.distribute.Strategy, synchronized: bool
) -> None:
    with strategy.scope():
        layer = BatchNormalization(synchronized=synchronized, momentum=0.5)
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    random = np.random.default_rng(13)
    x, y = random.normal(size=(37, 3)).astype("float32"), random.normal(size=(37, 1))
    # 37 rows in batches of 6: the last one has one row, on the first replica.
    history = model.fit(x, y, batch_size=6, shuffle=False, verbose=0)

    for variable in model.variables:
        for local in strategy.experimental_local_results(variable.value):
            assert np.isfinite(local.numpy()).all(), variable.path
    kernel, bias = (w.astype("float64") for w in model.layers[1].get_weights())
    squares = []
    for start in range(0, 37, 6):
        rows = slice(start, min(start + 6, 37))
        size = rows.stop - rows.start
        half = (size + 1) // 2
        parts = [slice(0, size)] if synchronized else [slice(0, half), slice(half, size)]
        for part in parts:
            values, targets = x[rows][part], y[rows][part]
            if len(values):
                ones, zeros = np.ones(3), np.zeros(3)
                normalized = oracles.batch_norm_step(values, ones, zeros, 1e-3, -1).y
                squares.append((normalized @ kernel + bias - targets) ** 2)
    want = np.concatenate(squares).mean()
    assert history.history["loss"][0] == pytest.approx(want, rel=1e-4)


def test_case_15_synchronized_does_not_cancel(strategy: tf.distribute.Strategy) -> None:
    x = (1000 + 0.1 * np.random.default_rng(15).normal(size=(8, 16, 16, 1))).astype("float32")
    layer = build(strategy, (None, 16, 16, 1), synchronized=True, momentum=0.0)
    y, *_ = on_replicas(strategy, training_step(layer), [x[:4], x[4:]])
    variance = x.astype("float64").var(ddof=1)
    assert float(layer.moving_variance.numpy()[0]) == pytest.approx(variance, rel=0.02)
    assert np.concatenate(y).std() == pytest.approx(np.sqrt(variance / (variance + 1e-3)), rel=0.01)


def test_masked_and_synchronized(strategy: tf.distribute.Strategy) -> None:
    layer = build(strategy, (None, 3, 1), synchronized=True, momentum=0.0)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        return [layer(x, training=True, mask=x[..., 0] < 100)]

    parts = [np.array([[[0.0], [2.0], [1e9]]]), np.array([[[10.0], [1e9], [1e9]]])]
    on_replicas(strategy, step, parts)
    assert float(layer.moving_mean.numpy()[0]) == pytest.approx(4.0)
    assert float(layer.moving_variance.numpy()[0]) == pytest.approx(28.0)


def test_every_replica_infers_with_the_one_agreed_value(
    strategy: tf.distribute.Strategy, tmp_path: Path
) -> None:
    layer = build(strategy, (None, 1), momentum=0.0, epsilon=1e-3)
    on_replicas(strategy, training_step(layer), [column(0, 2), column(10, 14)])
    # Each replica has moved statistics of its own, (1, 2) and (12, 8).
    np.testing.assert_allclose(local_values(strategy, layer.moving_mean), [[1.0], [12.0]])
    assert float(layer.moving_mean.numpy()[0]) == pytest.approx(6.5)
    assert float(layer.moving_variance.numpy()[0]) == pytest.approx(5.0)

    (y,) = on_replicas(strategy, lambda x: [layer(x)], [column(6.5, 8.5), column(6.5, 4.5)])
    root = np.sqrt(5.001)
    np.testing.assert_allclose(np.concatenate(y), column(0, 2 / root, 0, -2 / root), atol=1e-6)

    model = keras.Sequential([keras.Input((1,)), layer])
    model.save(tmp_path / "model.keras")
    saved = keras.models.load_model(tmp_path / "model.keras").layers[0]
    assert float(saved.moving_mean[0]) == pytest.approx(6.5)
    checkpoint = tf.train.Checkpoint(layer=layer).save(tmp_path / "checkpoint")
    restored = BatchNormalization()
    restored.build((None, 1))
    tf.train.Checkpoint(layer=restored).restore(checkpoint).assert_consumed()
    assert float(restored.moving_variance[0]) == pytest.approx(5.0)


def test_where_replicas_cannot_agree_that_is_said(strategy: tf.distribute.Strategy) -> None:
    layer = build(strategy, (None, 3))
    with pytest.raises(RuntimeError, match="not trained here, needs the moving statistics of all"):
        on_replicas(
            strategy,
            lambda x: [tf.map_fn(lambda one: layer(one[None])[0], x)],
            [np.ones([2, 3])] * 2,
        )
