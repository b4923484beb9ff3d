"""bnzoo/population.py and what it stands on: values, against NumPy in float64 and PyTorch."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import bnzoo
from bnzoo.population import estimate_population_statistics

LAYERS = {"keras": keras.layers.BatchNormalization, "bnzoo": bnzoo.layers.BatchNormalization}
EPSILON = 1e-3


@pytest.fixture(params=LAYERS)
def batch_norm(request):
    """Constructs BN with old statistics that are far off, and gamma, beta other than 1, 0."""

    def construct(**kwargs):
        return LAYERS[request.param](
            epsilon=EPSILON,
            moving_mean_initializer=keras.initializers.Constant(1e6),
            moving_variance_initializer=keras.initializers.Constant(1e6),
            gamma_initializer=keras.initializers.RandomUniform(-2, 2, seed=1),
            beta_initializer=keras.initializers.RandomUniform(-1, 1, seed=2),
            **kwargs,
        )

    return construct


def _batches(*sizes: int, shape: tuple[int, ...] = (5,), seed: int = 0) -> list[np.ndarray]:
    """Each batch and each channel with a mean and a spread of its own."""
    rng = np.random.default_rng(seed)
    channels = 1 + np.arange(shape[-1])
    return [
        np.float32(rng.normal(rng.normal(0, 2, shape[-1]), channels, (size, *shape)))
        for size in sizes
    ]


def _only(batch_norm, shape=(1,)):
    return keras.Sequential([keras.Input(shape), batch_norm()])


def _statistics(model: keras.Model) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (np.asarray(layer.moving_mean), np.asarray(layer.moving_variance))
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    ]


class Oracle:
    """Algorithm 2 in NumPy: forward passes by batch statistics, and the sums over them."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[float, np.ndarray, np.ndarray]]] = {}

    def batch_norm(self, x: np.ndarray, layer: keras.Layer) -> np.ndarray:
        flat = np.float64(x).reshape(-1, x.shape[-1])
        mean, variance = flat.mean(0), flat.var(0)
        self.seen.setdefault(layer.name, []).append((len(flat), mean, variance))
        gamma, beta = np.float64(layer.gamma), np.float64(layer.beta)
        return (x - mean) / np.sqrt(variance + EPSILON) * gamma + beta

    def population(self, layer: keras.Layer) -> tuple[np.ndarray, np.ndarray]:
        m, mean, variance = (np.array(value) for value in zip(*self.seen[layer.name], strict=True))
        if len(set(m)) == 1:  # As the paper writes it.
            return mean.mean(0), m[0] / (m[0] - 1) * variance.mean(0)
        return m @ mean / m.sum(), m @ variance / (m - 1).sum()


def test_case_19_mean_of_the_variances_not_variance_of_all(batch_norm):
    batches = [np.array([[0.0], [2.0]]), np.array([[10.0], [14.0]])]
    model = _only(batch_norm)
    for settings, variance in (({}, 5.0), ({"method": "pooled"}, 43.666667)):
        ((mean, result),) = _statistics(estimate_population_statistics(model, batches, **settings))
        np.testing.assert_allclose(mean, [6.5], rtol=1e-6)
        np.testing.assert_allclose(result, [variance], rtol=1e-6)


def test_case_21_every_batch_counts_the_same(batch_norm):
    batches = [np.array([[m - 1.0], [m + 1.0]]) for m in range(10)]
    model = _only(batch_norm)
    ((mean, variance),) = _statistics(estimate_population_statistics(model, batches))
    np.testing.assert_allclose(mean, [4.5], rtol=1e-6)
    np.testing.assert_allclose(variance, [2.0], rtol=1e-6)
    shuffled = [batches[i] for i in np.random.default_rng(0).permutation(10)]
    for again in _statistics(estimate_population_statistics(model, shuffled)):
        np.testing.assert_allclose(again, [mean, variance], rtol=1e-7)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 3, 1, 6)])
