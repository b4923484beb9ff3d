"""PReLU against Eq. 1 of He et al. and the gradients below it, in NumPy float64."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import PReLU

# A channels-last and a channels-first case, a dense one, a shared one, one in one dimension, three
# dimensions, negative shared axes as in case 25, and one slope per position.
CASES = {
    "last": ((2, 5, 4, 3), {}, (1, 1, 3)),
    "first": ((2, 3, 5, 4), {"axis": 1}, (3, 1, 1)),
    "dense": ((6, 3), {}, (3,)),
    "shared": ((2, 5, 4, 3), {"shared": True}, (1, 1, 1)),
    "1d": ((2, 5, 3), {}, (1, 3)),
    "3d": ((2, 3, 2, 4, 3), {}, (1, 1, 1, 3)),
    "shared_axes": ((2, 5, 4, 3), {"shared_axes": [-3, -2]}, (1, 1, 3)),
    "shared_axis": ((2, 5, 4, 3), {"shared_axes": 1}, (1, 4, 3)),
    "per_position": ((2, 5, 4, 3), {"shared_axes": []}, (5, 4, 3)),
    "axes": ((2, 5, 4, 3), {"axis": (1, -1)}, (5, 1, 3)),
}


def _case(name: str, dtype: str = "float32") -> tuple[PReLU, np.ndarray, np.ndarray]:
    """A built layer with slopes of its own, and an input that holds zeros of both signs."""
    shape, arguments, alpha_shape = CASES[name]
    generator = np.random.default_rng(23)
    y = generator.normal(0.3, 2.0, shape).astype("float32")
    y.flat[:3] = [0.0, -0.0, -4.0]
    alpha = generator.uniform(-0.3, 0.9, alpha_shape).astype("float32")
    layer = PReLU(**arguments, dtype=dtype)
    layer.build((None, *shape[1:]))
    layer.alpha.assign(alpha)
    return layer, y, alpha


def _expected(
    y: np.ndarray, alpha: np.ndarray, upstream: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """f(y), dl/dy and dl/dalpha of the paper, given dl/df."""
    y, alpha, upstream = (np.asarray(array, "float64") for array in (y, alpha, upstream))
    value = np.maximum(0, y) + alpha * np.minimum(0, y)
    of_y = np.where(y > 0, 1.0, np.broadcast_to(alpha, y.shape)) * upstream
    of_each = np.where(y > 0, 0.0, y) * upstream
    shared = (0, *(axis + 1 for axis, size in enumerate(alpha.shape) if size == 1))
    return value, of_y, of_each.sum(axis=shared).reshape(alpha.shape)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients(name: str, jit: bool) -> None:
    layer, y, alpha = _case(name)
    upstream = np.random.default_rng(5).normal(size=y.shape).astype("float32")

    @tf.function(jit_compile=jit)
    def run(y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            tape.watch(y)
            output = layer(y)
        return output, *tape.gradient(output, [y, layer.alpha.value], output_gradients=upstream)

    value, of_y, of_alpha = (tensor.numpy() for tensor in run(tf.constant(y)))
    expected = _expected(y, alpha, upstream)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(of_y, expected[1], rtol=1e-6)
    # float32 sums of up to 120 terms.
    np.testing.assert_allclose(of_alpha, expected[2], rtol=1e-5, atol=1e-5)


def test_gradient_of_the_gradient() -> None:
    layer, y, alpha = _case("last")
    y = tf.constant(y)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(y)
            loss = tf.reduce_sum(layer(y) ** 2)
        penalty = tf.reduce_sum(inner.gradient(loss, y) ** 2)
    of_alpha = outer.gradient(penalty, layer.alpha.value).numpy()
    # d loss/dy = 2 alpha^2 y where y <= 0, so that d penalty/dalpha = sum 16 alpha^3 y^2.
    negative = np.minimum(np.asarray(y, "float64"), 0)
    expected = 16 * alpha.astype("float64") ** 3 * (negative**2).sum((0, 1, 2))
    np.testing.assert_allclose(of_alpha, expected, rtol=1e-5, atol=1e-6)


def test_infinite_input_leaves_the_slopes_gradient_finite() -> None:
    layer = PReLU()
    layer.build((None, 2))
    with tf.GradientTape() as tape:
        output = layer(np.array([[np.inf, -2.0]], "float32"))
    assert output.numpy().tolist() == [[np.inf, -0.5]]
    assert tape.gradient(output, layer.alpha.value).numpy().tolist() == [0.0, -2.0]


def test_slopes_of_half_precision_networks_are_summed_in_float32() -> None:
    layer = PReLU(dtype="mixed_float16")
    y = tf.fill([64, 16, 16, 2], tf.constant(-8.0, tf.float16))
    layer.build(y.shape)
    with tf.GradientTape() as tape:
        output = layer(y)
    of_alpha = tape.gradient(output, layer.alpha.value)
    assert output.dtype == tf.float16
    assert of_alpha.dtype == tf.float32
    # -131072, twice the largest float16.
    np.testing.assert_array_equal(of_alpha.numpy().ravel(), [-8.0 * 64 * 16 * 16] * 2)
    np.testing.assert_array_equal(output.numpy(), np.float16(-2.0))


def test_scaled_losses_of_half_precision_networks_do_not_overflow() -> None:
    """The product with the gradient from above is taken in float32, too: 2^13 * -8 = -2^16."""
    layer = PReLU(dtype="mixed_float16")
    y = tf.constant([[-8.0, -8.0]], tf.float16)
    with tf.GradientTape() as tape:
        output = layer(y)
    upstream = tf.constant([[2.0**13, -(2.0**13)]], tf.float16)
    of_alpha = tape.gradient(output, layer.alpha.value, output_gradients=upstream)
    assert of_alpha.numpy().tolist() == [-(2.0**16), 2.0**16]


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    # Half an ulp of the type for the product; the slopes themselves are rounded to it as well.
    [("float64", 1e-15), ("mixed_float16", 1.5e-3), ("mixed_bfloat16", 1.2e-2)],
)
def test_precision_policies(policy: str, tolerance: float) -> None:
    layer, y, alpha = _case("last", policy)
    y = tf.cast(y, layer.compute_dtype)
    wide = np.asarray(tf.cast(y, tf.float64))
    output = layer(y)
    assert output.dtype.name == layer.compute_dtype
    expected, _, _ = _expected(wide, alpha, wide)
    np.testing.assert_allclose(np.asarray(tf.cast(output, tf.float64)), expected, rtol=tolerance)


def test_case_23_unknown_height_and_width() -> None:
    inputs = keras.Input((None, None, 3))
    model = keras.Model(inputs, PReLU()(inputs))
    assert model.count_params() == 3
    # Four channels of -4 and 8 through the starting slope: f(-4) = -1.
    images = np.tile(np.array([-4.0, 8.0, 0.0], "float32"), (1, 2, 5, 1))
    np.testing.assert_array_equal(
        model(images).numpy(), np.tile(np.array([-1.0, 8.0, 0.0], "float32"), (1, 2, 5, 1))
    )


@pytest.mark.parametrize(
    ("arguments", "shape", "count"),
    [
        ({}, (None, 8, 8, 16), 16),
        ({"shared": True}, (None, 8, 8, 16), 1),
        ({"axis": 1}, (None, 16, None, None), 16),
        ({"shared": True}, (None, None, None, None), 1),
    ],
)
def test_case_23_number_of_slopes(arguments: dict, shape: tuple, count: int) -> None:
    layer = PReLU(**arguments)
    layer.build(shape)
    assert layer.count_params() == count
    assert np.unique(layer.alpha.numpy()).tolist() == [0.25]
    assert layer.alpha.name == "alpha"
    assert layer.losses == []


def test_case_25_load_edit_save_load(tmp_path) -> None:
    inputs = keras.Input((6, 6, 3))
    hidden = PReLU(shared_axes=[-3, -2], name="slopes")(inputs)
    outputs = keras.layers.Dense(2)(keras.layers.Flatten()(hidden))
    model = keras.Model(inputs, outputs)
    model.get_layer("slopes").alpha.assign([[[0.1, -0.2, 0.7]]])
    model.save(tmp_path / "whole.keras")
    loaded = keras.models.load_model(tmp_path / "whole.keras")
    edited = keras.Model(loaded.input, loaded.layers[-2].output)
    edited.save(tmp_path / "edited.keras")
    again = keras.models.load_model(tmp_path / "edited.keras")
    images = np.random.default_rng(25).normal(size=(4, 6, 6, 3)).astype("float32")
    np.testing.assert_array_equal(again(images).numpy(), edited(images).numpy())
    positive = PReLU(shared_axes=[1, 2])
    positive.build((None, 6, 6, 3))
    positive.set_weights(model.get_layer("slopes").get_weights())
    np.testing.assert_array_equal(positive(images).numpy().reshape(4, -1), again(images).numpy())


def test_config_keeps_initializer_regularizer_constraint_and_sharing() -> None:
    layer = PReLU(
        alpha_initializer=keras.initializers.RandomUniform(0.1, 0.2, seed=4),
        alpha_regularizer=keras.regularizers.L2(0.5),
        alpha_constraint=keras.constraints.NonNeg(),
        shared_axes=(1, 2),
        name="slopes",
    )
    copy = PReLU.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    for each in (layer, copy):
        each.build((None, 4, 4, 5))
    np.testing.assert_array_equal(copy.alpha.numpy(), layer.alpha.numpy())
    assert 0.1 <= copy.alpha.numpy().min() < copy.alpha.numpy().max() <= 0.2
    loss = 0.5 * np.sum(layer.alpha.numpy().astype("float64") ** 2)
    np.testing.assert_allclose(sum(copy.losses), loss, rtol=1e-6)
    assert isinstance(copy.alpha.constraint, keras.constraints.NonNeg)
    shared = PReLU.from_config(PReLU(shared=True, alpha_initializer=0.5, axis=1).get_config())
    shared.build((None, 4, 4, 5))
    assert shared.alpha.numpy().tolist() == [[[0.5]]]


def test_a_numpy_number_is_a_starting_slope() -> None:
    layer = PReLU(alpha_initializer=np.float32(0.125))
    layer.build((None, 2))
    assert layer.alpha.numpy().tolist() == [0.125, 0.125]


def test_weights_of_keras_load(tmp_path) -> None:
    images = np.random.default_rng(1).normal(size=(2, 5, 4, 3)).astype("float32")
    slopes = np.array([[[0.1, -0.2, 0.7]]], "float32")
    models = []
    for layer in (keras.layers.PReLU(shared_axes=[1, 2]), PReLU()):
        inputs = keras.Input((None, None, 3))
        models.append(keras.Sequential([inputs, layer]))
    theirs, ours = models
    theirs.set_weights([slopes])
    theirs.save_weights(tmp_path / "slopes.weights.h5")
    ours.load_weights(tmp_path / "slopes.weights.h5")
    np.testing.assert_array_equal(ours.get_weights()[0], slopes)
    np.testing.assert_allclose(ours(images), theirs(images), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shared": "zeros"}, r"`shared` must be True or False\. Received: shared='zeros'"),
        (
            {"shared": True, "shared_axes": [1]},
            r"`shared_axes` must be None .* shared_axes=\[1\], shared=True, axis=-1",
        ),
        (
            {"axis": 1, "shared_axes": 2},
            r"`shared_axes` must be None .* shared_axes=2, shared=False, axis=1",
        ),
        (
            {"alpha_initializer": float("nan")},
            r"`alpha_initializer` must be a finite number\. Received: alpha_initializer=nan",
        ),
        ({"alpha_initializer": -np.float32("inf")}, r"Received: alpha_initializer=.*-inf"),
        ({"alpha_initializer": True}, r"Received: alpha_initializer=True"),
        ({"alpha_initializer": np.False_}, r"Received: alpha_initializer=.*False_?"),
        ({"axis": None}, r"`axis` must be an integer or a tuple .* Received: axis=None"),
        ({"axis": 1.5}, r"Received: axis=1\.5"),
        ({"axis": "c"}, r"Received: axis='c'"),
        ({"axis": True}, r"Received: axis=True"),
        ({"shared_axes": "12"}, r"`shared_axes` must be an integer .* shared_axes='12'"),
        ({"shared_axes": [1, None]}, r"Received: shared_axes=\[1, None\]"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PReLU(**arguments)


@pytest.mark.parametrize(
    ("arguments", "shape", "message"),
    [
        ({}, (None, 4, 4, None), r"input_shape=\(None, 4, 4, None\), of which axis 3 is unknown"),
        ({"shared_axes": [1]}, (None, 4, None, 3), r"of which axis 2 is unknown"),
        ({"axis": 4}, (None, 4, 4, 3), r"`axis` must lie in .* rank 4\. Received: axis=4"),
        ({"axis": 0}, (None, 4, 4, 3), r"must not name the batch axis 0\. Received: axis=0"),
        ({"axis": -4}, (None, 4, 4, 3), r"must not name the batch axis 0\. Received: axis=-4"),
        (
            {"shared_axes": [1, -3]},
            (None, 4, 4, 3),
            r"axis twice\. .*shared_axes=\(1, -3\)",
        ),
        ({"shared_axes": [-5]}, (None, 4, 4, 3), r"`shared_axes` must lie .* shared_axes=\(-5,\)"),
    ],
)
def test_bad_inputs(arguments: dict, shape: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PReLU(**arguments).build(shape)


def test_a_changed_number_of_channels_is_refused() -> None:
    layer = PReLU()
    layer(np.zeros((1, 4, 4, 3), "float32"))
    with pytest.raises(ValueError, match="axis 3 of input shape to have value 3"):
        layer(np.zeros((1, 4, 4, 1), "float32"))


def test_integers_are_not_cut_to_integers() -> None:
    np.testing.assert_array_equal(PReLU()(np.array([[-4, 8]])), [[-1.0, 8.0]])


def test_complex_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`inputs` must be real numbers\. .* dtype complex128"):
        PReLU()(tf.zeros([2, 3], tf.complex128))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"axis": np.int64(1)}, {"axis": 1}),
        ({"axis": np.array([1, 2]).tolist()}, {"axis": (1, 2)}),
        ({"axis": [np.int32(1)]}, {"axis": (1,)}),
        ({"shared_axes": np.int64(-1)}, {"shared_axes": [-1]}),
        ({"shared": np.True_}, {"shared": True}),
    ],
)
def test_numpy_numbers_are_numbers(given: dict, meant: dict) -> None:
    layer = PReLU(**given, name="it")
    layer.build((None, 4, 5, 3))
    expected = PReLU(**meant, name="it")
    expected.build((None, 4, 5, 3))
    assert json.dumps(layer.get_config()) == json.dumps(expected.get_config())
    assert layer.alpha.shape == expected.alpha.shape
