"""What folds where, and the reason where it does not; outputs always as before."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import bnzoo
from bnzoo.surgery import FoldReport, fold_batch_norm

from .models import batch_norms, example, randomize, relative_error

L = keras.layers
TOLERANCE = 3e-6  # Float32, up to three layers of some tens of products.


def _fold(
    inputs: Any, outputs: Any, tolerance: float = TOLERANCE
) -> tuple[keras.Model, FoldReport]:
    model = randomize(keras.Model(inputs, outputs))
    folded, report = fold_batch_norm(model, return_report=True)
    assert relative_error(model, folded) < tolerance
    return folded, report


def _reason(report: FoldReport) -> str:
    assert [fate.outcome for fate in report.batch_norms] == ["affine"]
    return report.batch_norms[0].reason


def test_another_consumer_of_the_convolution() -> None:
    """Case 35: BN(c) + relu(c); a twin with a single consumer folds."""
    inputs = keras.Input((4, 4, 2))
    c = L.Conv2D(3, 3, name="c")(inputs)
    folded, report = _fold(inputs, L.Add()([L.BatchNormalization()(c), L.ReLU()(c)]))
    assert "backward: the output of 'c' is used elsewhere too" in _reason(report)
    assert batch_norms(folded) == []

    twin = L.Conv2D(3, 3, name="twin")(inputs)
    _, report = _fold(inputs, L.Add()([L.BatchNormalization()(c), L.ReLU()(twin)]))
    assert report.count("folded") == 1


def test_convolution_that_is_an_output() -> None:
    """Case 35."""
    inputs = keras.Input((4, 4, 2))
    c = L.Conv2D(3, 3, name="c")(inputs)
    _, report = _fold(inputs, [L.ReLU()(L.BatchNormalization()(c)), c])
    assert "backward: 'c' is an output of the model" in _reason(report)


def test_nonlinear_activation_of_the_convolution() -> None:
    inputs = keras.Input((4, 4, 2))
    x = L.Conv2D(3, 3, activation="relu", name="c")(inputs)
    _, report = _fold(inputs, L.BatchNormalization()(x))
    assert "backward: 'c' has a nonlinear activation" in _reason(report)


def test_input_of_the_model() -> None:
    inputs = keras.Input((3,))
    _, report = _fold(inputs, L.ReLU()(L.BatchNormalization()(inputs)))
    assert "backward: it follows an input of the model" in _reason(report)


def test_derived_layer_is_not_folded_into() -> None:
    class Standardized(L.Conv2D):
        def convolution_op(self, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
            return super().convolution_op(inputs, kernel - tf.reduce_mean(kernel))

    inputs = keras.Input((4, 4, 2))
    _, report = _fold(inputs, L.BatchNormalization()(Standardized(3, 3, name="c")(inputs)))
    assert "backward: 'c' (Standardized) is in the way" in _reason(report)


def test_layer_used_twice_with_one_norm() -> None:
    inputs = keras.Input((4, 4, 3))
    c = L.Conv2D(3, 1, name="c")
    _, report = _fold(inputs, c(L.ReLU()(L.BatchNormalization()(c(inputs)))))
    assert "backward: 'c' is called elsewhere too" in _reason(report)


def test_layer_used_twice_with_two_norms() -> None:
    a, b, c = keras.Input((4, 4, 2)), keras.Input((4, 4, 2)), L.Conv2D(3, 1, name="c")
    outputs = L.Add()([L.BatchNormalization()(c(a)), L.ReLU()(L.BatchNormalization()(c(b)))])
    _, report = _fold([a, b], outputs)
    assert report.count("affine") == 2


def test_pair_used_twice_folds() -> None:
    a, b = keras.Input((4, 4, 2)), keras.Input((4, 4, 2))
    c, norm = L.Conv2D(3, 1), L.BatchNormalization()
    _, report = _fold([a, b], L.Add()([L.ReLU()(norm(c(a))), norm(c(b))]))
    assert report.count("folded") == 1


def test_norm_used_twice_of_which_once_elsewhere() -> None:
    a, b, norm = keras.Input((4, 4, 2)), keras.Input((4, 4, 3)), L.BatchNormalization()
    _, report = _fold([a, b], L.Add()([L.ReLU()(norm(L.Conv2D(3, 1)(a))), L.ReLU()(norm(b))]))
    assert "backward: it follows an input of the model" in _reason(report)


def test_norm_after_itself() -> None:
    inputs, norm = keras.Input((3,)), L.BatchNormalization(name="bn")
    _, report = _fold(inputs, norm(norm(L.Dense(3)(inputs))))
    assert "backward: 'bn' is called elsewhere too" in _reason(report)


def test_calls_that_need_different_weights() -> None:
    """The shared norm meets the parts of the shared kernel in another order."""
    a, b = keras.Input((3,)), keras.Input((3,))
    norm, dense = L.BatchNormalization(), L.Dense(2, name="d")
    flat = [L.Flatten()(norm(L.Reshape((1, 3))(a))), L.Reshape((3,))(norm(L.Reshape((1, 3))(b)))]
    _, report = _fold([a, b], [dense(flat[0]), dense(flat[1])])
    assert report.count("folded") == 1

    norm, dense = L.BatchNormalization(), L.Dense(2, name="d")
    pair = [
        L.Flatten()(norm(L.Reshape((2, 3))(L.Concatenate()([a, b])))),
        L.Flatten()(L.Permute((2, 1))(norm(L.Reshape((2, 3))(L.Concatenate()([b, a]))))),
    ]
    _, report = _fold([a, b], [dense(pair[0]), dense(pair[1])])
    assert "forward: the calls of 'd' would need different weights" in _reason(report)


def test_norm_after_norm() -> None:
    inputs = keras.Input((4, 4, 2))
    x = L.BatchNormalization(name="second")(L.Dropout(0.5)(L.BatchNormalization()(inputs)))
    folded, report = _fold(inputs, L.ReLU()(x))
    assert [fate.outcome for fate in report.batch_norms] == ["affine", "folded"]
    assert report.batch_norms[1].into == (report.batch_norms[0].name,)
    assert len(folded.layers) == 4


def test_three_norms_after_a_convolution_and_before_one() -> None:
    inputs = keras.Input((5, 5, 2))
    x = L.Conv2D(3, 3, padding="same")(inputs)
    for _ in range(3):
        x = L.BatchNormalization()(x)
    folded, report = _fold(inputs, L.Conv2D(2, 3)(x))
    assert report.count("folded") == 3
    assert len(folded.layers) == 3


def test_norm_of_each_activation_takes_in_one_of_channels_but_not_the_reverse() -> None:
    inputs = keras.Input((4, 4, 2))
    wide, narrow = bnzoo.layers.BatchNormalization((1, 2, 3)), L.BatchNormalization(name="narrow")
    _, report = _fold(inputs, L.ReLU()(narrow(wide(inputs))))
    assert [fate.outcome for fate in report.batch_norms] == ["affine", "folded"]
    wide, narrow = bnzoo.layers.BatchNormalization((1, 2, 3)), L.BatchNormalization(name="narrow")
    _, report = _fold(inputs, L.ReLU()(wide(narrow(inputs))))
    # The one of channels goes forward into the one of activations.
    assert report.count("folded") == 1
    assert "'narrow' has fewer axes" in report.batch_norms[1].reason


def test_two_followers_both_take_it_in() -> None:
    inputs = keras.Input((4, 4, 2))
    x = L.BatchNormalization()(inputs)
    outputs = [L.Conv2D(2, 3, name="a")(x), L.Conv2D(3, 1, name="b")(L.Dropout(0.5)(x))]
    _, report = _fold(inputs, outputs)
    assert set(report.batch_norms[0].into) == {"a", "b"}


def test_two_followers_of_which_one_cannot() -> None:
    inputs = keras.Input((4, 4, 2))
    x = L.BatchNormalization()(inputs)
    _, report = _fold(inputs, [L.Conv2D(2, 3)(x), L.Conv2D(3, 3, padding="same", name="b")(x)])
    assert "forward: padding of 'b' would not get its offset" in _reason(report)


def test_concatenated_convolutions() -> None:
    inputs = keras.Input((4, 4, 2))
    parts = [L.Conv2D(n, 1, name=f"c{n}")(inputs) for n in (1, 2, 3)]
    x = L.BatchNormalization()(L.Concatenate()(parts))
    _, report = _fold(inputs, L.ReLU()(x))
    assert report.batch_norms[0].into == ("c1", "c2", "c3")


def test_concatenation_along_another_axis() -> None:
    inputs = keras.Input((4, 4, 2))
    parts = [L.Conv2D(3, 1, name=f"c{n}")(inputs) for n in (1, 2)]
    _, report = _fold(inputs, L.ReLU()(L.BatchNormalization()(L.Concatenate(axis=1)(parts))))
    assert report.batch_norms[0].into == ("c1", "c2")


def test_concatenation_with_something_else() -> None:
    inputs = keras.Input((4, 4, 2))
    x = L.Concatenate()([L.Conv2D(3, 1)(inputs), inputs])
    _, report = _fold(inputs, L.ReLU()(L.BatchNormalization()(x)))
    assert "backward: it follows an input of the model" in _reason(report)


def test_added_convolutions() -> None:
    inputs = keras.Input((4, 4, 2))
    parts = [L.Conv2D(3, 1, name=f"c{n}")(inputs) for n in (1, 2, 3)]
    _, report = _fold(inputs, L.ReLU()(L.BatchNormalization()(L.Add()(parts))))
    assert report.batch_norms[0].into == ("c1", "c2", "c3")


def test_sum_that_broadcasts() -> None:
    inputs = keras.Input((4, 4, 2))
    x = L.Add(name="sum")([L.Conv2D(3, 1)(inputs), L.Conv2D(1, 1)(inputs)])
    _, report = _fold(inputs, L.ReLU()(L.BatchNormalization()(x)))
    assert "backward: 'sum' broadcasts what it adds" in _reason(report)


def test_sum_of_a_tensor_with_itself() -> None:
    inputs = keras.Input((4, 4, 2))
    c = L.Conv2D(3, 1, name="c")(inputs)
    _, report = _fold(inputs, L.ReLU()(L.BatchNormalization()(L.Add()([c, c]))))
    assert "backward: the output of 'c' is used elsewhere too" in _reason(report)


def test_training_mode_is_kept() -> None:
    inputs = keras.Input((3,))
    inner = keras.Sequential([keras.Input((3,)), L.Dense(3), L.BatchNormalization(name="bn")])
    for outputs in (
        inner(inputs, training=True),
        L.BatchNormalization(name="bn")(L.Dense(3)(inputs), training=True),
    ):
        model = randomize(keras.Model(inputs, outputs))
        folded, report = fold_batch_norm(model, return_report=True)
        assert report.batch_norms[0].outcome == "kept"
        assert report.batch_norms[0].reason == "it is called with training=True"
        x = example(model)
        np.testing.assert_allclose(folded(x), model(x), rtol=1e-5, atol=1e-6)


def test_inference_mode_that_is_said_folds() -> None:
    inputs = keras.Input((3,))
    x = L.BatchNormalization()(L.Dense(3)(inputs), training=False)
    _, report = _fold(inputs, L.BatchNormalization()(L.ReLU()(x), training=False))
    assert [fate.outcome for fate in report.batch_norms] == ["folded", "affine"]


def test_derived_norm_is_kept() -> None:
    class Halved(L.BatchNormalization):
        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            return 0.5 * super().call(inputs, training=training, mask=mask)

    inputs = keras.Input((3,))
    folded, report = _fold(inputs, Halved()(L.Dense(3)(inputs)))
    assert report.batch_norms[0].outcome == "kept"
    assert "its class Halved may compute something else" in report.batch_norms[0].reason
    assert len(batch_norms(folded)) == 1


def test_norm_in_a_custom_layer_is_kept() -> None:
    class Block(L.Layer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.norm = L.BatchNormalization(name="inner")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.norm(x)

    inputs = keras.Input((3,))
    _, report = _fold(inputs, Block(name="block")(L.Dense(3)(inputs)))
    assert report.batch_norms[0].name == "block/inner"
    assert report.batch_norms[0].outcome == "kept"
    assert report.batch_norms[0].reason == "it is inside 'block' (Block)"


def test_layer_that_a_custom_layer_uses_too_is_not_folded_into() -> None:
    class Twice(L.Layer):
        def __init__(self, dense: L.Dense, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.dense = dense

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.dense(x)

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "dense": self.dense}

    inputs, dense = keras.Input((3,)), L.Dense(3, name="d")
    outputs = [L.BatchNormalization()(dense(inputs)), Twice(dense)(inputs)]
    model = randomize(keras.Model(inputs, outputs))
    _, report = fold_batch_norm(model, return_report=True)
    assert "backward: 'd' is called elsewhere too" in _reason(report)


def test_norm_in_a_wrapper_becomes_affine() -> None:
    inputs = keras.Input((4, 3))
    folded, report = _fold(inputs, L.TimeDistributed(L.BatchNormalization(name="bn"))(inputs))
    assert "it is called inside another layer" in _reason(report)
    assert isinstance(folded.layers[1].layer, bnzoo.layers.ChannelAffine)


def test_mask_that_is_passed_on() -> None:
    inputs = keras.Input((4,), dtype="int32")
    x = L.Embedding(5, 3, mask_zero=True)(inputs)
    x = L.BatchNormalization()(L.Dense(3)(L.BatchNormalization()(L.ReLU()(x))))
    model = randomize(keras.Model(inputs, L.GlobalAveragePooling1D()(L.BatchNormalization()(x))))
    folded, report = fold_batch_norm(model, return_report=True)
    assert report.count("folded") == 3
    x = np.array([[1, 2, 0, 0], [3, 4, 1, 0]], "int32")
    np.testing.assert_allclose(folded(x), model(x), rtol=1e-5, atol=1e-6)


def test_mask_that_is_given() -> None:
    inputs, mask = keras.Input((4, 3)), keras.Input((4,), dtype="bool")
    x = L.BatchNormalization()(L.Dense(3)(inputs), mask=mask)
    x = L.BatchNormalization()(L.ReLU()(x), mask=mask)
    model = randomize(keras.Model([inputs, mask], L.GlobalAveragePooling1D()(x)))
    folded, report = fold_batch_norm(model, return_report=True)
    assert [fate.outcome for fate in report.batch_norms] == ["folded", "affine"]
    x = [example(model)[0], np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]], "bool")]
    np.testing.assert_allclose(folded(x), model(x), rtol=1e-5, atol=1e-6)


def test_integers_are_kept() -> None:
    inputs = keras.Input((3,), dtype="int32")
    model = randomize(keras.Model(inputs, L.Dense(2)(L.BatchNormalization()(inputs))))
    folded, report = fold_batch_norm(model, return_report=True)
    assert report.batch_norms[0].reason == "its inputs are integers"
    x = np.arange(6, dtype="int32").reshape(2, 3)
    np.testing.assert_array_equal(folded(x), model(x))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # One unit of the last place of the type, for weights and values each.
    [("mixed_float16", 4e-3), ("mixed_bfloat16", 3e-2), ("float16", 4e-3), ("float64", 1e-14)],
)
def test_dtype_policies(dtype: str, tolerance: float) -> None:
    kind = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}.get(dtype, dtype)
    inputs = keras.Input((4, 4, 2), dtype=kind)
    x = L.ReLU(dtype=dtype)(L.BatchNormalization(dtype=dtype)(L.Conv2D(3, 3, dtype=dtype)(inputs)))
    x = L.Activation("tanh", dtype=dtype)(L.BatchNormalization(dtype=dtype, name="bn")(x))
    folded, report = _fold(inputs, x, tolerance)
    assert [fate.outcome for fate in report.batch_norms] == ["folded", "affine"]
    assert folded.get_layer("bn").dtype_policy.name == dtype


def test_change_of_dtype_is_not_folded_away() -> None:
    inputs = keras.Input((3,))
    x = L.BatchNormalization(dtype="float32")(L.Dense(3, dtype="mixed_float16")(inputs))
    model = randomize(keras.Model(inputs, x))
    folded, report = fold_batch_norm(model, return_report=True)
    assert "backward: it makes float32 of float16" in _reason(report)
    assert folded.outputs[0].dtype == "float32"


def test_values_beyond_float16() -> None:
    inputs = keras.Input((3,))
    x = L.Dense(3, dtype="mixed_float16", name="d")(inputs)
    norm = L.BatchNormalization(dtype="mixed_float16", epsilon=1e-12)
    model = randomize(keras.Model(inputs, norm(x)))
    norm.moving_variance.assign([1.0, 1.0, 0.0])
    _, report = fold_batch_norm(model, return_report=True)
    assert report.batch_norms[0].outcome == "kept"
    assert "its values exceed the range of float16" in report.batch_norms[0].reason


def test_quantized_and_lora_layers_are_not_folded_into() -> None:
    inputs = keras.Input((3,))
    for change in (lambda d: d.quantize("int8"), lambda d: d.enable_lora(2)):
        dense = L.Dense(4, name="d")
        model = randomize(keras.Model(inputs, L.BatchNormalization()(dense(inputs))))
        change(dense)
        folded, report = fold_batch_norm(model, return_report=True)
        assert "backward: 'd' is quantized or has LoRA weights" in _reason(report)
        assert relative_error(model, folded) < TOLERANCE


def test_extreme_statistics() -> None:
    inputs = keras.Input((5, 5, 3))
    x = L.BatchNormalization(epsilon=1e-10)(L.Conv2D(4, 3, use_bias=False)(inputs))
    model = randomize(keras.Model(inputs, L.BatchNormalization(name="last")(x)))
    first = model.layers[2]
    first.moving_variance.assign([0.0, 1e-6, 1e4, 1.0])
    first.gamma.assign([1e-3, -30.0, 1e4, 0.0])
    folded, report = fold_batch_norm(model, return_report=True)
    assert report.count("folded") == 2
    assert relative_error(model, folded) < TOLERANCE
