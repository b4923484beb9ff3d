"""Each published form against the NumPy network, values of every module on the way."""

from __future__ import annotations

import numpy as np
import pytest

from bnzoo.models import FORMS, bn_inception, feature_extractor

from .numpy_inception import MODULES, Inception, randomize

CEIL, SYMMETRIC, VALID = (0, 1), (1, 1), (0, 0)
# What facts are published of each: epsilon, symmetric convolutions, stem pool, pool of 3c and 4e,
# zeros counted in average pools.
PUBLISHED = {
    "slim": (1e-3, False, "same", "same", False),
    "torch": (1e-5, True, CEIL, CEIL, True),
    "caffe": (1e-5, True, CEIL, CEIL, True),
    "onnx": (1e-5, True, CEIL, CEIL, False),
    "mxnet": (1e-5 + 1e-10, True, VALID, SYMMETRIC, True),
    "mxnet_21k": (1e-5, True, CEIL, CEIL, True),
}
SMALL = {"width_multiplier": 0.125, "input_shape": (64, 64, 3), "classes": 11}


def test_every_form_is_compared():
    assert PUBLISHED.keys() == FORMS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_of_every_module(name):
    model = FORMS[name].build(**SMALL, classifier_activation=None)
    oracle = Inception(randomize(model), *PUBLISHED[name])
    x = np.random.default_rng(1).normal(0.0, 1.0, (2, 64, 64, 3)).astype(np.float32)
    logits = oracle(x.astype(np.float64))
    endpoints = [f"inception_{module}" for module in MODULES]
    features = feature_extractor(model, [*endpoints, "predictions"])(x)
    for endpoint in endpoints:
        expected = oracle.outputs[endpoint]
        # float32 through up to 29 convolutions in a row, relative to the largest activation.
        np.testing.assert_allclose(features[endpoint], expected, atol=2e-5 * expected.max())
    np.testing.assert_allclose(features["predictions"], logits, atol=2e-5 * np.abs(logits).max())


def test_prelu_values():
    # Negative activations are where zeros around a pool would win.
    model = FORMS["torch"].build(**SMALL, activation="prelu", classifier_activation=None)
    weights = randomize(model)
    assert sum(name.endswith("alpha") for name in weights) == 69
    x = np.random.default_rng(1).normal(0.0, 1.0, (2, 64, 64, 3)).astype(np.float32)
    logits = Inception(weights, *PUBLISHED["torch"])(x.astype(np.float64))
    np.testing.assert_allclose(model(x), logits, atol=2e-5 * np.abs(logits).max())


def test_overrides_take_the_place_of_a_forms_own_arguments():
    model = FORMS["slim"].build(**{**SMALL, "classes": 7, "dropout": 0.0})
    assert model.output.shape == (None, 7)
    assert "dropout" not in {layer.name for layer in model.layers}


def test_arguments_are_those_of_bn_inception():
    for form in FORMS.values():
        assert form.arguments.keys() <= bn_inception.__kwdefaults__.keys() | {"classes"}


def test_pixels_of_each_form():
    colour = np.array([[[10.0, 20.0, 30.0]]], np.float32)  # red, green, blue
    expected = {
        "slim": np.array([10, 20, 30]) / 127.5 - 1,
        "torch": [30 - 104, 20 - 117, 10 - 128],
        "caffe": [30 - 104, 20 - 117, 10 - 123],
        "onnx": [30 - 104, 20 - 117, 10 - 123],
        "mxnet": [10 - 123.68, 20 - 116.779, 30 - 103.939],
        "mxnet_21k": [10 - 117, 20 - 117, 30 - 117],
    }
    for name, pixels in expected.items():
        np.testing.assert_allclose(
            FORMS[name].preprocessing.normalize(colour)[0, 0], pixels, rtol=1e-6
        )
