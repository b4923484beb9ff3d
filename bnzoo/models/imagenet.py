"""`preprocess_input` and `decode_predictions`, as of keras.applications, for each form."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bnzoo.checks import check_choice, is_whole
from bnzoo.class_names import class_names

from .arguments import check_data_format
from .forms import FORMS


def preprocess_input(x: Any, data_format: str | None = None, *, form: str) -> Any:
    """The pixels that a published network expects, from RGB images in 0..255.

    Sizes stay: resize and crop with `FORMS[form].preprocessing`, which is the whole of it.

    Args:
        x: array or tensor of images, uint8 or floating point, RGB in 0..255, of shape [H, W, 3] or
            [N, H, W, 3], channels first for "channels_first". It is left as it is.
        data_format: "channels_last" or "channels_first"; None is Keras' setting.
        form: a row of `FORMS`: "slim", "torch", "caffe", "onnx", "mxnet", "mxnet_21k".

    Returns:
        float32 of the same shape, an array for an array, a tensor for a tensor.

    Raises:
        ValueError: for an unknown form or data format, or images without three channels.

    Example:

    >>> import numpy as np
    >>> red = np.full((1, 1, 3), (255, 0, 0), np.uint8)
    >>> preprocess_input(red, form="slim").tolist()
    [[[1.0, -1.0, -1.0]]]
    >>> preprocess_input(red, form="torch").tolist()
    [[[-104.0, -117.0, 127.0]]]
    """
    check_choice("form", form, tuple(FORMS))
    images = tf.convert_to_tensor(x)
    channels_first = check_data_format(data_format) == "channels_first"
    if channels_first:
        images = tf.experimental.numpy.moveaxis(images, -3, -1)
    images = FORMS[form].preprocessing.normalize(images)
    if channels_first:
        images = tf.experimental.numpy.moveaxis(images, -1, -3)
    return images.numpy() if isinstance(x, np.ndarray) else images


def decode_predictions(
    preds: Any,
    top: int = 5,
    *,
    form: str,
    labels: Sequence[str] | str | os.PathLike[str] | None = None,
) -> list[list[tuple[str, str, float]]]:
    """The labels of the largest class probabilities.

    Args:
        preds: array or tensor [N, classes] of what a network of this form returns.
        top: how many labels of each image, the most probable first.
        form: a row of `FORMS`.
        labels: one label for each class without the background, a sequence or the path of a text
            file with one a line, "n01440764" or "n01440764 tench, Tinca tinca". Without it, for
            forms in the usual order of ILSVRC2012 ("slim", "torch"), the index that
            keras.applications uses, which Keras downloads once.

    Returns:
        For each image a list of (identifier, description, probability), as of keras.applications. A
        background class is ("background", "background", probability).

    Raises:
        ValueError: for an unknown form; predictions of another shape than [N, classes], or not
            finite, which have no order (the message names the image); `top` out of range; labels of
            another number than classes, or none where only the file that the weights came with
            tells their order.

    Example:

    >>> import numpy as np
    >>> labels = [f"n{number:08d} thing {number}" for number in range(1000)]
    >>> predictions = np.eye(1000)[[7]] * 0.5
    >>> decode_predictions(predictions, top=1, form="torch", labels=labels)
    [[('n00000007', 'thing 7', 0.5)]]
    """
    check_choice("form", form, tuple(FORMS))
    predictions = keras.ops.convert_to_numpy(preds)
    background = FORMS[form].background
    classes = FORMS[form].arguments.get("classes", 1000)
    if predictions.ndim != 2 or predictions.shape[1] != classes:
        raise ValueError(
            f"`preds` must have the shape (images, {classes}) for the form {form!r}. "
            f"Received: shape {predictions.shape}"
        )
    if not np.isfinite(predictions).all():
        image = int(np.argmin(np.isfinite(predictions).all(axis=1)))
        raise ValueError(f"`preds` must be finite. Received: NaN or infinity for image {image}")
    if not is_whole(top) or not 1 <= top <= classes:
        raise ValueError(f"`top` must be a whole number in [1, {classes}]. Received: top={top!r}")
    names = _labels(form, labels)
    if len(names) != classes - background:
        raise ValueError(
            f"`labels` must be {classes - background} labels for the form {form!r}. "
            f"Received: {len(names)} of them"
        )
    if background:
        names = [("background", "background"), *names]
    return [
        [(*names[index], float(row[index])) for index in np.argsort(-row, kind="stable")[:top]]
        for row in predictions
    ]


def _labels(form: str, labels: Any) -> list[tuple[str, str]]:
    """(identifier, description) of each class, without a background."""
    if labels is None:
        if not FORMS[form].sorted_synsets:
            raise ValueError(
                f"`labels` must be given for the form {form!r}: only the file that its weights "
                "came with tells their order. Received: labels=None"
            )
        # One image whose probabilities fall gives all labels in their order.
        order = np.arange(1000.0, 0.0, -1.0)[None]
        decoded = keras.applications.imagenet_utils.decode_predictions(order, top=1000)[0]
        return [(identifier, description) for identifier, description, _ in decoded]
    if isinstance(labels, (str, os.PathLike)):
        with open(labels, encoding="utf-8") as file:
            labels = class_names(file.read())
    parts = [label.partition(" ") for label in labels]
    return [(identifier, description or identifier) for identifier, _, description in parts]
