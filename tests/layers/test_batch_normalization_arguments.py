"""BatchNormalization as a part of Keras: its arguments, errors, configuration and weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import BatchNormalization


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"momentum": 1.5},
            r"`momentum` must be None or a number in \[0, 1\]. Received: momentum=1.5",
        ),
        ({"momentum": -0.1}, r"`momentum` must be .* Received: momentum=-0.1"),
        ({"momentum": float("nan")}, r"`momentum` must be .* Received: momentum=nan"),
        ({"momentum": "0.9"}, r"`momentum` must be .* Received: momentum='0.9'"),
        ({"momentum": True}, r"`momentum` must be .* Received: momentum=True"),
        ({"momentum": [0.9]}, r"`momentum` must be .* Received: momentum=\[0.9\]"),
        ({"momentum": 1j}, r"`momentum` must be .* Received: momentum=1j"),
        ({"epsilon": -1e-3}, r"`epsilon` must be a finite number >= 0. Received: epsilon=-0.001"),
        ({"epsilon": None}, r"`epsilon` must be .* Received: epsilon=None"),
        ({"epsilon": "x"}, r"`epsilon` must be .* Received: epsilon='x'"),
        ({"epsilon": True}, r"`epsilon` must be .* Received: epsilon=True"),
        ({"epsilon": float("inf")}, r"`epsilon` must be .* Received: epsilon=inf"),
        ({"epsilon": float("nan")}, r"`epsilon` must be .* Received: epsilon=nan"),
        ({"renorm": True}, r"`renorm` must be False: .* Received: renorm=True"),
        ({"axis": 1.5}, r"`axis` must be an integer or a tuple of integers. Received: axis=1.5"),
        ({"axis": "channels"}, r"`axis` must be an integer .* Received: axis='channels'"),
        ({"axis": None}, r"`axis` must be an integer .* Received: axis=None"),
        ({"axis": True}, r"`axis` must be an integer .* Received: axis=True"),
        ({"axis": (1, "2")}, r"`axis` must be an integer .* Received: axis=\(1, '2'\)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchNormalization(**arguments)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (4, r"`axis` must lie in \[-4, 4\) for inputs of rank 4. Received: axis=4"),
        (-5, r"`axis` must lie in \[-4, 4\) for inputs of rank 4. Received: axis=-5"),
        ((), r"`axis` must name at least one axis. Received: axis=\(\)"),
        ((3, -1), r"`axis` must not name an axis twice. Received: axis=\(3, -1\)"),
        (0, r"`axis` must not name the batch axis 0. Received: axis=0"),
        ((-4, 3), r"`axis` must not name the batch axis 0. Received: axis=\(-4, 3\)"),
        (
            (1, 2, 3),
            r"`axis` must name axes of known size; the inputs have shape \(None, None, 5, 3\). "
            r"Received: axis=\(1, 2, 3\)",
        ),
    ],
)
def test_a_bad_axis(axis: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchNormalization(axis=axis).build((None, None, 5, 3))


@pytest.mark.parametrize("shape", [(2, 3, 4), (2,), (2, 5), (1, 4), (3, 3)])
def test_a_mask_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    message = re.escape(
        "`mask` must have the shape of the inputs without the last axis, or without the channel "
        f"axis. Received: mask of shape {shape} for inputs of shape (2, 3, 4)"
    )
    with pytest.raises(ValueError, match=message):
        BatchNormalization()(tf.zeros([2, 3, 4]), training=True, mask=tf.ones(shape, tf.bool))


def test_a_changed_channel_size() -> None:
    layer = BatchNormalization()
    layer.build((None, 3))
    with pytest.raises(ValueError, match=r"expected axis 1 of input shape to have value 3"):
        layer(tf.zeros([2, 4]))


def test_it_is_found_by_an_isinstance_check_for_keras_own() -> None:
    assert isinstance(BatchNormalization(), keras.layers.BatchNormalization)


def test_defaults_are_those_of_keras() -> None:
    ours, theirs = BatchNormalization(name="bn"), keras.layers.BatchNormalization(name="bn")
    assert ours.get_config() == theirs.get_config()


def full_arguments() -> dict[str, Any]:
    """None at its default, all that Keras' layer has too."""
    return {
        "axis": 1,
        "momentum": 0.7,
        "epsilon": 1e-4,
        "gamma_initializer": keras.initializers.Constant(0.5),
        "beta_initializer": keras.initializers.Constant(0.25),
        "moving_mean_initializer": keras.initializers.Constant(2.0),
        "moving_variance_initializer": keras.initializers.Constant(3.0),
        "beta_regularizer": keras.regularizers.L2(0.1),
        "gamma_regularizer": keras.regularizers.L2(0.2),
        "beta_constraint": keras.constraints.NonNeg(),
        "gamma_constraint": keras.constraints.UnitNorm(),
        "synchronized": True,
        "name": "norm",
        "dtype": "mixed_bfloat16",
        "trainable": False,
    }


def test_a_configuration_of_keras_makes_the_same_layer() -> None:
    theirs = keras.layers.BatchNormalization(**full_arguments())
    ours = BatchNormalization.from_config(theirs.get_config())
    assert ours.get_config() == theirs.get_config()


@pytest.mark.parametrize("special", [{"axis": (1, 2, 3)}, {"momentum": None}, {"center": False}])
def test_configuration_round_trip(special: dict[str, Any]) -> None:
    layer = BatchNormalization(**{**full_arguments(), **special})
    again = BatchNormalization.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    for name, given in special.items():
        assert getattr(again, name) == given


