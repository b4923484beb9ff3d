from __future__ import annotations

import numpy as np
import pytest

from bnzoo.models import INCEPTION_ENDPOINTS, bn_inception, feature_extractor, inception

from .numpy_inception import Inception, randomize


@pytest.fixture(scope="module")
def model():
    return bn_inception(include_top=False, width_multiplier=0.0625)


def test_every_stage_in_one_call(model):
    extractor = feature_extractor(model, INCEPTION_ENDPOINTS)
    maps = extractor(np.zeros((1, 64, 96, 3), np.float32))
    assert tuple(maps) == INCEPTION_ENDPOINTS
    sizes = [tuple(map.shape[1:3]) for map in maps.values()]
    assert sizes == [(32, 48)] + [(16, 24)] * 3 + [(8, 12)] * 3 + [(4, 6)] * 5 + [(2, 3)] * 3


@pytest.mark.parametrize("activation", ["relu", "prelu", "sigmoid"])
def test_a_convolution_s_endpoint_is_behind_its_nonlinearity(activation):
    model = bn_inception(
        input_shape=(64, 64, 3), width_multiplier=0.0625, classes=5, activation=activation
    )
    oracle = Inception(randomize(model), 1e-3, False, "same", "same", False)
    if activation == "sigmoid":
        oracle.nonlinearity = lambda x, name: 1 / (1 + np.exp(-x))
    units, unit = {}, oracle.unit
    oracle.unit = lambda x, name, stride=1: units.setdefault(name, unit(x, name, stride))
    x = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32)
    oracle(x.astype(np.float64))
    names = ["conv2_3x3_reduce", "inception_3c_double_3x3_2", "inception_5b_pool_proj"]
    for name, map in feature_extractor(model, names)(x).items():
        np.testing.assert_allclose(map, units[name], atol=2e-5 * units[name].max())


def test_only_the_layers_that_are_needed(model):
    extractor = feature_extractor(model, ["inception_3b"])
    assert not any("inception_3c" in layer.name for layer in extractor.layers)
    assert extractor.get_layer("conv2_3x3") is model.get_layer("conv2_3x3")


def test_works_without_bn():
    model = inception(include_top=False, width_multiplier=0.0625)
    maps = feature_extractor(model, ["inception_4d"])(np.zeros((1, 64, 64, 3), np.float32))
    assert maps["inception_4d"].shape == (1, 4, 4, 36)


@pytest.mark.parametrize("endpoints", [[], "inception_3a", ["inception_3a", "inception_3a"]])
def test_bad_endpoints(model, endpoints):
    with pytest.raises(ValueError, match="`endpoints` must be a list of different layers' names"):
        feature_extractor(model, endpoints)


def test_unknown_endpoint(model):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
        feature_extractor(model, ["inception_3d"])
    assert str(error.value) == (
        "`endpoints` must name layers of the model 'bn_inception', such as "
        f"{', '.join(INCEPTION_ENDPOINTS)}. Received: 'inception_3d'"
    )
