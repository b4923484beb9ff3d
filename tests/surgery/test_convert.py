"""Conversion keeps all of a model but the implementation of Batch Normalization."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import bnzoo
from bnzoo.surgery import convert_batch_norm

from .models import batch_norms, example, randomize, relative_error

L = keras.layers
KERAS, BNZOO = L.BatchNormalization, bnzoo.layers.BatchNormalization
TOLERANCE = 1e-6  # A few units of rounding in float32.


def _nested(norm: type[keras.Layer] = KERAS) -> keras.Model:
    """Norms at three levels, one of them in a model that is called twice, one shared."""
    deep = keras.Sequential(
        [keras.Input((4, 4, 3)), L.Conv2D(3, 1), norm(name="bn_deep")], name="d"
    )
    a, b = keras.Input((4, 4, 3), name="a"), keras.Input((4, 4, 3), name="b")
    middle_inputs = keras.Input((4, 4, 3))
    middle_outputs = norm(name="bn_middle", center=False)(deep(middle_inputs))
    middle = keras.Model(middle_inputs, middle_outputs, name="m")
    shared = norm(name="bn_shared", scale=False, gamma_regularizer="l2", epsilon=0.01)
    x = L.Add()([shared(middle(a)), shared(middle(b))])
    x = L.TimeDistributed(norm(name="bn_rows", axis=1), name="rows")(x)
    return randomize(keras.Model({"a": a, "b": b}, {"x": x, "both": [a + b, x]}, name="outer"))


@pytest.mark.parametrize(
    ("start", "to", "target"), [(KERAS, "bnzoo", BNZOO), (BNZOO, "keras", KERAS)]
)
def test_replaces_all_and_computes_the_same(
    start: type[keras.Layer], to: str, target: type[keras.Layer]
) -> None:
    model = _nested(start)
    converted = convert_batch_norm(model, to=to)
    assert {type(norm) for norm in batch_norms(converted)} == {target}
    assert len(batch_norms(converted)) == len(batch_norms(model))
    assert relative_error(model, converted) < TOLERANCE
    assert converted.output_names == model.output_names
    keras.tree.assert_same_structure(converted.output, model.output)
    names = [layer.name for layer in model._flatten_layers()]
    assert [layer.name for layer in converted._flatten_layers()] == names
    assert not converted.compiled


def test_there_and_back() -> None:
    model = _nested()
    back = convert_batch_norm(convert_batch_norm(model), to="keras")
    for expected, got in zip(model.variables, back.variables, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_keeps_every_argument() -> None:
    norm = KERAS(
        axis=1,
        momentum=0.7,
        epsilon=0.02,
        beta_initializer="ones",
        gamma_initializer=keras.initializers.Constant(2.0),
        moving_mean_initializer="ones",
        moving_variance_initializer="zeros",
        beta_regularizer=keras.regularizers.L1(0.1),
        gamma_regularizer=keras.regularizers.L2(0.2),
        beta_constraint="non_neg",
        gamma_constraint=keras.constraints.MaxNorm(3.0),
        synchronized=True,
        dtype="mixed_float16",
        name="norm",
    )
    inputs = keras.Input((3, 4))
    model = keras.Model(inputs, norm(inputs))
    norm.trainable = False
    for converted in (
        convert_batch_norm(model),
        convert_batch_norm(convert_batch_norm(model), to="keras"),
    ):
        assert converted.get_layer("norm").get_config() == norm.get_config()


def test_does_not_touch_the_model() -> None:
    model = _nested()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=lambda y, p: tf.reduce_mean(p**2))
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    values = [np.array(variable) for variable in model.variables + optimizer.variables]
    inputs = example(model)
    converted = convert_batch_norm(model)
    converted(inputs, training=True)
    for variable in converted.variables:
        variable.assign(tf.ones_like(variable))
    assert model.compiled
    assert model.optimizer is optimizer
    for variable, value in zip(model.variables + optimizer.variables, values, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_trains_as_the_model_does() -> None:
    """One step: the weights agree; the moving variance is the unbiased one, m/(m-1) more."""
    inputs = keras.Input((3,))
    hidden = L.BatchNormalization(momentum=0.0, name="bn")(L.Dense(4)(inputs))
    model = randomize(keras.Model(inputs, L.Dense(1)(hidden)))
    converted = convert_batch_norm(model)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    for each in (model, converted):
        each.compile(keras.optimizers.SGD(0.1), "mse")
        each.train_on_batch(x, x[:, :1])
    for expected, got in zip(model.variables, converted.variables, strict=True):
        factor = 8 / 7 if expected.name == "moving_variance" else 1
        np.testing.assert_allclose(got, factor * np.array(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("to", ["bnzoo", "keras"])
def test_model_with_nothing_to_convert_is_returned_itself(to: str) -> None:
    plain = keras.Sequential([keras.Input((3,)), L.Dense(2)])
    assert convert_batch_norm(plain, to) is plain
    done = convert_batch_norm(_nested(), to)
    assert convert_batch_norm(done, to) is done


def test_copies_a_derived_class_as_it_is() -> None:
    class Halved(KERAS):
        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            return 0.5 * super().call(inputs, training=training, mask=mask)

    model = randomize(keras.Sequential([keras.Input((3,)), Halved(), KERAS()]))
    converted = convert_batch_norm(model)
    assert [type(layer) for layer in converted.layers] == [Halved, BNZOO]
    assert relative_error(model, converted) < TOLERANCE


def test_call_arguments_stay() -> None:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, KERAS()(inputs, training=True))
    converted = convert_batch_norm(model)
    x = np.random.default_rng(0).normal(5, 2, (6, 3)).astype("float32")
    # The statistics of the batch, not the moving ones.
    np.testing.assert_allclose(np.mean(converted(x), axis=0), 0, atol=1e-5)


def test_refuses_another_target() -> None:
    message = r"`to` must be one of 'bnzoo', 'keras'\. Received: to="
    with pytest.raises(ValueError, match=message + "'torch'"):
        convert_batch_norm(_nested(), to="torch")
    with pytest.raises(ValueError, match=message + r"\['keras'\]"):
        convert_batch_norm(_nested(), to=["keras"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": None}, "for a layer with momentum=None.*Received: 'norm'"),
        ({"axis": (1, 2)}, r"for a layer with several axes.*Received: 'norm' with axis=\(1, 2\)"),
    ],
)
def test_refuses_what_keras_does_not_have(arguments: dict[str, Any], message: str) -> None:
    model = keras.Sequential([keras.Input((3, 4)), BNZOO(name="norm", **arguments)])
    with pytest.raises(ValueError, match=message):
        convert_batch_norm(model, to="keras")


def test_axis_as_a_tuple_of_one() -> None:
    model = randomize(keras.Sequential([keras.Input((3, 4)), BNZOO(axis=(1,))]))
    converted = convert_batch_norm(model, to="keras")
    assert converted.layers[0].axis == 1
    assert relative_error(model, converted) < TOLERANCE


def test_refuses_batch_renormalization() -> None:
    model = keras.Sequential([keras.Input((3,)), KERAS(renorm=True, name="norm")])
    with pytest.raises(ValueError, match="Received: 'norm' with renorm=True"):
        convert_batch_norm(model)


def test_refuses_what_a_custom_layer_hides() -> None:
    class Block(L.Layer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.norm = KERAS(name="norm")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.norm(x)

    model = keras.Sequential([keras.Input((3,)), Block(name="block")])
    with pytest.raises(ValueError, match="Received: 'norm' inside 'block' of class Block"):
        convert_batch_norm(model)


def test_saves_and_loads(tmp_path: Any) -> None:
    model = _nested()
    converted = convert_batch_norm(model)
    converted.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert relative_error(model, loaded) < TOLERANCE
