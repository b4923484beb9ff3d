"""LocalResponseNormalization against its equation in NumPy float64, channel by channel."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import LocalResponseNormalization

SETTINGS = {
    "googlenet": {"depth_radius": 2, "bias": 1.0, "alpha": 2e-5, "beta": 0.75},
    "alexnet": {"depth_radius": 2, "bias": 2.0, "alpha": 1e-4, "beta": 0.75},
    "strong": {"depth_radius": 1, "bias": 0.5, "alpha": 0.3, "beta": 1.5},
    "alone": {"depth_radius": 0, "bias": 1.0, "alpha": 1.0, "beta": 0.5},
    "all": {"depth_radius": 20, "bias": 1.0, "alpha": 0.1, "beta": 0.5},
}


def _expected(
    x: np.ndarray, axis: int, depth_radius: int, bias: float, alpha: float, beta: float
) -> np.ndarray:
    x = np.moveaxis(np.asarray(x, "float64"), axis, -1)
    y = np.empty_like(x)
    for i in range(x.shape[-1]):
        near = x[..., max(0, i - depth_radius) : i + depth_radius + 1]
        y[..., i] = x[..., i] / (bias + alpha * (near**2).sum(-1)) ** beta
    return np.moveaxis(y, -1, axis)


def _images(shape: tuple[int, ...]) -> np.ndarray:
    """Activations of up to some hundreds, as pixels of 0 to 255 make them."""
    return np.random.default_rng(7).normal(20.0, 100.0, shape).astype("float32")


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_value(setting: str, dtype: str, jit: bool) -> None:
    images = _images((2, 3, 4, 9))
    layer = LocalResponseNormalization(**SETTINGS[setting], dtype=dtype)
    output = tf.function(layer, jit_compile=jit)(images.astype(dtype))
    assert output.dtype.name == dtype
    # float32: a sum of squares and a power, a few ulps.
    rtol = 1e-5 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(output, _expected(images, -1, **SETTINGS[setting]), rtol=rtol)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((2, 9, 3, 4), 1), ((2, 3, 9, 4), 2), ((5, 9), -1), ((2, 3, 9), -1), ((2, 9, 3, 2, 4), -4)],
)
def test_any_rank_and_axis(shape: tuple, axis: int, dtype: str) -> None:
    x = _images(shape)
    layer = LocalResponseNormalization(**SETTINGS["alexnet"], axis=axis, dtype=dtype)
    expected = _expected(x, axis, **SETTINGS["alexnet"])
    np.testing.assert_allclose(layer(x.astype(dtype)), expected, rtol=1e-5)


@pytest.mark.parametrize("axis", [-1, 1])
def test_gradient_agrees_with_float64(axis: int) -> None:
    x = _images((1, 5, 2, 5))
    upstream = np.random.default_rng(9).normal(size=x.shape)
    gradients = []
    for dtype in ("float32", "float64"):
        y = tf.constant(x, dtype)
        layer = LocalResponseNormalization(**SETTINGS["alexnet"], axis=axis, dtype=dtype)
        with tf.GradientTape() as tape:
            tape.watch(y)
            output = layer(y)
        gradients.append(tape.gradient(output, y, output_gradients=upstream.astype(dtype)).numpy())
    step = 1e-3
    for index in [(0, 0, 0, 0), (0, 2, 1, 3), (0, 4, 1, 4)]:
        move = np.zeros(x.shape)
        move[index] = step
        above, below = (
            _expected(x.astype("float64") + sign * move, axis, **SETTINGS["alexnet"])
            for sign in (1, -1)
        )
        slope = ((above - below) * upstream).sum() / (2 * step)
        np.testing.assert_allclose(gradients[1][index], slope, rtol=1e-6)
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    # Half an ulp of the rounded input, half of the rounded output.
    [("mixed_float16", 1e-3), ("mixed_bfloat16", 8e-3)],
)
def test_half_precision_neither_overflows_nor_loses(policy: str, tolerance: float) -> None:
    layer = LocalResponseNormalization(**SETTINGS["alexnet"], dtype=policy)
    # Squares of 300 and more overflow float16.
    images = tf.cast(3 * _images((2, 3, 4, 9)), layer.compute_dtype)
    output = layer(images)
    assert output.dtype.name == layer.compute_dtype
    expected = _expected(np.asarray(tf.cast(images, tf.float64)), -1, **SETTINGS["alexnet"])
    np.testing.assert_allclose(np.asarray(tf.cast(output, tf.float64)), expected, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_unknown_sizes(axis: int, dtype: str) -> None:
    images = _images((2, 3, 4, 9)).astype(dtype)
    inputs = keras.Input((None, None, None), dtype=dtype)
    outputs = LocalResponseNormalization(axis=axis, dtype=dtype)(inputs)
    assert outputs.shape == (None, None, None, None)
    model = keras.Model(inputs, outputs)
    expected = _expected(images, axis, **SETTINGS["googlenet"])
    np.testing.assert_allclose(model(images), expected, rtol=1e-5)
    assert model(images[:0]).shape == (0, 3, 4, 9)


def test_caffes_alpha_is_divided_by_its_local_size() -> None:
    """GoogLeNet's Caffe layer, its mean over local_size channels written out."""
    images = _images((1, 2, 2, 7))
    squares = np.pad(images.astype("float64") ** 2, [(0, 0)] * 3 + [(2, 2)])
    mean = sum(squares[..., shift : shift + 7] for shift in range(5)) / 5
    np.testing.assert_allclose(
        LocalResponseNormalization()(images), images / (1 + 1e-4 * mean) ** 0.75, rtol=1e-5
    )


