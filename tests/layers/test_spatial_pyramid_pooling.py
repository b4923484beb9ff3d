"""The pyramid against its bins written out in NumPy, PyTorch's adaptive pool, and crops."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import SlidingSpatialPyramidPooling, SpatialPyramidPooling


def _expected(maps: np.ndarray, bins: tuple[int, ...]) -> np.ndarray:
    """Level by level, row by row, the maximum of each channel between the edges of each bin."""
    _, height, width, _ = maps.shape
    parts = []
    for n in bins:
        for i in range(n):
            for j in range(n):
                top, bottom = int(np.floor(i * height / n)), int(np.ceil((i + 1) * height / n))
                left, right = int(np.floor(j * width / n)), int(np.ceil((j + 1) * width / n))
                parts.append(maps[:, top:bottom, left:right].max((1, 2)))
    return np.concatenate(parts, axis=1)


def _maps(*shape: int) -> np.ndarray:
    return np.random.default_rng(63).normal(-1.0, 2.0, shape).astype("float32")


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize(
    ("shape", "bins"),
    [
        ((2, 14, 14, 3), (7, 3, 2, 1)),
        ((2, 18, 18, 2), (6, 3, 2, 1)),
        ((2, 13, 10, 3), (6, 3, 2, 1)),
        # Fewer places than bins: bins share places.
        ((1, 2, 5, 3), (3, 4)),
    ],
)
def test_value(shape: tuple, bins: tuple, jit: bool) -> None:
    maps = _maps(*shape)
    layer = SpatialPyramidPooling(bins)
    output = tf.function(layer, jit_compile=jit)(maps).numpy()
    assert output.shape == layer.compute_output_shape(shape)
    np.testing.assert_array_equal(output, _expected(maps, bins))


def test_windows_and_strides_of_spp_net() -> None:
    """Where SPP-net prints windows and strides, 13x13 maps, the bins are the same."""
    maps = _maps(2, 13, 13, 3)
    levels = [
        tf.nn.max_pool2d(maps, window, stride, "VALID").numpy().reshape(2, -1)
        for window, stride in ((5, 4), (7, 6), (13, 13))
    ]
    np.testing.assert_array_equal(
        SpatialPyramidPooling((3, 2, 1))(maps), np.concatenate(levels, axis=1)
    )


@pytest.mark.peers
def test_adaptive_pooling_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    maps = _maps(2, 14, 11, 3)
    bins = (7, 3, 2, 1)
    levels = [
        torch.nn.functional.adaptive_max_pool2d(torch.tensor(maps.transpose(0, 3, 1, 2)), n)
        for n in bins
    ]
    expected = [level.numpy().transpose(0, 2, 3, 1).reshape(2, -1) for level in levels]
    np.testing.assert_array_equal(
        SpatialPyramidPooling(bins)(maps), np.concatenate(expected, axis=1)
    )


def test_unknown_sizes_and_channels_first() -> None:
    maps = _maps(2, 14, 9, 3)
    bins = (7, 3, 1)
    last = keras.Input((None, None, 3))
    model = keras.Model(last, SpatialPyramidPooling(bins)(last))
    assert model.output.shape == (None, 3 * 59)
    np.testing.assert_array_equal(model(maps), _expected(maps, bins))
    first = keras.Input((3, None, None))
    model = keras.Model(first, SpatialPyramidPooling(bins, "channels_first")(first))
    # The same order of the vector, so that weights behind it fit both formats.
    np.testing.assert_array_equal(model(maps.transpose(0, 3, 1, 2)), _expected(maps, bins))


def test_gradient_goes_to_the_maxima() -> None:
    maps = tf.constant(_maps(1, 5, 5, 2))
    bins = (3, 1)
    upstream = np.random.default_rng(1).normal(size=(1, 20)).astype("float32")
    with tf.GradientTape() as tape:
        tape.watch(maps)
        output = SpatialPyramidPooling(bins)(maps)
    gradient = tape.gradient(output, maps, output_gradients=upstream).numpy()
    expected = np.zeros(maps.shape)
    values = maps.numpy()
    for index, value in enumerate(output.numpy()[0]):
        # Channels run fastest, and no two values of a channel are equal.
        row, column = np.argwhere(values[0, :, :, index % 2] == value)[0]
        expected[0, row, column, index % 2] += upstream[0, index]
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("jit", [False, True], ids=["plain", "xla"])
def test_sliding_is_the_pyramid_of_every_window(data_format: str, jit: bool) -> None:
    maps = _maps(2, 9, 10, 3)
    window, bins = (7, 6), (4, 3, 1)
    expected = [
        _expected(maps[n : n + 1, i : i + 7, j : j + 6], bins)
        for n in range(2)
        for i in range(3)
        for j in range(5)
    ]
    layer = SlidingSpatialPyramidPooling(window, bins, data_format)
    given = maps if data_format == "channels_last" else maps.transpose(0, 3, 1, 2)
    output = tf.function(layer, jit_compile=jit)(given).numpy()
    np.testing.assert_array_equal(output, np.concatenate(expected))
    assert layer.compute_output_shape(given.shape) == (None, output.shape[1])


@pytest.mark.parametrize("policy", ["float64", "mixed_float16", "mixed_bfloat16"])
def test_precision_policies(policy: str) -> None:
    for layer in (
        SpatialPyramidPooling((3, 1), dtype=policy),
        SlidingSpatialPyramidPooling((8, 8), (3, 1), dtype=policy),
    ):
        maps = tf.cast(_maps(2, 8, 8, 3), layer.compute_dtype)
        output = layer(maps)
        assert output.dtype.name == layer.compute_dtype
        # Maxima are among the values: nothing is rounded.
        np.testing.assert_array_equal(
            np.asarray(tf.cast(output, tf.float64)),
            _expected(np.asarray(tf.cast(maps, tf.float64)), (3, 1)),
        )


def test_configs(tmp_path) -> None:
    for layer in (
        SpatialPyramidPooling((4, 2), name="spp"),
        SlidingSpatialPyramidPooling((5, 4), (4, 2), name="spp"),
    ):
        model = keras.Sequential([keras.Input((6, 6, 3)), layer])
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert loaded.layers[0].get_config() == layer.get_config()
        maps = _maps(2, 6, 6, 3)
        np.testing.assert_array_equal(loaded(maps), model(maps))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bins": ()}, r"`bins` must be a sequence of at least one .* Received: bins=\(\)"),
        ({"bins": (3, 0)}, r"Received: bins=\(3, 0\)"),
        ({"bins": (2.0,)}, r"Received: bins=\(2\.0,\)"),
        ({"data_format": "NHWC"}, r"`data_format` must be one of None, .* data_format='NHWC'"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpatialPyramidPooling(**arguments)


@pytest.mark.parametrize("window", [(3,), (0, 3), (3, 2.5)])
def test_bad_windows(window: tuple) -> None:
    with pytest.raises(ValueError, match="`window` must be two whole numbers >= 1"):
        SlidingSpatialPyramidPooling(window)


def test_bad_inputs() -> None:
    with pytest.raises(ValueError, match=r"rank 4 .* input_shape=\(None, 7, 7, None\)"):
        SpatialPyramidPooling().build((None, 7, 7, None))
    with pytest.raises(ValueError, match=r"rank 4 .* input_shape=\(None, 7, 7\)"):
        SpatialPyramidPooling().build((None, 7, 7))
    with pytest.raises(ValueError, match=r"`window`, \(8, 3\).* input_shape=\(None, 7, 7, 2\)"):
        SlidingSpatialPyramidPooling((8, 3)).build((None, 7, 7, 2))


@pytest.mark.parametrize(
    ("layer", "shape", "rule"),
    [
        (SpatialPyramidPooling((1,)), (1, 0, 3, 1), "A map must have at least one place"),
        (SlidingSpatialPyramidPooling((4, 3), (1,)), (1, 3, 9, 1), r"`window`, \(4, 3\)"),
        (SlidingSpatialPyramidPooling((3, 4), (1,)), (1, 9, 3, 1), r"`window`, \(3, 4\)"),
        (
            SlidingSpatialPyramidPooling((3, 4), (1,), "channels_first"),
            (1, 1, 9, 3),
            r"`window`, \(3, 4\)",
        ),
    ],
)
def test_a_map_that_is_too_small_is_refused_in_every_way(
    layer: keras.Layer, shape: tuple, rule: str
) -> None:
    """A pool of no windows divides by zero on the CPU, and the process is gone."""
    unknown = tuple(None if size in (0, 3, 9) else size for size in shape)
    layer.build(unknown)
    maps = tf.zeros(shape)
    with pytest.raises(ValueError, match=rf"{rule}.* larger images\. Received: .*of shape \(1, "):
        layer(maps)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{rule}.* larger images\."):
        tf.function(layer, input_signature=[tf.TensorSpec(unknown)])(maps)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "xla"])
def test_unknown_sizes_that_are_large_enough(jit: bool) -> None:
    layer = SlidingSpatialPyramidPooling((4, 3), (2, 1))
    layer.build((None, None, None, 2))
    maps = _maps(1, 4, 4, 2)
    run = tf.function(
        layer, jit_compile=jit, input_signature=[tf.TensorSpec((None, None, None, 2))]
    )
    expected = [_expected(maps[:, :, j : j + 3], (2, 1)) for j in range(2)]
    np.testing.assert_array_equal(run(maps), np.concatenate(expected))


@pytest.mark.parametrize(
    "layer", [SpatialPyramidPooling((2, 1)), SlidingSpatialPyramidPooling((2, 2), (1,))]
)
def test_inputs_that_are_not_floating(layer: keras.Layer) -> None:
    maps = np.arange(8).reshape(1, 2, 2, 2)
    output = layer(maps)
    assert output.dtype == "float32"
    np.testing.assert_array_equal(output, _expected(maps, layer.bins))
    with pytest.raises(ValueError, match=r"`inputs` must be real numbers\. .* dtype complex64"):
        layer(tf.zeros((1, 2, 2, 2), tf.complex64))