def test_deep_network_as_algorithm_2(batch_norm, sizes):
    first, dense, second = batch_norm(), keras.layers.Dense(4), batch_norm()
    model = keras.Sequential([keras.Input((3, 5)), first, keras.layers.Dropout(0.5), dense, second])
    batches = _batches(*sizes, shape=(3, 5))
    oracle = Oracle()
    for batch in batches:
        x = oracle.batch_norm(batch, first)
        oracle.batch_norm(x @ np.float64(dense.kernel) + np.float64(dense.bias), second)
    estimated = estimate_population_statistics(model, batches)
    for result, layer in zip(_statistics(estimated), (first, second), strict=True):
        # Float32 activations, a few roundings deep.
        np.testing.assert_allclose(result, oracle.population(layer), rtol=2e-5, atol=1e-6)


@pytest.mark.peers
def test_pytorch_cumulative_average_over_equal_batches(batch_norm):
    torch = pytest.importorskip("torch")
    batches = _batches(4, 4, 4, shape=(6, 5, 3))
    model = _only(batch_norm, (6, 5, 3))
    peer = torch.nn.BatchNorm2d(3, momentum=None)
    for batch in batches:
        peer(torch.from_numpy(batch.transpose(0, 3, 1, 2).copy()))
    ((mean, variance),) = _statistics(estimate_population_statistics(model, batches))
    np.testing.assert_allclose(mean, peer.running_mean.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(variance, peer.running_var.numpy(), rtol=1e-5)


def test_pooled_does_not_depend_on_how_the_data_are_split(batch_norm):
    data = np.concatenate(_batches(7, 9, 14))
    model = _only(batch_norm, (5,))
    for cuts in ([15], [1, 4, 20]):
        estimated = estimate_population_statistics(model, np.split(data, cuts), method="pooled")
        ((mean, variance),) = _statistics(estimated)
        np.testing.assert_allclose(mean, np.float64(data).mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(variance, np.float64(data).var(0, ddof=1), rtol=1e-5)


def test_small_spread_far_from_zero(batch_norm):
    batches = [1000 + 0.1 * batch for batch in _batches(64, 64, 64, shape=(1,))]
    ((mean, variance),) = _statistics(estimate_population_statistics(_only(batch_norm), batches))
    expected = np.mean([np.float64(batch).var(0, ddof=1) for batch in batches], axis=0)
    np.testing.assert_allclose(variance, expected, rtol=1e-3)  # x itself has 6e-5 of rounding
    np.testing.assert_allclose(mean, np.float64(batches).mean((0, 1)), rtol=1e-6)


def test_nothing_of_the_given_model_is_touched(batch_norm):
    def build():
        inputs = keras.Input((5,))
        x = keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotUniform(3))(inputs)
        x = keras.layers.Dropout(0.9)(batch_norm(name="bn")(x))
        model = keras.Model(inputs, keras.layers.Dense(1)(x), name="given")
        model.compile("adam", "mse")
        (batch,) = _batches(6)
        model.fit(batch, batch[:, :1], verbose=0)
        return model

    def draws():
        return [
            random.random(),
            np.random.rand(),
            float(tf.random.uniform([])),
            float(keras.random.uniform([])),
            float(keras.layers.Dense(1).kernel_initializer([1, 1])[0, 0]),
        ]

    model = build()
    before = [np.asarray(value).copy() for value in (*model.variables, *model.optimizer.variables)]
    keras.utils.set_random_seed(7)
    estimated = estimate_population_statistics(model, _batches(6, 6))
    drawn = draws()
    keras.utils.set_random_seed(7)
    assert drawn == draws()

    after = [np.asarray(value).copy() for value in (*model.variables, *model.optimizer.variables)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert model.get_layer("bn").output is not None  # has one call, as before
    assert estimated is not model
    assert estimated.name == "given"
    assert not {id(value) for value in model.variables} & {id(v) for v in estimated.variables}
    for old, new in zip(model.trainable_variables, estimated.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, new)
    # The dropout of 0.9 was off: so it is without it.
    plain = keras.Sequential([keras.Input((5,)), *model.layers[1:3]])
    np.testing.assert_array_equal(
        _statistics(estimated), _statistics(estimate_population_statistics(plain, _batches(6, 6)))
    )


def test_inference_then_normalizes_by_the_population(batch_norm):
    batches = _batches(200, 200, shape=(3,))
    layer = batch_norm()
    estimated = estimate_population_statistics(
        keras.Sequential([keras.Input((3,)), layer]), batches, method="pooled"
    )
    output = estimated.predict(np.concatenate(batches), verbose=0)
    np.testing.assert_allclose(output.mean(0), layer.beta, atol=1e-4)
    np.testing.assert_allclose(output.std(0), np.abs(layer.gamma), rtol=3e-3)


def test_nested_and_shared_layers(batch_norm):
    shared, inner = batch_norm(name="shared"), batch_norm(name="inner")
    nested = keras.Sequential([keras.Input((5,)), shared, inner], name="nested")
    inputs = keras.Input((5,))
    model = keras.Model(inputs, shared(nested(inputs)) + inputs)
    batches = _batches(6, 6, 6)
    oracle = Oracle()
    for batch in batches:
        oracle.batch_norm(oracle.batch_norm(oracle.batch_norm(batch, shared), inner), shared)
    estimated = estimate_population_statistics(model, batches)
    nested = estimated.get_layer("nested")
    assert estimated.get_layer("shared") is nested.layers[0]
    for layer, old in zip(nested.layers, (shared, inner), strict=True):
        mean, variance = oracle.population(old)
        np.testing.assert_allclose(layer.moving_mean, mean, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(layer.moving_variance, variance, rtol=2e-5)


def test_time_distributed_counts_each_step_as_a_batch(batch_norm):
    inputs = keras.Input((4, 5))
    model = keras.Model(inputs, keras.layers.TimeDistributed(batch_norm())(inputs))
    batches = _batches(6, 6, shape=(4, 5))
    steps = [np.float64(batch[:, step]) for batch in batches for step in range(4)]
    (statistics,) = _statistics(estimate_population_statistics(model, batches))
    expected = (
        np.mean([step.mean(0) for step in steps], 0),
        np.mean([step.var(0, ddof=1) for step in steps], 0),
    )
    np.testing.assert_allclose(statistics, expected, rtol=1e-5, atol=1e-6)


def test_frozen_layers_keep_and_use_their_statistics(batch_norm):
    frozen, thawed = batch_norm(trainable=False), batch_norm()
    model = keras.Sequential([keras.Input((5,)), frozen, thawed])
    mean, variance = np.float32([3, 1, 4, 1, 5]), np.float32([9, 2, 6, 5, 3])
    frozen.moving_mean.assign(mean)
    frozen.moving_variance.assign(variance)
    oracle = Oracle()
    for batch in _batches(6, 6):
        x = (batch - mean) / np.sqrt(variance + EPSILON) * np.asarray(frozen.gamma)
        oracle.batch_norm(x + np.asarray(frozen.beta), thawed)
    first, second = _statistics(estimate_population_statistics(model, _batches(6, 6)))
    np.testing.assert_array_equal(first, [mean, variance])
    np.testing.assert_allclose(second, oracle.population(thawed), rtol=2e-5, atol=1e-6)


def test_masked_values_do_not_count(batch_norm):
    inputs = keras.Input((3, 2))
    model = keras.Model(inputs, batch_norm()(keras.layers.Masking(-7.0)(inputs)))
    batches = _batches(4, 5, shape=(3, 2))
    for batch, steps in zip(batches, (1, 2), strict=True):
        batch[:, steps:] = -7.0
    seen = [np.float64(batches[0][:, :1]), np.float64(batches[1][:, :2])]
    m = [4, 10]
    mean = sum(x.sum((0, 1)) for x in seen) / sum(m)
    variance = sum(n * x.var((0, 1)) for n, x in zip(m, seen, strict=True)) / (sum(m) - 2)
    (statistics,) = _statistics(estimate_population_statistics(model, batches))
    np.testing.assert_allclose(statistics, [mean, variance], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [1, (1, 2, 3)])
def test_statistics_along_other_axes(axis):
    layer = bnzoo.layers.BatchNormalization(axis=axis, momentum=None, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((2, 3, 4)), layer])
    batches = _batches(8, 8, shape=(2, 3, 4))
    batches = [np.float32(np.float16(batch)) for batch in batches]
    reduced = (0, 2, 3) if axis == 1 else 0
    expected = [
        np.mean([np.float64(batch).mean(reduced) for batch in batches], 0),
        np.mean([np.float64(batch).var(reduced, ddof=1) for batch in batches], 0),
    ]
    (statistics,) = _statistics(estimate_population_statistics(model, batches))
    np.testing.assert_allclose(statistics, expected, rtol=1e-5, atol=1e-6)


def test_model_without_batch_normalization_is_returned():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert estimate_population_statistics(model, []) is model