def test_config_round_trip(tmp_path) -> None:
    layer = LocalResponseNormalization(**SETTINGS["strong"], axis=1)
    model = keras.Sequential([keras.Input((9, 3, 4)), layer])
    model.save(tmp_path / "lrn.keras")
    loaded = keras.models.load_model(tmp_path / "lrn.keras")
    assert loaded.layers[0].get_config() == layer.get_config()
    images = _images((2, 9, 3, 4))
    np.testing.assert_array_equal(loaded(images), model(images))
    np.testing.assert_allclose(
        loaded(images), _expected(images, 1, **SETTINGS["strong"]), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth_radius": -1}, r"`depth_radius` must be a whole number >= 0\. .*depth_radius=-1"),
        ({"depth_radius": 2.5}, r"Received: depth_radius=2\.5"),
        ({"bias": 0}, r"`bias` must be a finite number > 0\. Received: bias=0"),
        ({"depth_radius": True}, r"Received: depth_radius=True"),
        ({"bias": "1"}, r"Received: bias='1'"),
        ({"bias": float("inf")}, r"`bias` must be a finite number > 0\. Received: bias=inf"),
        ({"bias": float("nan")}, r"Received: bias=nan"),
        ({"bias": True}, r"Received: bias=True"),
        ({"alpha": float("inf")}, r"Received: alpha=inf"),
        ({"alpha": float("nan")}, r"Received: alpha=nan"),
        ({"beta": float("nan")}, r"Received: beta=nan"),
        ({"axis": None}, r"`axis` must be an integer or a tuple.* Received: axis=None"),
        ({"axis": 1.5}, r"Received: axis=1\.5"),
        ({"axis": True}, r"Received: axis=True"),
        ({"axis": (1, 2)}, r"`axis` must be one integer\. Received: axis=\(1, 2\)"),
        ({"alpha": -1e-4}, r"`alpha` must be a finite number >= 0\. Received: alpha=-0\.0001"),
        ({"beta": None}, r"`beta` must be a finite number\. Received: beta=None"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalResponseNormalization(**arguments)


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ({"bias": 1e-300}, "float32"),
        ({"bias": 1e-38}, "mixed_float16"),
        ({"bias": 1e39}, "float32"),
        ({"bias": 1e-20, "beta": 2.0}, "mixed_bfloat16"),
        ({"alpha": 1e39}, "float32"),
        ({"beta": 1e39}, "float32"),
        ({"beta": -1e39}, "float32"),
        ({"bias": 1e-309}, "float64"),
        ({"bias": 1e-200, "beta": 2.0}, "float64"),
    ],
)
def test_arguments_that_the_dtype_cannot_hold(arguments: dict, dtype: str) -> None:
    kind = "float64" if dtype == "float64" else "float32"
    received = ".*".join(f"{name}={number}" for name, number in arguments.items())
    received = received.replace("+", r"\+")
    with pytest.raises(ValueError, match=rf"numbers that {kind} holds.* Received: .*{received}"):
        LocalResponseNormalization(**arguments, dtype=dtype)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ({"bias": 1.2e-38}, "float32"),
        ({"bias": 1.2e-19, "beta": 2.0}, "mixed_float16"),
        ({"alpha": 3.4e38}, "float32"),
        ({"bias": 1e-300}, "float64"),
    ],
)
def test_zeros_at_the_ends_of_what_the_dtype_holds(arguments: dict, dtype: str, jit: bool) -> None:
    layer = LocalResponseNormalization(**arguments, dtype=dtype)
    zeros = tf.zeros([2, 3], layer.compute_dtype)
    np.testing.assert_array_equal(tf.function(layer, jit_compile=jit)(zeros), np.zeros([2, 3]))


@pytest.mark.parametrize("axis", [0, -4, 4, -5])
def test_bad_axes(axis: int) -> None:
    with pytest.raises(ValueError, match=rf"`axis` must .*\. Received: axis={axis}$"):
        LocalResponseNormalization(axis=axis).build((None, 4, 4, 3))


def test_numpy_numbers_are_numbers() -> None:
    layer = LocalResponseNormalization(np.int64(1), np.float32(2), axis=np.int64(1))
    assert layer.get_config()["axis"] == 1
    x = np.random.default_rng(5).normal(size=(2, 4, 3)).astype("float32")
    expected = LocalResponseNormalization(1, 2.0, axis=1)(x)
    np.testing.assert_array_equal(layer(x), expected)


def test_complex_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`inputs` must be real numbers\. .* dtype complex64"):
        LocalResponseNormalization()(tf.zeros([2, 3], tf.complex64))
