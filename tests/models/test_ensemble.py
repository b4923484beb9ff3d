from __future__ import annotations

import keras
import numpy as np
import pytest

from bnzoo.models import Ensemble, bn_inception, mnist_mlp

from .numpy_inception import randomize

SMALL = {"input_shape": (32, 32, 3), "classes": 10, "stem": "small", "width_multiplier": 0.0625}


@pytest.fixture(scope="module")
def members():
    models = [bn_inception(**SMALL), bn_inception(**SMALL, batch_norm="activation")]
    for seed, model in enumerate(models):
        randomize(model, seed)
    return models


def images(count=3):
    return np.random.default_rng(7).normal(size=(count, 32, 32, 3)).astype(np.float32)


def test_arithmetic_mean_of_probabilities(members):
    x = images()
    given = [model(x).numpy().astype(np.float64) for model in members]
    assert np.abs(given[0] - given[1]).max() > 0.05
    np.testing.assert_allclose(Ensemble(members)(x), (given[0] + given[1]) / 2, atol=1e-6)
    # Twice the first: the mean is weighted by the count.
    three = Ensemble([members[0], members[0], members[1]])
    np.testing.assert_allclose(three(x), (2 * given[0] + given[1]) / 3, atol=1e-6)


def test_members_are_left_as_they_are(members):
    ensemble = Ensemble(members, name="six")
    assert ensemble.name == "six"
    assert [model.name for model in members] == ["bn_inception"] * 2
    assert ensemble.get_layer("member_1").get_layer("conv2_3x3") is members[0].get_layer(
        "conv2_3x3"
    )
    assert ensemble.count_params() == sum(model.count_params() for model in members)


def test_saved_and_loaded(members, tmp_path):
    ensemble = Ensemble(members)
    ensemble.save(tmp_path / "ensemble.keras")
    loaded = keras.models.load_model(tmp_path / "ensemble.keras")
    x = images()
    np.testing.assert_allclose(loaded(x), ensemble(x), atol=1e-6)


def test_float32_mean_under_mixed_precision(members):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        ensemble = Ensemble([bn_inception(**SMALL), bn_inception(**SMALL)])
    finally:
        keras.config.set_dtype_policy("float32")
    probabilities = ensemble(images())
    assert probabilities.dtype == "float32"
    np.testing.assert_allclose(np.sum(probabilities, axis=-1), 1.0, atol=1e-6)


def test_less_than_two():
    with pytest.raises(ValueError, match=r"at least two networks\. Received: 1 of them"):
        Ensemble([mnist_mlp()])
    with pytest.raises(ValueError, match=r"at least two networks\. Received: None"):
        Ensemble(None)


def test_the_same_model_twice(members, tmp_path):
    first, second = members
    ensemble = Ensemble([first, first, second])
    assert ensemble.count_params() == first.count_params() + second.count_params()
    x = images()
    ensemble.save(tmp_path / "ensemble.keras")
    loaded = keras.models.load_model(tmp_path / "ensemble.keras")
    expected = (2 * first(x).numpy().astype(np.float64) + second(x)) / 3
    np.testing.assert_allclose(loaded(x), expected, atol=1e-6)


def test_shared_layers():
    model = mnist_mlp()
    twin = keras.Model(model.input, model.output, name="twin")
    with pytest.raises(
        ValueError,
        match=r"must not share layers.* Received: 'mnist_mlp' and 'twin', .*'fc1/kernel'",
    ):
        Ensemble([model, twin])


def test_different_networks():
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
        Ensemble([mnist_mlp(), mnist_mlp(classes=11, name="other")])
    assert str(error.value) == (
        "`models` must all have the same input and output shape. Received: 'mnist_mlp' with "
        "((None, 28, 28, 1), (None, 10)) and 'other' with ((None, 28, 28, 1), (None, 11))"
    )


def test_logits():
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
        Ensemble([mnist_mlp(), mnist_mlp(classifier_activation=None, name="logits")])
    assert str(error.value) == (
        "`models` must return class probabilities, not logits. "
        "Received: 'logits', whose last layer 'predictions' has no activation"
    )


def test_members_that_are_sequential_or_end_with_a_nested_model_or_an_operation(tmp_path):
    image = keras.Input((28, 28, 1))
    dense = keras.layers.Dense(10)(keras.layers.Flatten()(image))
    models = [
        # As Keras reads it from a file: not called.
        keras.Sequential([keras.Input((28, 28, 1)), *mnist_mlp().layers[1:]]),
        keras.Sequential([keras.Input((28, 28, 1)), mnist_mlp()]),
        keras.Model(image, mnist_mlp()(image)),
        keras.Model(image, keras.ops.softmax(dense)),
    ]
    x = np.random.default_rng(3).normal(size=(3, 28, 28, 1)).astype(np.float32)
    ensemble = Ensemble(models)
    expected = np.mean([model(x).numpy().astype(np.float64) for model in models], axis=0)
    np.testing.assert_allclose(ensemble(x), expected, atol=1e-6)
    ensemble.save(tmp_path / "ensemble.keras")
    loaded = keras.models.load_model(tmp_path / "ensemble.keras")
    np.testing.assert_allclose(loaded(x), expected, atol=1e-6)
    logits = keras.Sequential([keras.Input((28, 28, 1)), mnist_mlp(classifier_activation=None)])
    with pytest.raises(ValueError, match="whose last layer 'predictions' has no activation"):
        Ensemble([models[0], logits])


def test_two_inputs():
    a, b = keras.Input((2,)), keras.Input((2,))
    model = keras.Model([a, b], keras.layers.Add()([a, b]), name="pair")
    with pytest.raises(ValueError, match=r"one input and one output\. Received: 'pair'"):
        Ensemble([model, model])
