"""Published weights into models: the public functions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from bnzoo.checks import check_choice
from bnzoo.models import FORMS, Form

from . import mxnet, onnx, slim, torch
from .structure import check_form
from .tensors import Family, Problems, assign

FAMILIES: Mapping[str, Family] = {
    "slim": slim.FAMILY,
    "torch": torch.FAMILY,
    "mxnet": mxnet.FAMILY,
    "onnx": onnx.FAMILY,
}
SOURCES = tuple(FAMILIES)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A file of published weights that has been read, and not put into a model yet.

    Attributes:
        path: the file.
        source: one of `SOURCES`.
        form_name: the row of `bnzoo.models.FORMS` that the weights are for.
        tensors: those of the file, by name.
    """

    path: str
    source: str
    form_name: str
    tensors: Mapping[str, np.ndarray]

    @property
    def form(self) -> Form:
        """The network, pixels and labels that go with the weights."""
        return FORMS[self.form_name]

    @property
    def classes(self) -> int | None:
        """The number of classes in the file, background included; None without a classifier."""
        return FAMILIES[self.source].classes(self.tensors)

    def build(self, classifier_activation: Any = "softmax", **arguments: Any) -> keras.Model:
        """See `from_checkpoint`."""
        if self.classes is not None:
            arguments = {"classes": self.classes, **arguments}
        model = self.form.build(classifier_activation=classifier_activation, **arguments)
        self.load_into(model)
        return model

    def load_into(self, model: keras.Model) -> None:
        """Assigns the weights to a model of a form that they fit by their shapes."""
        family = FAMILIES[self.source]
        background = self.form.arguments["classes"] if self.form.background else None
        try:
            assign(family, self.tensors, model, background)
        except Problems as error:
            raise ValueError(
                f"`path` must be {family.format} that fits the model. "
                f"Received: {self.path!r} with {error}"
            ) from None


def read_checkpoint(path: str | os.PathLike[str], source: str) -> Checkpoint:
    """Reads a file of published weights.

    Args:
        path: as of `from_checkpoint`.
        source: as of `from_checkpoint`.

    Raises:
        ValueError: an unknown source, or a file that is none of it, or damaged.
        ImportError: PyTorch or ONNX is needed to read the file, and missing.
    """
    check_choice("source", source, SOURCES)
    family, path = FAMILIES[source], os.fspath(path)
    try:
        tensors = family.read(path)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"`path` must be {family.format}. Received: {path!r}: {reason}") from error
    return Checkpoint(path, source, family.form(tensors), tensors)


def load_weights(model: keras.Model, path: str | os.PathLike[str], source: str) -> None:
    """Loads published weights into a model of their form.

    Afterwards the model computes what the source network computes on the same input, images
    [N, height, width, channels] where that takes [N, channels, height, width]. The order of the
    colours, mean and scale are the source's too: `bnzoo.models.FORMS[form].preprocessing` has
    them. Layers keep `trainable` and their other settings.

    Names and axes are translated; a bias that BN takes away is subtracted from the moving mean if
    the model has no place for it; gamma is 1 where the source has none. All of the file is checked
    before any of it is assigned.

    Args:
        model: a `bnzoo.models.bn_inception` of the form of the weights (slim, torch, mxnet or
            mxnet_21k, onnx), with as many classes as the file, or without the top. In slim's form
            1,000 classes do too: the file's 1,001 without class 0, the background.
        path: the file. For "slim" a checkpoint of TensorFlow, with or without .index, or the tar
            that it is released in.
        source: "slim", "torch" (needs PyTorch), "mxnet" or "onnx" (needs the package onnx).

    Raises:
        ValueError: an unknown source; a file that is none of it, or damaged; a model of another
            form; a tensor that is missing, unknown, of another shape or not finite. The message
            has the tensor, its shape and the expected one. The model is then unchanged.
        ImportError: the package that reads the file is missing.

    Example:

    >>> from bnzoo.models import FORMS
    >>> model = FORMS["slim"].build(width_multiplier=0.1)
    >>> load_weights(model, "inception_v3.ckpt", source="caffe")
    Traceback (most recent call last):
    ...
    ValueError: `source` must be one of 'slim', 'torch', 'mxnet', 'onnx'. Received: source='caffe'
    """
    checkpoint = read_checkpoint(path, source)
    check_form(model, checkpoint.form_name)
    checkpoint.load_into(model)


def from_checkpoint(
    path: str | os.PathLike[str],
    source: str,
    classifier_activation: Any = "softmax",
    **arguments: Any,
) -> keras.Model:
    """Builds the form of `bnzoo.models.bn_inception` that a file is for, with its weights.

    See `load_weights` for what is translated.

    Args:
        path: the file, as of `load_weights`.
        source: "slim", "torch", "mxnet" or "onnx".
        classifier_activation: activation of the top; None gives logits.
        **arguments: of `bn_inception`, instead of the form's: include_top=False or input_shape,
            for example, or classes=1000 for slim's weights without the background. Those that say
            how the network pads, pools and normalises change what the weights compute.

    Returns:
        The model. It has the classes of the file.

    Raises:
        ValueError: as `load_weights`, or for an argument that `bn_inception` refuses.
        ImportError: the package that reads the file is missing.

    Example:

    >>> from_checkpoint("inception_v3.ckpt", source="caffe")
    Traceback (most recent call last):
    ...
    ValueError: `source` must be one of 'slim', 'torch', 'mxnet', 'onnx'. Received: source='caffe'
    """
    return read_checkpoint(path, source).build(classifier_activation, **arguments)
