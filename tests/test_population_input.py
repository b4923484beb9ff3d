"""bnzoo/population.py: what it takes for a model and batches, and what it refuses."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import bnzoo
from bnzoo.population import estimate_population_statistics

X = np.float32(np.random.default_rng(0).normal(3, 2, (12, 4)))


def _model(*more: keras.Layer) -> keras.Sequential:
    layer = bnzoo.layers.BatchNormalization(name="bn")
    return keras.Sequential([keras.Input((4,), name="a"), layer, *more], name="it")


def _variance(model: keras.Model, batches: object, **settings: object) -> np.ndarray:
    estimated = estimate_population_statistics(model, batches, **settings)
    return np.asarray(estimated.get_layer("bn").moving_variance)


HALVES = [X[:6], X[6:]]
DATASET = tf.data.Dataset.from_tensor_slices((X, X[:, 0]))


@pytest.mark.parametrize(
    ("batches", "steps"),
    [
        (HALVES, None),
        ([*HALVES, 100 * X], 2),
        ([(half, half[:, 0]) for half in HALVES], None),
        ([(half, half[:, 0], half[:, 1]) for half in HALVES], None),
        ([np.float64(half) for half in HALVES], None),
        (DATASET.batch(6), None),
        (DATASET.batch(6).repeat(), 2),
        (DATASET.map(lambda x, y: x).batch(6), None),
        ([HALVES[0], X[:0], HALVES[1]], None),
    ],
)
def test_forms_of_batches(batches, steps):
    expected = (HALVES[0].var(0, ddof=1) + HALVES[1].var(0, ddof=1)) / 2
    np.testing.assert_allclose(_variance(_model(), batches, steps=steps), expected, rtol=1e-5)


def test_a_generator_gives_no_more_than_the_steps():
    batches = iter([*HALVES, 100 * X])
    assert np.all(_variance(_model(), batches, steps=2) < 20)
    np.testing.assert_array_equal(next(batches), 100 * X)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_inputs_of_a_list_by_name(names):
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    model = keras.Model([a, b], bnzoo.layers.BatchNormalization(name="bn")(a - 2 * b))
    given = {"a": X, "b": X[::-1]}
    batches = [({name: given[name] for name in names}, X)]
    expected = (X - 2 * X[::-1]).var(0, ddof=1)
    np.testing.assert_allclose(_variance(model, batches), expected, rtol=1e-5)


def test_strings_for_a_model_that_takes_them():
    inputs = keras.Input((1,), dtype="string")
    numbers = keras.layers.StringLookup(vocabulary=["x", "y"], output_mode="multi_hot")(inputs)
    model = keras.Model(inputs, bnzoo.layers.BatchNormalization(name="bn")(numbers))
    batches = [tf.constant([["x"], ["y"], ["y"]])]
    np.testing.assert_allclose(_variance(model, batches), [0, 1 / 3, 1 / 3], rtol=1e-5)


def test_inputs_by_name():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
    layer = bnzoo.layers.BatchNormalization(name="bn")
    model = keras.Model(inputs, layer(inputs["a"] - 2 * inputs["b"]))
    batches = [{"b": half[::-1], "a": half} for half in HALVES]
    expected = [(half - 2 * half[::-1]).var(0, ddof=1) for half in HALVES]
    np.testing.assert_allclose(_variance(model, batches), np.mean(expected, 0), rtol=1e-5)


class Derived(keras.layers.BatchNormalization):
    pass


class Hiding(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="hiding")
        self.inner = keras.layers.BatchNormalization(name="inner")

    def call(self, inputs):
        return self.inner(inputs)


class Subclassed(keras.Model):
    def call(self, inputs):
        return inputs


def _frozen() -> keras.Model:
    model = _model()
    model.trainable = False
    return model


RAGGED = tf.ragged.constant([[1.0, 2.0], [3.0]])
INFINITE = np.where(X[5, 2] == X, np.inf, X)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "`batches` must not be empty. Received: 0 batches"),
        (DATASET.batch(6).repeat(), "`steps` must be given where `batches` has no end"),
        ([X[:0]], "each channel at least two values in one batch. Received: 0 values .*'bn'"),
        ([X[:1], X[1:2]], "at least two values in one batch. Received: 2 values for layer 'bn'"),
        ([X, X[:, :3]], r"fit the inputs of model .*\(None, 4\). Received: .* 1 .*\(12, 3\)"),
        ([X[:, :, None, None]], r"of shape \(None, 4\). Received: .* 0 of shape \(12, 4, 1, 1\)"),
        ([3.0], "must hold tensors with a batch axis. Received: batch 0 with a scalar"),
        (
            [X, {"x": X}],
            r"shape \{'a': \(None, 4\)\}. Received: batch 1 of shape \{'x': \(12, 4\)\}",
        ),
        ([X, (X, X, X, X)], r"`\(x, y\)` or .*`. Received: batch 1, a tuple of 4"),
        ([[X] * 5], r"`\(x, y\)` or .*`. Received: batch 0, a list of 5"),
        ([X, ()], "Received: batch 1, a tuple of 0"),
        (
            [np.full((2, 4), "a")],
            "hold real numbers for model 'it'. Received: batch 0 of dtype str",
        ),
        ([X + 1j], "`batches` must hold real numbers .* Received: batch 0 of dtype complex64"),
        ([RAGGED], "`batches` must hold tensors, .* Received: batch 0 with a RaggedTensor"),
        (tf.data.Dataset.from_tensors((RAGGED, 0)), "Received: batch 0 with a RaggedTensor"),
        ([tf.sparse.from_dense(X)], "Received: batch 0 with a SparseTensor"),
        ([(None, X)], "`batches` must hold tensors, .* Received: batch 0 with a NoneType"),
        ([np.array([[1, None]], object)], "Received: batch 0 with a ndarray"),
        ([X, INFINITE], "finite activations. Received: batch 1, .* into layer 'bn' are not"),
    ],
)
def test_batches_that_are_refused(batches, message):
    with pytest.raises(ValueError, match=message):
        estimate_population_statistics(_model(), batches)


@pytest.mark.parametrize(
    ("batches", "kind"),
    [
        (X, "ndarray"),
        (tf.constant(X), "EagerTensor"),
        (None, "NoneType"),
        ("images", "str"),
        ({"a": X}, "dict"),
    ],
)
def test_what_is_not_batches(batches, kind):
    with pytest.raises(TypeError, match=f"`batches` must be an iterable.*Received: one {kind}"):
        estimate_population_statistics(_model(), batches)


def test_the_layer_where_activations_stop_being_finite_is_named():
    square = keras.layers.Lambda(lambda x: tf.exp(100 * x))
    last = keras.layers.BatchNormalization(name="last")
    nested = keras.Sequential([keras.Input((4,)), square, last], name="nested")
    with pytest.raises(ValueError, match=r"batch 0, .* into layer 'nested/last' are not"):
        estimate_population_statistics(_model(nested), [X])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Subclassed(), "`model` must be a functional or Sequential model"),
        (keras.Sequential([keras.layers.BatchNormalization()]), "`model` must be built"),
        (_model(Derived(name="odd")), "Received: 'odd' of the derived class Derived"),
        (_model(Hiding()), "Received: 'inner' inside 'hiding' of class Hiding"),
        (_model(keras.layers.BatchNormalization(renorm=True, name="re")), "'re' with renorm=True"),
        (_frozen(), "a BatchNormalization layer that is not frozen.*Received: 1, all frozen"),
    ],
)
def test_models_that_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        estimate_population_statistics(model, [X])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 2}, "`batches` must have at least steps=2 batches. Received: 1"),
        ({"steps": 0}, "`steps` must be None or a whole number >= 1. Received: steps=0"),
        ({"steps": True}, "Received: steps=True"),
        ({"steps": 1.5}, "Received: steps=1.5"),
        ({"method": ["pooled"]}, r"Received: method=\['pooled'\]"),
        (
            {"method": "paper"},
            "`method` must be one of 'algorithm_2', 'pooled'. Received: method='paper'",
        ),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        estimate_population_statistics(_model(), [X], **settings)
