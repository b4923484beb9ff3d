"""Folding whole models: the cases of the field, names, the given model, bad input, saving."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import bnzoo
from bnzoo.surgery import convert_batch_norm, fold_batch_norm

from .models import batch_norms, example, randomize, relative_error, run

L = keras.layers
TOLERANCE = 1e-5  # That of the cases.


def test_zeros_that_padding_adds_are_not_shifted() -> None:
    """Case 37: zeros, a norm that adds 1, a 3x3 convolution of ones."""
    for padding, expected in [("same", [4.0, 6.0, 9.0]), ("valid", [9.0, 9.0, 9.0])]:
        norm, conv = L.BatchNormalization(), L.Conv2D(1, 3, padding=padding)
        model = keras.Sequential([keras.Input((4, 4, 1)), norm, conv])
        norm.beta.assign([1.0])
        conv.kernel.assign(np.ones((3, 3, 1, 1)))
        folded, report = fold_batch_norm(model, return_report=True)
        assert report.count("folded") == (padding == "valid")
        assert batch_norms(folded) == []
        for each in (model, folded):
            y = run(each, np.zeros((1, 4, 4, 1), "float32"))[0][0, :, :, 0]
            corner, edge, center = y[0, 0], y[0, 1], y[1, 1]
            np.testing.assert_allclose([corner, edge, center], expected, rtol=1e-6)


def _nested() -> keras.Model:
    """Case 39: Functional holds Sequential holds Functional, and one model called twice."""

    def block(x: Any, level: str) -> Any:
        x = L.Conv2D(3, 3, padding="same", name=f"conv_{level}")(x)
        return L.ReLU(name=f"relu_{level}")(L.BatchNormalization(name=f"bn_{level}")(x))

    deep_inputs = keras.Input((4, 4, 3))
    deep = keras.Model(deep_inputs, block(deep_inputs, "deep"), name="deep")
    middle = keras.Sequential(
        [
            keras.Input((4, 4, 3)),
            L.Conv2D(3, 3, padding="same", name="conv_middle"),
            L.BatchNormalization(name="bn_middle"),
            deep,
        ],
        name="middle",
    )
    shared_inputs = keras.Input((4, 4, 3))
    shared = keras.Model(shared_inputs, block(shared_inputs, "shared"), name="shared")
    inputs = keras.Input((4, 4, 3), name="image")
    x = middle(block(inputs, "outer"))
    x = L.Add(name="sum")([shared(x), shared(inputs)])
    return randomize(keras.Model(inputs, {"y": L.GlobalAveragePooling2D(name="y")(x), "x": x}))


def test_every_level_of_nesting() -> None:
    model = _nested()
    inputs = example(model)
    before = run(model, inputs)
    values = [np.array(variable) for variable in model.variables]
    folded, report = fold_batch_norm(model, return_report=True)
    names = {"bn_outer", "middle/bn_middle", "shared/bn_shared", "middle/deep/bn_deep"}
    assert {fate.name for fate in report.batch_norms} == names
    assert report.count("folded") == 4
    assert batch_norms(folded) == []
    assert relative_error(model, folded, inputs) < TOLERANCE

    kept = [layer.name for layer in model._flatten_layers() if "bn_" not in layer.name]
    assert [layer.name for layer in folded._flatten_layers()] == kept
    assert folded.output_names == model.output_names
    keras.tree.assert_same_structure(folded.output, model.output)

    for variable in folded.variables:
        variable.assign(tf.zeros_like(variable))
    for variable, value in zip(model.variables, values, strict=True):
        np.testing.assert_array_equal(variable, value)
    for expected, got in zip(before, run(model, inputs), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_layers_shared_by_two_models() -> None:
    conv, norm = L.Conv2D(3, 1), L.BatchNormalization()

    def model(name: str, last: keras.Layer) -> keras.Model:
        inputs = keras.Input((4, 4, 3))
        return keras.Model(inputs, last(norm(conv(inputs))), name=name)

    first, second = model("first", L.ReLU()), model("second", L.Activation("tanh"))
    inputs = keras.Input((4, 4, 3))
    outer = randomize(keras.Model(inputs, L.Add()([first(inputs), second(inputs)])))
    folded, report = fold_batch_norm(outer, return_report=True)
    assert report.count("folded") == 1
    assert folded.count_params() == 12
    assert relative_error(outer, folded) < TOLERANCE


def test_output_keeps_its_name() -> None:
    inputs = keras.Input((3,))
    x = L.BatchNormalization(name="logits", dtype="float64")(L.Dense(2, dtype="float64")(inputs))
    model = randomize(keras.Model(inputs, x))
    folded = fold_batch_norm(model)
    assert folded.output_names == ["logits"]
    assert type(folded.get_layer("logits")) is L.Identity
    assert relative_error(model, folded) < TOLERANCE


def test_sequential_of_one_norm() -> None:
    inputs = keras.Input((3,))
    inner = keras.Sequential([keras.Input((3,)), L.BatchNormalization()])
    model = randomize(keras.Model(inputs, inner(L.Dense(3)(inputs))))
    folded, report = fold_batch_norm(model, return_report=True)
    assert report.count("affine") == 1
    assert relative_error(model, folded) < TOLERANCE


def test_folding_twice_changes_nothing_more() -> None:
    model = _nested()
    inputs = keras.Input((4, 4, 3))
    x = L.BatchNormalization()(L.ReLU()(model(inputs)["x"]))
    outer = randomize(keras.Model(inputs, x))
    folded, first = fold_batch_norm(outer, return_report=True)
    again, second = fold_batch_norm(folded, return_report=True)
    assert first.count("affine") == 1
    assert again is folded
    assert second.batch_norms == ()
    assert second.after == second.before == first.after


def test_either_implementation_folds_alike() -> None:
    model = _nested()
    folded, converted = fold_batch_norm(model), fold_batch_norm(convert_batch_norm(model))
    for expected, got in zip(folded.get_weights(), converted.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_one_value_per_activation_leaves_no_norm() -> None:
    model = keras.Sequential(
        [keras.Input((3, 3, 2)), L.Conv2D(2, 2), bnzoo.layers.BatchNormalization((1, 2, 3))]
    )
    randomize(model)
    folded, report = fold_batch_norm(model, return_report=True)
    assert report.count("affine") == 1
    assert folded.layers[-1].scale.shape == (2, 2, 2)
    assert relative_error(model, folded) < TOLERANCE


@pytest.mark.parametrize("axes", [(2, 3), (-1, 1), 1], ids=str)
def test_affine_of_any_axes(axes: Any) -> None:
    model = keras.Sequential(
        [keras.Input((3, 4, 2)), L.ReLU(), bnzoo.layers.BatchNormalization(axes), L.ReLU()]
    )
    randomize(model)
    assert relative_error(model, fold_batch_norm(model)) < TOLERANCE


def test_compiled_model_stays_so_and_the_new_one_is_not() -> None:
    model = _nested()
    model.compile("adam", loss=lambda y_true, y_pred: 0.0)
    optimizer = model.optimizer
    folded = fold_batch_norm(model)
    assert model.optimizer is optimizer
    assert not folded.compiled


def test_model_without_norms_is_returned_as_it_is() -> None:
    model = keras.Sequential([keras.Input((3,)), L.Dense(2)])
    folded, report = fold_batch_norm(model, return_report=True)
    assert folded is model
    assert report.summary == "no BatchNormalization: the model is returned as it is"
    assert fold_batch_norm(model) is model


def test_sizes() -> None:
    inputs = keras.Input((4, 4, 3))
    inner = keras.Sequential(
        [keras.Input((4, 4, 3)), L.Conv2D(3, 1, use_bias=False), L.BatchNormalization(), L.ReLU()]
    )
    x = L.BatchNormalization()(inner(inner(inputs)))
    _, report = fold_batch_norm(keras.Model(inputs, x + inputs), return_report=True)
    # 9 of the kernel and 4 x 3 of each norm; then 9 and 3 biases, and 2 x 3 of the affine map.
    assert (report.before.parameters, report.after.parameters) == (33, 18)
    assert (report.before.operations, report.after.operations) == (8, 6)
    assert (report.before.batch_norms, report.after.batch_norms) == (2, 0)
    assert report.summary == (
        "2 BatchNormalization: 1 folded, 1 affine, 0 kept; parameters 33 -> 18, operations 8 -> 6"
    )


def test_saves_loads_and_exports(tmp_path: Any) -> None:
    inputs = keras.Input((4, 4, 3))
    x = L.BatchNormalization()(L.ReLU()(_nested()(inputs)["x"]))
    model = randomize(keras.Model(inputs, x))
    folded = fold_batch_norm(model)
    folded.save(tmp_path / "folded.keras")
    assert relative_error(folded, keras.models.load_model(tmp_path / "folded.keras")) == 0
    folded.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    for batch in (1, 5):
        image = example(model, batch)
        np.testing.assert_allclose(loaded.serve(image), run(model, image)[0], rtol=1e-4, atol=1e-5)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="mine")
        self.norm = L.BatchNormalization()

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.norm(x)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Subclassed, ValueError, "functional or Sequential.*Received: Subclassed 'mine'"),
        (lambda: keras.Sequential([L.Dense(2)], name="s"), ValueError, "`model` must be built"),
        (lambda: L.Dense(2), TypeError, "`model` must be a keras.Model. Received: Dense"),
    ],
)
def test_refuses(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fold_batch_norm(make())
