"""From the tensors of a file to the variables of a model: everything is checked, then assigned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from .names import CLASSIFIER, CONVOLUTIONS

# A file of another network has hundreds of problems; the first few tell.
_PROBLEMS_TOLD = 3

Shape = tuple[int, ...]
Tensors = Mapping[str, np.ndarray]


class Part(NamedTuple):
    """One tensor of a file.

    Attributes:
        role: the variable of a convolution, its BN or the classifier that it goes into, such as
            "kernel" or "moving_mean"; or what a family's `compose` makes variables of.
        tensor: its name in the file.
        axes: a row of `AXES`, how the axes of a kernel lie.
    """

    role: str
    tensor: str
    axes: str = "keras"


class Axes(NamedTuple):
    """An order of a kernel's axes: the way to Keras' order, and the shape that it has before."""

    to_keras: Callable[[np.ndarray], np.ndarray]
    shape: Callable[[Shape], Shape]


# H, W: height and width. I, O: in and out channels. Keras has HWIO for convolutions (HWI and the
# multiplier for depthwise ones) and IO for the classifier.
AXES: Mapping[str, Axes] = {
    "keras": Axes(lambda kernel: kernel, lambda shape: shape),
    "OIHW": Axes(lambda kernel: kernel.transpose(2, 3, 1, 0), lambda s: (s[3], s[2], s[0], s[1])),
    "OI": Axes(lambda kernel: kernel.transpose(), lambda shape: shape[::-1]),
    "11IO": Axes(lambda kernel: kernel[0, 0], lambda shape: (1, 1, *shape)),
}

# What stands for a variable that the model has and the file has not, and changes nothing.
_NEUTRAL = {"gamma": 1.0, "bias": 0.0}
# Of BN with momentum=None; it is no part of what the network computes.
_COUNTER = "batches_seen"


@dataclasses.dataclass(frozen=True)
class Family:
    """How one family of published weights is stored.

    Attributes:
        format: what a file of it is, for messages.
        read: from the path to all tensors of the file by name; ValueError if it is no such file,
            or damaged.
        form: from the tensors to the row of `bnzoo.models.FORMS`.
        parts: from a layer's name (one of `CONVOLUTIONS`, or `CLASSIFIER`) and the tensors to the
            parts that it consists of.
        compose: from values by role, in Keras' axes, to those of variables.
        gamma_optional: whether a model without gamma leaves the file's out.
    """

    format: str
    read: Callable[[str], dict[str, np.ndarray]]
    form: Callable[[Tensors], str]
    parts: Callable[[str, Tensors], Sequence[Part]]
    compose: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda values: values
    gamma_optional: bool = False

    def classes(self, tensors: Tensors) -> int | None:
        """The number of classes in the file; None without a classifier."""
        (bias,) = (part for part in self.parts(CLASSIFIER, tensors) if part.role == "bias")
        return tensors[bias.tensor].size if bias.tensor in tensors else None


class Problems(Exception):
    """Why tensors do not fit a model, one line for each reason."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        told = "; ".join(lines[:_PROBLEMS_TOLD])
        more = len(lines) - _PROBLEMS_TOLD
        super().__init__(told + (f"; and {more} more problems" if more > 0 else ""))


