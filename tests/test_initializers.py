"""HeNormal against Eq. 10, 14 and 15 of He et al., with n counted from the layers themselves."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.initializers import HeNormal


def _std(layer: keras.Layer, input_shape: tuple, weight: str = "kernel") -> float:
    layer.build(input_shape)
    return float(np.std(getattr(layer, weight).numpy().astype("float64")))


# (layer class, its arguments, input shape, name of the kernel's initializer, kind of kernel,
#  fan_in, fan_out); each kernel has at least 2e4 values, so that the sample's deviation is within
#  4 / sqrt(2 * 2e4) = 2% of the true one.
FANS = {
    "dense": ("Dense", {"units": 256}, (None, 128), "kernel", "conv", 128, 256),
    "1d": ("Conv1D", {"filters": 96, "kernel_size": 5}, (None, 9, 64), "kernel", "conv", 320, 480),
    "2d": (
        "Conv2D",
        {"filters": 96, "kernel_size": (3, 2)},
        (None, 9, 9, 64),
        "kernel",
        "conv",
        6 * 64,
        6 * 96,
    ),
    "3d": (
        "Conv3D",
        {"filters": 40, "kernel_size": 3},
        (None, 5, 5, 5, 20),
        "kernel",
        "conv",
        27 * 20,
        27 * 40,
    ),
    "grouped": (
        "Conv2D",
        {"filters": 192, "kernel_size": 3, "groups": 4},
        (None, 9, 9, 64),
        "kernel",
        "conv",
        9 * 16,
        9 * 48,
    ),
    "transposed": (
        "Conv2DTranspose",
        {"filters": 96, "kernel_size": 3},
        (None, 9, 9, 32),
        "kernel",
        "transposed",
        9 * 32,
        9 * 96,
    ),
    "depthwise": (
        "DepthwiseConv2D",
        {"kernel_size": 3, "depth_multiplier": 2},
        (None, 9, 9, 1200),
        "depthwise",
        "depthwise",
        9,
        18,
    ),
    "depthwise_1d": (
        "DepthwiseConv1D",
        {"kernel_size": 5, "depth_multiplier": 4},
        (None, 9, 1000),
        "depthwise",
        "depthwise",
        5,
        20,
    ),
}


@pytest.mark.parametrize("mode", ["fan_in", "fan_out"])
@pytest.mark.parametrize("name", FANS)
def test_standard_deviation(name: str, mode: str) -> None:
    kind, arguments, shape, prefix, kernel, fan_in, fan_out = FANS[name]
    groups = arguments.get("groups", 1)
    initializer = HeNormal(0.5, mode, kernel, groups, seed=11)
    layer = getattr(keras.layers, kind)(**arguments, **{f"{prefix}_initializer": initializer})
    n = fan_in if mode == "fan_in" else fan_out
    assert _std(layer, shape) == pytest.approx((2 / (1.25 * n)) ** 0.5, rel=0.02)


def test_fans_are_the_connections_of_the_layers() -> None:
    """n counted by pushing ones: inputs that a response sums, responses that an input meets."""
    cases = {
        "grouped": (keras.layers.Conv2D(6, 3, groups=2, kernel_initializer="ones"), 4, 9 * 2, 27),
        "depthwise": (
            keras.layers.DepthwiseConv2D(3, depth_multiplier=5, depthwise_initializer="ones"),
            4,
            9,
            45,
        ),
        "transposed": (
            keras.layers.Conv2DTranspose(6, 3, padding="same", kernel_initializer="ones"),
            4,
            36,
            54,
        ),
    }
    for name, (layer, channels, fan_in, fan_out) in cases.items():
        x = tf.Variable(tf.ones((1, 7, 7, channels)))
        with tf.GradientTape() as tape:
            y = layer(x)
        middle = y.shape[1] // 2
        assert float(y[0, middle, middle, 0]) == fan_in, name
        assert float(tape.gradient(y, x)[0, 3, 3, 0]) == fan_out, name
        for mode, n in (("fan_in", fan_in), ("fan_out", fan_out)):
            kernel = "conv" if name == "grouped" else name
            groups = 2 if name == "grouped" else 1
            initializer = HeNormal(0.0, mode, kernel, groups, seed=1)
            unit = keras.random.normal(layer.kernel.shape, seed=1).numpy()
            np.testing.assert_allclose(
                initializer(layer.kernel.shape).numpy(), unit * (2 / n) ** 0.5, rtol=1e-5
            )


def test_case_27_depthwise_and_separable() -> None:
    for multiplier in (1, 2):
        layer = keras.layers.DepthwiseConv2D(
            3,
            depth_multiplier=multiplier,
            depthwise_initializer=HeNormal(kernel="depthwise", seed=27),
        )
        assert _std(layer, (None, 9, 9, 256)) == pytest.approx(0.4714, rel=0.03)
    separable = keras.layers.SeparableConv2D(
        64,
        3,
        depth_multiplier=2,
        depthwise_initializer=HeNormal(kernel="depthwise", seed=27),
        pointwise_initializer=HeNormal(seed=27),
    )
    assert _std(separable, (None, 9, 9, 256), "depthwise_kernel") == pytest.approx(0.4714, rel=0.03)
    assert np.std(separable.pointwise_kernel) == pytest.approx((2 / 512) ** 0.5, rel=0.02)


def test_case_29_not_truncated() -> None:
    kernel = HeNormal(seed=29)((3, 3, 64, 256)).numpy()
    assert np.std(kernel) == pytest.approx(0.05893, rel=0.01)
    # A Gaussian of 147,456 values passes 4 deviations about 9 times; truncated at 2 it never would.
    beyond = np.mean(np.abs(kernel) > 2 * 0.05893)
    assert beyond == pytest.approx(0.0455, rel=0.05)
    assert np.abs(kernel).max() > 4 * 0.05893
    assert abs(np.mean(kernel)) < 4 * 0.05893 / np.sqrt(kernel.size)
    assert np.std(HeNormal(seed=29)((512, 256))) == pytest.approx(0.0625, rel=0.01)
    assert np.std(HeNormal(0.25, seed=29)((3, 3, 64, 256))) == pytest.approx(0.05717, rel=0.01)


def test_deviations_that_the_paper_prints() -> None:
    for filters, std in {64: 0.059, 128: 0.042, 256: 0.029, 512: 0.021}.items():
        kernel = HeNormal(mode="fan_out", seed=1)((3, 3, 128, filters))
        assert np.std(kernel) == pytest.approx(std, rel=0.025)


def test_layers_that_share_an_unseeded_object_differ() -> None:
    shared = HeNormal()
    first, second = (keras.layers.Dense(4, kernel_initializer=shared) for _ in range(2))
    for layer in (first, second):
        layer.build((None, 3))
    assert not np.any(first.kernel.numpy() == second.kernel.numpy())
    copies = [shared.clone()((3, 4)).numpy() for _ in range(2)]
    assert not np.any(copies[0] == copies[1])


def test_the_global_seed_repeats_unseeded_draws() -> None:
    draws = []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        shared = HeNormal()
        draws.append([shared((3, 4)).numpy(), shared((3, 4)).numpy()])
    np.testing.assert_array_equal(draws[0], draws[1])


def test_seeds() -> None:
    seeded = HeNormal(seed=5)
    np.testing.assert_array_equal(seeded((3, 4)), seeded((3, 4)))
    np.testing.assert_array_equal(seeded((3, 4)), HeNormal(seed=np.int64(5))((3, 4)))
    assert not np.any(seeded((3, 4)).numpy() == HeNormal(seed=6)((3, 4)).numpy())
    generator = HeNormal(seed=keras.random.SeedGenerator(5))
    first = generator((3, 4)).numpy()
    assert not np.any(first == generator((3, 4)).numpy())
    np.testing.assert_array_equal(first, generator.clone()((3, 4)))


def test_config_round_trip(tmp_path) -> None:
    initializer = HeNormal(0.25, "fan_out", "conv", 2, seed=8)
    layer = keras.layers.Conv2D(6, 3, groups=2, kernel_initializer=initializer)
    model = keras.Sequential([keras.Input((5, 5, 4)), layer])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").layers[0].kernel_initializer
    assert loaded.get_config() == initializer.get_config()
    assert loaded.get_config() == {
        "negative_slope": 0.25,
        "mode": "fan_out",
        "kernel": "conv",
        "groups": 2,
        "seed": 8,
    }
    np.testing.assert_array_equal(loaded((3, 3, 2, 6)), layer.kernel)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype: str) -> None:
    kernel = HeNormal(seed=2)((128, 200), dtype=dtype)
    assert kernel.dtype.name == dtype
    assert np.std(np.asarray(tf.cast(kernel, tf.float64))) == pytest.approx(0.125, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"negative_slope": "0.1"}, r"`negative_slope` must be a finite number\. .*='0\.1'"),
        ({"negative_slope": float("nan")}, r"Received: negative_slope=nan"),
        ({"mode": "fan_avg"}, r"`mode` must be one of 'fan_in', 'fan_out'\. .*mode='fan_avg'"),
        ({"kernel": "dense"}, r"`kernel` must be one of .*'transposed'\. .*kernel='dense'"),
        ({"groups": 0}, r"`groups` must be a whole number >= 1\. Received: groups=0"),
        ({"groups": 1.5}, r"Received: groups=1\.5"),
        ({"groups": "2"}, r"Received: groups='2'"),
        ({"groups": True}, r"Received: groups=True"),
        ({"negative_slope": None}, r"Received: negative_slope=None"),
        ({"negative_slope": False}, r"Received: negative_slope=False"),
        ({"mode": ["fan_in"]}, r"Received: mode=\['fan_in'\]"),
        ({"seed": True}, r"Received: seed=True"),
        ({"groups": 2, "kernel": "depthwise"}, r"`groups` must be 1 unless .* groups=2"),
        ({"seed": 0.5}, r"`seed` must be None, an integer or .* Received: seed=0\.5"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeNormal(**arguments)


@pytest.mark.parametrize(
    ("arguments", "shape", "message"),
    [
        ({}, (3,), r'`shape` of a "conv" kernel must .* at least 2 .* Received: shape=\(3,\)'),
        ({"kernel": "depthwise"}, (3, 3), r'a "depthwise" kernel must be .* at least 3 whole'),
        ({}, (3, 3, 0, 4), r"whole numbers >= 1\. Received: shape=\(3, 3, 0, 4\)"),
        ({}, (-3, 3), r"Received: shape=\(-3, 3\)"),
        ({}, (None, 3), r"Received: shape=\(None, 3\)"),
        ({}, (3.0, 3), r"Received: shape=\(3\.0, 3\)"),
        ({}, (True, 3), r"Received: shape=\(True, 3\)"),
        ({}, 5, r"Received: shape=5"),
        ({}, "ab", r"Received: shape='ab'"),
        ({}, None, r"Received: shape=None"),
        ({}, tf.TensorShape(None), r"Received: shape=TensorShape\(None\)"),
        ({"groups": 3}, (3, 3, 2, 4), r"The 4 filters .* Received: groups=3, shape=\(3, 3, 2, 4\)"),
    ],
)
def test_bad_shapes(arguments: dict, shape: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeNormal(**arguments)(shape)


@pytest.mark.parametrize("shape", [[3, 4], np.array([3, 4]), tf.TensorShape([3, 4])])
def test_sequences_of_sizes_are_shapes(shape: Any) -> None:
    np.testing.assert_array_equal(HeNormal(seed=1)(shape), HeNormal(seed=1)((3, 4)))


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "string", tf.int64, np.uint8])
def test_bad_dtypes(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"`dtype` must be one of .*'float64'\. Received: dtype='"):
        HeNormal()((3, 4), dtype=dtype)


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(ValueError, match="Invalid dtype: float33"):
        HeNormal()((3, 4), dtype="float33")


@pytest.mark.parametrize("slope", [0.25, 0.5, -0.5, 3.0, 1e200])
def test_the_slope_scales_the_same_draw(slope: float) -> None:
    """Eq. 15 over Eq. 10, to the rounding of float64."""
    plain, leaky = (HeNormal(a, seed=4)((20, 30), dtype="float64") for a in (0.0, slope))
    factor = 1 / np.hypot(1, slope)
    np.testing.assert_allclose(leaky, factor * plain.numpy(), rtol=1e-14, atol=0)