def test_initializers_regularizers_and_constraints_reach_the_weights() -> None:
    layer = BatchNormalization(**{**full_arguments(), "trainable": True})
    layer.build((None, 2, 4))
    start = {weight.name: float(weight[0]) for weight in layer.weights}
    assert start == {"gamma": 0.5, "beta": 0.25, "moving_mean": 2.0, "moving_variance": 3.0}
    assert isinstance(layer.gamma.constraint, keras.constraints.UnitNorm)
    assert isinstance(layer.beta.constraint, keras.constraints.NonNeg)
    assert float(sum(layer.losses)) == pytest.approx(0.2 * 2 * 0.25 + 0.1 * 2 * 0.0625)


def _models() -> tuple[keras.Model, keras.Model]:
    """The same model with Keras' layer and with this one, Keras' with weights of its own."""

    def build(layer_class: type[keras.layers.Layer]) -> keras.Model:
        inputs = keras.Input((4, 4, 3))
        x = keras.layers.Conv2D(5, 3, name="conv")(inputs)
        x = layer_class(name="bn")(x)
        return keras.Model(inputs, keras.layers.Dense(2, name="head")(x))

    theirs, ours = build(keras.layers.BatchNormalization), build(BatchNormalization)
    random = np.random.default_rng(3)
    theirs.set_weights([random.uniform(0.5, 2.0, w.shape) for w in theirs.weights])
    return theirs, ours


@pytest.mark.parametrize("how", ["set_weights", "weights.h5", "keras"])
def test_weights_pass_to_and_from_keras(how: str, tmp_path: Path) -> None:
    theirs, ours = _models()
    x = np.random.default_rng(4).normal(size=(2, 4, 4, 3)).astype("float32")

    def move(source: keras.Model, target: keras.Model) -> None:
        if how == "set_weights":
            target.set_weights(source.get_weights())
        else:
            path = tmp_path / f"{source.layers[2].__class__.__module__}.{how}"
            source.save(path) if how == "keras" else source.save_weights(path)
            target.load_weights(path)

    move(theirs, ours)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    back, _ = _models()
    back.set_weights([np.zeros_like(w) for w in back.get_weights()])
    move(ours, back)
    for got, want in zip(back.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_stateless_call_returns_the_moved_statistics() -> None:
    layer = BatchNormalization(momentum=0.0)
    layer.build((None, 1))
    state = [tf.identity(v) for v in layer.non_trainable_variables]
    x = tf.constant([[1.0], [2.0], [3.0], [4.0]])
    _, moved = layer.stateless_call(
        [tf.identity(v) for v in layer.trainable_variables], state, x, training=True
    )
    assert [round(float(v[0]), 4) for v in moved] == [2.5, 1.6667]
    assert float(layer.moving_mean[0]) == 0.0


@pytest.mark.parametrize("axis", [np.int64(1), [1], [np.int32(-1)], np.int8(-1)])
def test_numpy_numbers_and_a_list_of_one_axis(axis: Any) -> None:
    # Configurations of tf.keras 2 have the axis as a list of one.
    layer = BatchNormalization(axis, np.float32(0.5), np.float64(1e-5))
    layer.build((None, 3))
    assert layer.moving_mean.shape == (3,)
    config = json.loads(json.dumps(layer.get_config()))
    assert (config["momentum"], config["epsilon"]) == (0.5, 1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [("float32", "int32"), ("float32", "uint8"), ("mixed_float16", "int32"), ("float64", "int64")],
)
def test_integer_inputs(policy: str, dtype: str, training: bool) -> None:
    # In float16 70,000 would be infinite, and in float32 16,777,217 would be 16,777,216.
    top = {"uint8": 250, "int32": 70_000, "int64": 16_777_217}[dtype]
    x = np.array([[top], [top - 1], [top - 2]], dtype)
    theirs = keras.layers.BatchNormalization(epsilon=1e-3, dtype=policy)
    ours = BatchNormalization(epsilon=1e-3, dtype=policy)
    y = ours(tf.constant(x), training=training)
    assert y.dtype == ours.compute_dtype
    if training:
        wide = x.astype("float64")
        expected = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-3)
    else:
        expected = theirs(tf.constant(x), training=False)
    # One step of float16 is 1e-3 of a value.
    np.testing.assert_allclose(y, expected, rtol=2e-3 if policy == "mixed_float16" else 1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", ["complex64", "complex128", "string"])
def test_inputs_that_are_no_real_numbers(dtype: str, training: bool) -> None:
    x = tf.zeros([2, 3], dtype)
    message = rf"`inputs` must be real numbers\. Received: inputs of dtype {dtype}"
    with pytest.raises(ValueError, match=message):
        BatchNormalization()(x, training=training)


@pytest.mark.parametrize("jit", [False, True])
def test_fit_learns_the_statistics(jit: bool) -> None:
    random = np.random.default_rng(9)
    x = random.normal(3.0, 2.0, (256, 4)).astype("float32")
    layer = BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=jit)
    model.fit(x, x[:, :1], batch_size=256, epochs=20, verbose=0)
    np.testing.assert_allclose(layer.moving_mean, x.mean(0), rtol=1e-4)
    np.testing.assert_allclose(layer.moving_variance, x.var(0, ddof=1), rtol=1e-4)
