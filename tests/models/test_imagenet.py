from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.models import FORMS, decode_predictions, preprocess_input

LABELS = [f"n{number:08d} thing {number}, something" for number in range(1000)]


@pytest.mark.parametrize("form", FORMS)
def test_pixels(form):
    x = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3)).astype(np.uint8)
    expected = FORMS[form].preprocessing.normalize(x).numpy()
    before = x.copy()
    np.testing.assert_array_equal(preprocess_input(x, form=form), expected)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(preprocess_input(x[0], form=form), expected[0])
    first = preprocess_input(x.transpose(0, 3, 1, 2), "channels_first", form=form)
    np.testing.assert_array_equal(first, expected.transpose(0, 3, 1, 2))
    one = preprocess_input(x[0].transpose(2, 0, 1), "channels_first", form=form)
    np.testing.assert_array_equal(one, expected[0].transpose(2, 0, 1))


def test_arrays_give_arrays_and_tensors_tensors():
    x = np.full((1, 2, 2, 3), 255.0, np.float32)
    assert isinstance(preprocess_input(x, form="slim"), np.ndarray)
    dataset = tf.data.Dataset.from_tensors(x).map(lambda x: preprocess_input(x, form="slim"))
    np.testing.assert_array_equal(next(iter(dataset)), np.ones_like(x))


def test_labels_from_a_sequence_or_a_file(tmp_path):
    predictions = np.zeros((2, 1000))
    predictions[0, [3, 999, 0]] = 0.5, 0.3, 0.2
    predictions[1, 7] = 1.0
    expected = [
        [
            ("n00000003", "thing 3, something", 0.5),
            ("n00000999", "thing 999, something", 0.3),
            ("n00000000", "thing 0, something", 0.2),
        ],
        [
            ("n00000007", "thing 7, something", 1.0),
            ("n00000000", "thing 0, something", 0.0),
            ("n00000001", "thing 1, something", 0.0),
        ],
    ]
    (tmp_path / "labels.txt").write_text("\n".join(LABELS) + "\n", encoding="utf-8")
    for labels in (LABELS, tmp_path / "labels.txt", str(tmp_path / "labels.txt")):
        got = decode_predictions(predictions, top=3, form="mxnet", labels=labels)
        assert got == expected
    tensor = keras.ops.convert_to_tensor(predictions)
    assert decode_predictions(tensor, top=3, form="mxnet", labels=LABELS) == expected


def test_case_59_background_is_class_0_of_slim():
    predictions = np.zeros((1, 1001))
    predictions[0, [0, 1, 1000]] = 0.2, 0.5, 0.3
    assert decode_predictions(predictions, top=3, form="slim", labels=LABELS) == [
        [
            ("n00000000", "thing 0, something", 0.5),
            ("n00000999", "thing 999, something", 0.3),
            ("background", "background", 0.2),
        ]
    ]


def test_the_index_of_keras_serves_sorted_synsets(monkeypatch):
    index = {str(number): [f"n{number:08d}", f"thing_{number}"] for number in range(1000)}
    monkeypatch.setattr("keras.src.applications.imagenet_utils.CLASS_INDEX", index)
    predictions = np.zeros((1, 1001))
    predictions[0, 1] = 1.0
    assert decode_predictions(predictions, top=1, form="slim") == [[("n00000000", "thing_0", 1.0)]]
    assert decode_predictions(predictions[:, 1:], top=1, form="torch") == [
        [("n00000000", "thing_0", 1.0)]
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"form": "vgg"},
            "`form` must be one of 'slim', 'torch', 'caffe', 'onnx', 'mxnet', 'mxnet_21k'. "
            "Received: form='vgg'",
        ),
        (
            {"form": "slim"},
            "`preds` must have the shape (images, 1001) for the form 'slim'. "
            "Received: shape (1, 1000)",
        ),
        (
            {"form": "torch", "top": 0},
            "`top` must be a whole number in [1, 1000]. Received: top=0",
        ),
        (
            {"form": "caffe"},
            "`labels` must be given for the form 'caffe': only the file that its weights came "
            "with tells their order. Received: labels=None",
        ),
        (
            {"form": "torch", "labels": LABELS[1:]},
            "`labels` must be 1000 labels for the form 'torch'. Received: 999 of them",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
        decode_predictions(np.zeros((1, 1000)), **arguments)
    assert str(error.value) == message


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_predictions_that_are_not_finite(value):
    predictions = np.eye(1000)[:4]
    predictions[2, 5] = value
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
        decode_predictions(predictions, form="torch", labels=LABELS)
    assert str(error.value) == "`preds` must be finite. Received: NaN or infinity for image 2"


def test_no_predictions():
    assert decode_predictions(np.zeros((0, 1000)), form="torch", labels=LABELS) == []


def test_bad_pixels():
    with pytest.raises(ValueError, match=r"`image` must have shape .* Received: shape \(2, 2, 4\)"):
        preprocess_input(np.zeros((2, 2, 4), np.uint8), form="torch")
    with pytest.raises(ValueError, match=r"`form` must be one of 'slim', .*Received: form='imagen"):
        preprocess_input(np.zeros((2, 2, 3), np.uint8), form="imagenet")
