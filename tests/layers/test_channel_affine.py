"""ChannelAffine against y = scale * x + offset in NumPy float64."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import ChannelAffine

CASES = {
    "last": ((2, 5, 4, 3), -1, "c"),
    "first": ((2, 3, 5, 4), 1, "c"),
    "middle": ((2, 5, 3, 4), -2, "c"),
    "dense": ((6, 3), 1, "c"),
    "activations": ((2, 5, 4, 3), (1, 2, 3), "hwc"),
    "unordered": ((2, 5, 4, 3), (-1, 1), "hc"),
}
# For einsum: the axes of the input, with those of scale and offset told apart by their letters.
LETTERS = {
    "last": "bhwc",
    "first": "bchw",
    "middle": "bhcw",
    "dense": "bc",
    "activations": "bhwc",
    "unordered": "bhwc",
}


def _case(name: str, dtype: str = "float32") -> tuple[ChannelAffine, list[np.ndarray]]:
    shape, axis, letters = CASES[name]
    generator = np.random.default_rng(31)
    x = generator.normal(1.0, 2.0, shape).astype("float32")
    own = [shape[LETTERS[name].index(letter)] for letter in letters]
    scale, offset = generator.normal(size=(2, *own)).astype("float32")
    layer = ChannelAffine(axis=axis, dtype=dtype)
    layer.build((None, *shape[1:]))
    layer.set_weights([scale, offset])
    return layer, [x, scale, offset]


def _expected(name: str, x: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    letters, own = LETTERS[name], CASES[name][2]
    spread = np.einsum(f"{letters},{own}->{letters}", np.ones(x.shape), offset.astype("float64"))
    product = np.einsum(f"{letters},{own}->{letters}", x.astype("float64"), scale.astype("float64"))
    return product + spread


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize("name", CASES)
def test_value(name: str, jit: bool) -> None:
    layer, arrays = _case(name)
    output = tf.function(layer, jit_compile=jit)(arrays[0])
    # Products of about 4 cancel against offsets, so the error is absolute.
    np.testing.assert_allclose(output, _expected(name, *arrays), rtol=1e-6, atol=2e-6)


def test_gradients() -> None:
    layer, (x, scale, _) = _case("last")
    upstream = np.random.default_rng(2).normal(size=x.shape).astype("float32")
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        output = layer(x)
    sources = [x, layer.scale.value, layer.offset.value]
    of_x, of_scale, of_offset = tape.gradient(output, sources, output_gradients=upstream)
    np.testing.assert_allclose(of_x, upstream * scale, rtol=1e-6)
    wide = upstream.astype("float64")
    np.testing.assert_allclose(of_scale, (wide * x.numpy()).sum((0, 1, 2)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_offset, wide.sum((0, 1, 2)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    # A few ulps of the type, of values up to about 10.
    [("float64", 1e-14), ("mixed_float16", 2e-2), ("mixed_bfloat16", 1.5e-1)],
)
def test_precision_policies(policy: str, tolerance: float) -> None:
    layer, arrays = _case("last", policy)
    output = layer(tf.cast(arrays[0], layer.compute_dtype))
    assert output.dtype.name == layer.compute_dtype
    assert layer.scale.dtype == layer.variable_dtype
    np.testing.assert_allclose(
        np.asarray(tf.cast(output, tf.float64)), _expected("last", *arrays), atol=tolerance, rtol=0
    )


def test_starts_as_the_identity_and_takes_unknown_sizes() -> None:
    inputs = keras.Input((None, None, 3))
    model = keras.Model(inputs, ChannelAffine()(inputs))
    images = np.random.default_rng(3).normal(size=(2, 4, 7, 3)).astype("float32")
    np.testing.assert_array_equal(model(images), images)
    assert [(weight.name, weight.shape) for weight in model.weights] == [
        ("scale", (3,)),
        ("offset", (3,)),
    ]


def test_config_and_file(tmp_path) -> None:
    layer, (x, *_) = _case("unordered")
    model = keras.Sequential([keras.Input(x.shape[1:]), layer])
    model.save(tmp_path / "affine.keras")
    loaded = keras.models.load_model(tmp_path / "affine.keras")
    np.testing.assert_array_equal(loaded(x), model(x))
    assert loaded.layers[0].get_config() == layer.get_config()
    layer = ChannelAffine(axis=1, scale_initializer=keras.initializers.Constant(2.0))
    copy = ChannelAffine.from_config(layer.get_config())
    copy.build((None, 2, 3))
    assert copy.scale.numpy().tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("axis", "shape", "message"),
    [
        (0, (None, 4, 3), r"`axis` must not name the batch axis 0. Received: axis=0"),
        (3, (None, 4, 3), r"Received: axis=3"),
        (-4, (None, 4, 3), r"Received: axis=-4"),
        ((1, -2), (None, 4, 3), r"`axis` must not name an axis twice. Received: axis=\(1, -2\)"),
        ((), (None, 4, 3), r"Received: axis=\(\)"),
        (
            -1,
            (None, 4, None),
            r"known size; the inputs have shape \(None, 4, None\). Received: axis=-1",
        ),
    ],
)
def test_bad_axes(axis: int | tuple, shape: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChannelAffine(axis=axis).build(shape)
