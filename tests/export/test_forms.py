from __future__ import annotations

import gc
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import bnzoo
from bnzoo.surgery import fold_batch_norm
from export.forms import FORMS, build_form, in_precision, input_specs
from tests.export.runs import LABELS, small_network

IMAGES = np.random.default_rng(0).normal(size=(5, 12, 10, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def network() -> keras.Model:
    return small_network()


@pytest.fixture(scope="module")
def folded(network: keras.Model) -> keras.Model:
    return fold_batch_norm(network)


@pytest.mark.parametrize("form", FORMS)
# Folding reorders float32 sums; bfloat16 has 8 bits, and the errors of three layers add up.
@pytest.mark.parametrize(("precision", "atol"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_computes_what_the_network_does(
    network: keras.Model, folded: keras.Model, form: str, precision: str, atol: float
) -> None:
    function = build_form(folded, form, precision)
    answer = function(images=tf.constant(IMAGES))
    assert answer.dtype == tf.float32
    expected = network.predict(IMAGES, verbose=0)
    np.testing.assert_allclose(answer, expected, atol=atol)
    assert (np.abs(answer - expected).max() > 1e-4) == (precision == "bfloat16")
    assert function(images=tf.constant(IMAGES[:2])).shape == (2, len(LABELS))


def test_constants_are_in_the_graph_and_nothing_else_is_read(folded: keras.Model) -> None:
    function = build_form(folded, "constants")
    assert not function.captured_inputs
    held = sum(
        tf.make_ndarray(operation.get_attr("value")).size
        for operation in function.graph.get_operations()
        if operation.type == "Const" and operation.outputs[0].dtype == tf.float32
    )
    assert held == folded.count_params()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_tensors_that_layers_hold_are_in_the_graph_of_constants(precision: str) -> None:
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    scaler = keras.layers.Normalization(mean=[1.0, 2.0, 3.0], variance=[4.0, 5.0, 6.0])
    # The inputs are not in the order of their names.
    network = keras.Model([right, left], {"b": scaler(left) - right, "a": scaler(right)})
    function = build_form(network, "constants", precision)
    assert not function.captured_inputs
    values = np.random.default_rng(1).normal(size=(2, 4, 3)).astype(np.float32)
    answer = function(left=tf.constant(values[0]), right=tf.constant(values[1]))
    expected = network.predict([values[1], values[0]], verbose=0)
    for name in ("a", "b"):
        np.testing.assert_allclose(answer[name], expected[name], atol=1e-6)
    assert function(left=values[0, :1], right=values[1, :1])["a"].shape == (1, 3)


def test_bfloat16_holds_all_weights_but_the_classifiers(folded: keras.Model) -> None:
    types = {
        weight.path: weight.dtype for weight in in_precision(folded, "bfloat16").trainable_weights
    }
    assert types == {
        weight.path: "float32" if weight.path.startswith("predictions") else "bfloat16"
        for weight in folded.trainable_weights
    }
    assert len(types) == 6
    convolutions = {
        operation.outputs[0].dtype
        for operation in build_form(folded, "constants", "bfloat16").graph.get_operations()
        if operation.type == "Conv2D"
    }
    assert convolutions == {tf.bfloat16}


def test_the_classifier_before_a_softmax_of_its_own_stays_float32() -> None:
    image = keras.Input((4,))
    x = keras.layers.Dense(3, name="hidden")(image)
    x = keras.layers.Dense(2, name="logits")(x)
    network = keras.Model(image, keras.layers.Softmax(name="softmax")(x))
    lowered = in_precision(network, "bfloat16")
    assert {layer.name: layer.compute_dtype for layer in lowered.layers[1:]} == {
        "hidden": "bfloat16",
        "logits": "float32",
        "softmax": "float32",
    }


@pytest.mark.parametrize("form", FORMS)
def test_an_ensemble_in_bfloat16(form: str) -> None:
    members = [small_network(), small_network()]
    ensemble = fold_batch_norm(bnzoo.models.Ensemble(members))
    answer = build_form(ensemble, form, "bfloat16")(images=tf.constant(IMAGES))
    expected = np.mean([member.predict(IMAGES, verbose=0) for member in members], axis=0)
    np.testing.assert_allclose(answer, expected, atol=2e-2)


def test_variables_outlive_the_network_of_another_precision(folded: keras.Model) -> None:
    function = build_form(folded, "variables", "bfloat16")
    gc.collect()
    assert function(images=tf.constant(IMAGES)).shape == (5, len(LABELS))


def test_several_inputs_and_a_dict_keep_their_names() -> None:
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    network = keras.Model([left, right], {"sum": left + right, "product": left * right})
    assert list(input_specs(network)) == ["left", "right"]
    answer = build_form(network)(left=tf.constant([[1.0, 2, 3]]), right=tf.constant([[4.0, 5, 6]]))
    assert {name: value.numpy().tolist() for name, value in answer.items()} == {
        "sum": [[5, 7, 9]],
        "product": [[4, 10, 18]],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("frozen",), "`form` must be one of variables, constants. Received: form='frozen'"),
        (
            ("variables", "int4"),
            "`precision` must be one of float32, bfloat16. Received: precision='int4'",
        ),
    ],
)
def test_refuses_what_it_does_not_know(
    folded: keras.Model, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_form(folded, *arguments)