def assign(family: Family, tensors: Tensors, model: keras.Model, background: int | None) -> None:
    """Assigns all tensors of a file to the variables of a model, or none.

    Args:
        family: how the file is stored.
        tensors: those of the file.
        model: a `bn_inception`, with the classifier or without.
        background: the number of classes, the background among them, in a file that has class 0
            for it: a model of one class less is loaded without that. None if there is none.

    Raises:
        Problems: a tensor is missing, unknown, of another shape or not finite, or the model has
            layers or variables that the file has nothing for. The model is then unchanged.
    """
    layers = {layer.name: layer for layer in model.layers}
    problems: list[str] = []
    values: list[tuple[Any, np.ndarray]] = []
    # Of a model without the classifier, the file's is left out.
    known = {part.tensor for part in family.parts(CLASSIFIER, tensors)}
    for name in (*CONVOLUTIONS, *([CLASSIFIER] if CLASSIFIER in layers else [])):
        parts = family.parts(name, tensors)
        known.update(part.tensor for part in parts)
        variables = {
            variable.name: variable
            for layer in (name, f"{name}_bn")
            if layer in layers
            for variable in layers[layer].weights
        }
        kernel = variables.get("kernel", variables.get("pointwise_kernel"))
        if kernel is None:
            problems.append(f"no layer {name!r} with a kernel in the model")
            continue
        channels = kernel.shape[-1]
        skipped = int(name == CLASSIFIER and family.classes(tensors) == background == channels + 1)
        try:
            found = _file_values(parts, tensors, variables, channels, skipped)
            found = _fit(name, family.compose(found), variables, family.gamma_optional)
        except Problems as error:
            problems += error.lines
        else:
            values += [(variables[role], value) for role, value in found.items()]
    problems += [
        f"unknown tensor {tensor!r} of shape {tensors[tensor].shape}"
        for tensor in tensors
        if tensor not in known
    ]
    if problems:
        raise Problems(*problems)
    for variable, value in values:
        variable.assign(value)


def _file_values(
    parts: Sequence[Part],
    tensors: Tensors,
    variables: Mapping[str, Any],
    channels: int,
    skipped: int,
) -> dict[str, np.ndarray]:
    """The values of the parts of one layer, by role and in Keras' axes.

    Args:
        parts: those of the layer: a convolution and its BN, or the classifier.
        tensors: those of the file.
        variables: those of the layer, by name.
        channels: the output channels of the layer.
        skipped: how many classes of the file come ahead of those of the model.
    """
    problems: list[str] = []
    values: dict[str, np.ndarray] = {}
    for part in parts:
        # What the model has no variable for is, in all files, one number for each channel.
        shape = tuple(variables[part.role].shape if part.role in variables else (channels,))
        expected = AXES[part.axes].shape((*shape[:-1], shape[-1] + skipped))
        tensor = tensors.get(part.tensor)
        if tensor is None:
            problems.append(f"no tensor {part.tensor!r} of shape {expected}")
        elif tensor.shape != expected:
            problems.append(f"tensor {part.tensor!r} of shape {tensor.shape}, expected {expected}")
        elif not np.isfinite(tensor).all():
            problems.append(f"tensor {part.tensor!r} of shape {expected} with values not finite")
        else:
            values[part.role] = AXES[part.axes].to_keras(tensor.astype(np.float32))[..., skipped:]
    if problems:
        raise Problems(*problems)
    return values


def _fit(
    layer: str,
    values: Mapping[str, np.ndarray],
    variables: Mapping[str, Any],
    gamma_optional: bool,
) -> dict[str, np.ndarray]:
    """Values for exactly the variables of one layer that compute what `values` compute."""
    fitted = dict(values)
    if "bias" not in variables and "bias" in fitted and "moving_mean" in fitted:
        # BN takes a bias away: BN(Wu + b) is BN(Wu) with the mean of Wu, which is less by b.
        fitted["moving_mean"] = fitted["moving_mean"] - fitted.pop("bias")
    if "gamma" not in variables and gamma_optional:
        fitted.pop("gamma", None)
    for role, neutral in _NEUTRAL.items():
        if role in variables and role not in fitted:
            fitted[role] = np.full(variables[role].shape, neutral, np.float32)
    wanted = variables.keys() - {_COUNTER}
    problems = [f"nothing for the model's {role} of {layer!r}" for role in wanted - fitted.keys()]
    problems += [f"{role} of {layer!r}, not in the model" for role in fitted.keys() - wanted]
    if problems:
        raise Problems(*sorted(problems))
    return fitted
