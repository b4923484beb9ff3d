"""bnzoo.population.PopulationStatistics: when it acts in `fit`, and that it helps."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import bnzoo
from bnzoo.population import PopulationStatistics, estimate_population_statistics

X = np.float32(np.random.default_rng(0).normal(3, 2, (12, 4)))
Y = X[:, :1]
HALVES = [X[:6], X[6:]]


def _model(batch_norm=bnzoo.layers.BatchNormalization, **compiling: object) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), batch_norm(), keras.layers.Dense(1)]
    )
    model.compile(**{"optimizer": keras.optimizers.SGD(0.01), "loss": "mse", **compiling})
    return model


def _assert_holds_the_population_of_its_weights(model: keras.Model) -> None:
    expected = estimate_population_statistics(model, HALVES)
    for name in ("moving_mean", "moving_variance"):
        result, value = (np.asarray(getattr(m.layers[1], name)) for m in (model, expected))
        np.testing.assert_array_equal(result, value)


@pytest.mark.parametrize(
    "batch_norm", [keras.layers.BatchNormalization, bnzoo.layers.BatchNormalization]
)
def test_sets_the_statistics_when_training_ends(batch_norm):
    model = _model(batch_norm)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[PopulationStatistics(HALVES)])
    _assert_holds_the_population_of_its_weights(model)


class Noting(keras.callbacks.Callback):
    """Notes at each epoch whether the model holds the population statistics."""

    def on_epoch_end(self, epoch, logs=None):
        expected = estimate_population_statistics(self.model, HALVES).layers[1]
        held = np.array_equal(expected.moving_variance, self.model.layers[1].moving_variance)
        self.held.append(held)
        if held and "val_loss" in logs:
            np.testing.assert_allclose(
                logs["val_loss"], self.model.evaluate(X, Y, verbose=0), rtol=1e-6
            )

    def on_train_begin(self, logs=None):
        self.held = []


@pytest.mark.parametrize("validation", [{}, {"validation_data": (X, Y)}])
def test_every_so_many_epochs_and_before_their_validation(validation):
    model, noting = _model(), Noting()
    callbacks = [PopulationStatistics(HALVES, every=2), noting]
    model.fit(X, Y, epochs=3, verbose=0, callbacks=callbacks, **validation)
    assert noting.held == [False, True, False]
    _assert_holds_the_population_of_its_weights(model)


def test_training_goes_on_as_without_it():
    def fit(*callbacks):
        keras.utils.set_random_seed(1)
        model = _model()
        model.fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
        return model.trainable_variables

    for with_it, without in zip(fit(PopulationStatistics(HALVES, every=1)), fit(), strict=True):
        np.testing.assert_array_equal(with_it, without)


def test_statistics_are_those_of_averaged_weights():
    optimizer = keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.9)
    model = _model(optimizer=optimizer)
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[PopulationStatistics(HALVES, every=1)])
    np.testing.assert_array_equal(
        model.layers[0].kernel, optimizer._model_variables_moving_average[0]
    )
    _assert_holds_the_population_of_its_weights(model)


def test_model_without_batch_normalization_trains():
    trained = []
    for callbacks in ([], [PopulationStatistics(HALVES)]):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        before = model.get_weights()
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0, callbacks=callbacks)
        trained.append(model.get_weights())
        assert any((new != old).any() for new, old in zip(trained[-1], before, strict=True))
    for without, with_it in zip(*trained, strict=True):
        np.testing.assert_array_equal(with_it, without)


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_every_is_a_number_of_epochs(every):
    with pytest.raises(ValueError, match=f"`every` must be None or a whole number.*every={every}"):
        PopulationStatistics(HALVES, every=every)


def test_a_frozen_model_is_refused_before_training():
    model = _model()
    model.layers[1].trainable = False
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="all frozen"):
        model.fit(X, Y, verbose=0, callbacks=[PopulationStatistics(HALVES)])
    assert model.optimizer.iterations == 0


def test_a_spent_generator_is_refused():
    model = _model()
    callback = PopulationStatistics(iter(HALVES), every=1)
    with pytest.raises(ValueError, match="`batches` must not be empty"):
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[callback])


@pytest.fixture(scope="module")
def digits():
    """Scikit-learn's 8x8 digits, 0..1: 1200 to train with, the others to test with."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = np.float32(x[order] / 16), y[order]
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def _fit(digits: tuple, layers: list[keras.layers.Layer], epochs: int) -> keras.Model:
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, 0.9), loss)
    model.fit(*digits[0], batch_size=60, epochs=epochs, verbose=0)
    return model


def _accuracy(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    return float((model.predict(x, batch_size=600, verbose=0).argmax(-1) == y).mean())


def test_twenty_steps_evaluate_badly_and_then_well(digits):
    layers = [keras.layers.Reshape((8, 8, 1))]
    for strides in (1, 2, 1):
        layers += [
            keras.layers.Conv2D(16, 3, strides, padding="same", use_bias=False),
            bnzoo.layers.BatchNormalization(momentum=0.99),
            keras.layers.ReLU(),
        ]
    layers.append(keras.layers.GlobalAveragePooling2D())
    (x, _), test = digits
    model = _fit(digits, layers, epochs=1)  # 20 steps of 60
    estimated = estimate_population_statistics(model, np.split(x, 20))
    assert _accuracy(model, *test) < 0.3  # measured: 0.11
    assert _accuracy(estimated, *test) > 0.6  # measured: 0.72


@pytest.fixture(scope="module")
def trained(digits):
    keras.utils.set_random_seed(3)
    layers = []
    for _ in range(2):
        layers += [
            keras.layers.Dense(64, use_bias=False),
            bnzoo.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
        ]
    return _fit(digits, layers, epochs=8)


SHADE = np.tile(np.linspace(0.2, 1, 8, dtype="float32"), 8)
NOISE = np.float32(np.random.default_rng(1).normal(0, 0.05, (1200, 64)))


@pytest.mark.parametrize(
    ("shift", "before", "after"),
    [
        (lambda x: 0.3 * x, 0.47, 0.98),
        (lambda x: 0.5 + 0.5 * x, 0.77, 0.98),
        (lambda x: SHADE * x, 0.86, 0.97),
        (lambda x: 0.6 + 0.3 * x + NOISE[: len(x)], 0.41, 0.95),
    ],
    ids=["contrast", "brightness", "shading", "haze"],
)
def test_adapts_to_a_shifted_domain(digits, trained, shift, before, after):
    (x, _), (test_x, test_y) = digits
    assert _accuracy(trained, test_x, test_y) > 0.96
    adapted = estimate_population_statistics(trained, np.split(shift(x), 20))  # unlabelled
    # As measured, with room for another machine's arithmetic.
    assert _accuracy(trained, shift(test_x), test_y) < before + 0.05
    assert _accuracy(adapted, shift(test_x), test_y) > after - 0.03
