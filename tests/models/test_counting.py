"""Multiply-adds and receptive fields, against figures computed by hand and by others."""

from __future__ import annotations

from collections import defaultdict

import keras
import pytest

from bnzoo.models import bn_inception, mnist_mlp, multiply_adds, receptive_field

from .networks import built

# Convolution weights and millions of multiply-adds of each module, with projections of 96.
MODULES = {
    "3a": (218_112, 171.0),
    "3b": (259_072, 203.1),
    "3c": (384_000, 143.9),
    "4a": (608_256, 119.2),
    "4b": (663_552, 130.1),
    "4c": (893_952, 175.2),
    "4d": (1_105_920, 216.8),
    "4e": (1_437_696, 162.6),
    "5a": (2_179_072, 106.8),
    "5b": (2_276_352, 111.5),
}
MODULES_128 = {
    "4c": (912_384, 178.8),
    "4d": (1_140_736, 223.6),
    "4e": (1_447_936, 164.6),
    "5a": (2_205_696, 108.1),
}


@pytest.fixture(scope="module", params=[("separable", 96), ("conv", 128)])
def network(request):
    stem, projection = request.param
    model = built("bn_inception", stem=stem, pool_projection=projection, conv_bias=False)
    return stem, projection, model


def test_each_module(network):
    _, projection, model = network
    weights, operations = defaultdict(int), defaultdict(int)
    for name, count in multiply_adds(model).items():
        if name.startswith("inception_"):
            module = name.split("_")[1]
            operations[module] += count
            weights[module] += model.get_layer(name).kernel.shape.num_elements()
    expected = MODULES if projection == 96 else {**MODULES, **MODULES_128}
    assert dict(weights) == {module: count for module, (count, _) in expected.items()}
    for module, (_, millions) in expected.items():
        assert operations[module] / 1e6 == pytest.approx(millions, abs=0.05), module


def test_whole_network(network):
    stem, projection, model = network
    counts = multiply_adds(model)
    total = {("separable", 96): 1.935e9, ("conv", 128): 2.033e9}[stem, projection]
    assert sum(counts.values()) == pytest.approx(total, abs=0.5e6)
    # GoogLeNet's table prints 34M for its stem, which is this separable one.
    first = (1176 + 1536 if stem == "separable" else 9408) * 112 * 112
    assert counts["conv1_7x7_s2"] == first
    assert counts["conv2_3x3_reduce"] == 4096 * 56 * 56
    assert counts["conv2_3x3"] == 110_592 * 56 * 56
    assert counts["predictions"] == 1_024_000


def test_channels_first_counts_the_same():
    arguments = {"width_multiplier": 0.125, "classes": 10}
    last = bn_inception(input_shape=(64, 64, 3), **arguments)
    first = bn_inception(input_shape=(3, 64, 64), data_format="channels_first", **arguments)
    assert multiply_adds(first) == multiply_adds(last)


def test_receptive_fields():
    model = bn_inception(include_top=False, width_multiplier=0.05)
    expected = {
        "image": (1, 1),
        "conv1_7x7_s2": (7, 2),
        "pool1_3x3_s2": (11, 4),  # 7 + 2 x 2
        "conv2_3x3": (19, 4),  # 11 + 2 x 4
        "pool2_3x3_s2": (27, 8),  # 19 + 2 x 4
        "inception_3a": (59, 8),  # two 3x3: 27 + 4 x 8
        "inception_3b": (91, 8),
        "inception_3c": (123, 16),
        "inception_4a": (187, 16),  # 123 + 4 x 16
        "inception_4d": (379, 16),
        "inception_4e": (443, 32),
        "inception_5b": (699, 32),  # 443 + 2 x 4 x 32
    }
    assert {name: receptive_field(model, name) for name in expected} == expected


def test_unknown_size():
    model = bn_inception(include_top=False, width_multiplier=0.05)
    with pytest.raises(ValueError, match=r"`model` must have an input of known size .* 'bn"):
        multiply_adds(model)


def test_unknown_layer():
    with pytest.raises(ValueError, match=r"must be a layer of 'mnist_mlp'. .*layer_name='conv1'"):
        receptive_field(mnist_mlp(), "conv1")


def test_dense_positions():
    image = keras.Input((5, 4))
    model = keras.Model(image, keras.layers.Dense(3, name="fc")(image))
    assert multiply_adds(model) == {"fc": 5 * 4 * 3}
