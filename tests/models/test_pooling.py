"""Padding forms of convolutions and pools, with what PyTorch and Caffe give."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from bnzoo.models.blocks import InceptionBlocks
from bnzoo.models.inception_table import POOLS, TABLES
from bnzoo.models.pooling import PaddedMaxPooling2D

from .numpy_inception import average_pool, max_pool


def blocks(padding="same", pools="tensorflow", **options):
    defaults = {
        "activation": "relu",
        "batch_norm": None,
        "conv_bias": False,
        "width_multiplier": 1.0,
        "weight_scale": 1.0,
        "data_format": "channels_last",
    }
    return InceptionBlocks(padding=padding, pools=POOLS[pools], **{**defaults, **options})


@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        ("symmetric", [[0, 0, 0], [0, 7, 9], [0, 19, 21]]),
        ("same", [[0, 2, 4], [12, 14, 16], [24, 26, 28]]),
    ],
)
def test_case_57_first_tap_of_a_3x3_of_stride_2(padding, expected):
    image = keras.Input((6, 6, 1))
    model = keras.Model(image, blocks(padding).conv(image, "conv", 1, 3, 2))
    kernel = np.zeros((3, 3, 1, 1))
    kernel[0, 0] = 1.0
    model.get_layer("conv").set_weights([kernel, np.zeros(1)])
    x = np.arange(36.0).reshape(1, 6, 6, 1)
    np.testing.assert_array_equal(model(x)[0, :, :, 0], expected)


@pytest.mark.parametrize(("padding", "first_row"), [("symmetric", -3), ("same", -2)])
@pytest.mark.parametrize("depth_multiplier", [None, 2])
def test_case_57_first_tap_of_the_stem(padding, first_row, depth_multiplier):
    image = keras.Input((8, 8, 1))
    stem = blocks(padding).conv(image, "stem", 1, 7, 2, depth_multiplier=depth_multiplier)
    model = keras.Model(image, stem)
    layer = model.get_layer("stem")
    layer.set_weights([np.zeros(weight.shape) for weight in layer.weights])
    first_kernel = np.zeros(layer.weights[0].shape)
    first_kernel[0, 0, 0, 0] = 1.0
    layer.weights[0].assign(first_kernel)
    if depth_multiplier is not None:
        layer.weights[1].assign(np.ones(layer.weights[1].shape))
    x = np.arange(64.0).reshape(1, 8, 8, 1)
    rows = [first_row + 2 * step for step in range(4)]
    expected = [[x[0, r, c, 0] if min(r, c) >= 0 else 0 for c in rows] for r in rows]
    np.testing.assert_array_equal(model(x)[0, :, :, 0], expected)


@pytest.mark.parametrize("size", [(6, 8), (7, 9), (6, 9)])
@pytest.mark.parametrize("pads", [(0, 1), (1, 1), (2, 0)])
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_padded_max_pooling_of_any_sign(size, pads, data_format):
    # All values negative: a zero around the map would win.
    x = -np.random.default_rng(0).uniform(1.0, 9.0, (2, *size, 3)).astype(np.float32)
    layer = PaddedMaxPooling2D(3, 2, pads=pads, data_format=data_format)
    expected = max_pool(x, 2, pads)
    if data_format == "channels_first":
        x, expected = x.transpose(0, 3, 1, 2), expected.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(layer(x), expected)
    assert layer.compute_output_shape((None, *x.shape[1:])) == (None, *expected.shape[1:])
    unknown = (None, None, None, 3) if data_format == "channels_last" else (None, 3, None, None)
    assert layer.compute_output_shape(unknown) == unknown


@pytest.mark.peers
@pytest.mark.parametrize("size", [(6, 8), (7, 9), (28, 14)])
def test_caffe_pools_are_torch_s_ceil_mode(size):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=(2, *size, 3)).astype(np.float32)
    channels_first = torch.from_numpy(x.transpose(0, 3, 1, 2))
    ceil = torch.nn.MaxPool2d(3, stride=2, ceil_mode=True)(channels_first)
    ours = blocks(pools="caffe").max_pool(keras.ops.convert_to_tensor(x), "pool", (0, 1))
    np.testing.assert_array_equal(ours, ceil.numpy().transpose(0, 2, 3, 1))


@pytest.mark.parametrize("pools", POOLS)
def test_average_pool_at_the_border(pools):
    row = TABLES["paper"].modules[0]
    image = keras.Input((5, 6, 2))
    model = keras.Model(image, blocks(pools=pools).module_pool(image, row))
    x = np.random.default_rng(0).normal(size=(2, 5, 6, 2)).astype(np.float32)
    count = {"tensorflow": False, "onnx": False, "caffe": True, "mxnet": True}[pools]
    np.testing.assert_allclose(model(x), average_pool(x, count), rtol=1e-5, atol=1e-6)


def test_mxnet_pools_shrink_the_maps_of_the_stem():
    # 112, 55, 27, 14, 7: MXNet rounds down.
    from bnzoo.models import bn_inception

    model = bn_inception(
        stem="conv", padding="symmetric", pools="mxnet", width_multiplier=0.05, include_top=False,
        input_shape=(224, 224, 3),
    )  # fmt: skip
    names = ("conv1_7x7_s2", "pool1_3x3_s2", "pool2_3x3_s2", "inception_3c", "inception_4e")
    assert [model.get_layer(name).output.shape[1] for name in names] == [112, 55, 27, 14, 7]


def test_config_round_trip():
    layer = PaddedMaxPooling2D((3, 2), (2, 1), pads=(1, 0), name="pool")
    copy = PaddedMaxPooling2D.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    x = np.random.default_rng(0).normal(size=(1, 5, 5, 1)).astype(np.float32)
    np.testing.assert_array_equal(copy(x), layer(x))


@pytest.mark.parametrize("pads", [(1,), (0, -1), (0.5, 1)])
def test_bad_pads(pads):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
        PaddedMaxPooling2D(3, 2, pads=pads)
    assert str(error.value) == (
        "`pads` must be two integers of at least 0, the places added before and after. "
        f"Received: pads={pads}"
    )
