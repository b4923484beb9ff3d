"""Weights of one network into another with a new head or other input channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

# The layers that depend on the classes: all of their weights may be missing or of other shapes.
_HEADS = ("predictions", "auxiliary_")


@dataclasses.dataclass(frozen=True)
class TransferReport:
    """What became of each weight; a weight is called `layer/variable`.

    Attributes:
        loaded: weights that were copied.
        adapted: weights of the first convolution that were made to fit other input channels, each
            with the two shapes.
        not_loaded: weights of the target that keep the values they had, each with the reason.
        not_used: weights of the source that the target has no layer for.
    """

    loaded: tuple[str, ...]
    adapted: Mapping[str, str]
    not_loaded: Mapping[str, str]
    not_used: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{len(self.loaded)} weights loaded, {len(self.adapted)} adapted, "
            f"{len(self.not_loaded)} not loaded, {len(self.not_used)} not used"
        ]
        lines += [f"adapted: {name}: {what}" for name, what in self.adapted.items()]
        lines += [f"not loaded: {name}: {why}" for name, why in self.not_loaded.items()]
        lines += [f"not used: {name}" for name in self.not_used]
        return "\n".join(lines)


def transfer_weights(source: keras.Model, target: keras.Model) -> TransferReport:
    """Copies the weights of a trained network into one with other classes or input channels.

    Layers are matched by name. A head of another number of classes keeps its initial weights. The
    kernel of the first convolution is made to fit other input channels: for a single one, the sum
    over the old channels, which answers a grey image as the old kernel answers it as RGB; for n
    others, the old channels over and over, times old / n. In a separable stem that is done to the
    7x7 kernels that its two halves multiply to, which are then split again by a singular value
    decomposition of the rank that the stem has: exact for more channels than before, the closest
    that there is for less.

    Args:
        source: the model to copy from; left as it is.
        target: the model to copy into.

    Returns:
        What was loaded, adapted and not loaded, to be printed or looked at.

    Raises:
        ValueError: the networks differ elsewhere: a layer other than a head is missing or has other
            weights. `target` is then unchanged.

    Example:

    >>> from bnzoo.models import bn_inception
    >>> small = {"input_shape": (32, 32, 3), "stem": "small", "width_multiplier": 0.1}
    >>> source, target = bn_inception(**small), bn_inception(**small, classes=10)
    >>> print(transfer_weights(source, target))
    345 weights loaded, 0 adapted, 2 not loaded, 0 not used
    not loaded: predictions/kernel: shape (102, 1000) in the source, (102, 10) here
    not loaded: predictions/bias: shape (1000,) in the source, (10,) here
    """
    given = {layer.name: _weights(layer) for layer in source.layers if layer.weights}
    wanted = {layer.name: _weights(layer) for layer in target.layers if layer.weights}
    values: dict[str, np.ndarray] = {}
    loaded: list[str] = []
    adapted: dict[str, str] = {}
    not_loaded: dict[str, str] = {}
    for number, (layer, new) in enumerate(wanted.items()):
        old = given.get(layer, {})
        differing = _differences(old, new)
        fitted = _fit_channels(old, new) if number == 0 and differing else None
        if not differing:
            loaded += [f"{layer}/{name}" for name in new]
            values.update({f"{layer}/{name}": weight.numpy() for name, weight in old.items()})
        elif fitted is not None:
            values.update({f"{layer}/{name}": value for name, value in fitted.items()})
            adapted.update({f"{layer}/{name}": why for name, why in differing.items()})
            loaded += [f"{layer}/{name}" for name in new if name not in differing]
        elif layer.startswith(_HEADS):
            not_loaded.update({f"{layer}/{name}": why for name, why in differing.items()})
            # The rest of a new head stays new too.
            same = [name for name in new if name not in differing]
            not_loaded.update({f"{layer}/{name}": "part of a new head" for name in same})
        else:
            problem = "; ".join(f"{name}: {why}" for name, why in differing.items())
            raise ValueError(
                "`source` must be the same network as `target` but for heads and input channels. "
                f"Received: {source.name!r}, in which {layer!r} differs: {problem}"
            )
    for layer, new in wanted.items():
        for name, weight in new.items():
            if f"{layer}/{name}" in values:
                weight.assign(values[f"{layer}/{name}"])
    not_used = [
        f"{layer}/{name}" for layer, old in given.items() if layer not in wanted for name in old
    ]
    return TransferReport(tuple(loaded), adapted, not_loaded, tuple(not_used))


def _weights(layer: keras.Layer) -> dict[str, Any]:
    return {weight.name: weight for weight in layer.weights}


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Why weights of one layer do not go into another, by their names; empty if they do."""
    differing = {}
    for name in [*new, *(name for name in old if name not in new)]:
        there = f"shape {tuple(old[name].shape)}" if name in old else "none"
        here = f"{tuple(new[name].shape)}" if name in new else "none"
        if name not in old or name not in new or old[name].shape != new[name].shape:
            differing[name] = f"{there} in the source, {here} here"
    return differing


def _fit_channels(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
    """All weights of a convolution for the input channels of `new`, or None if more differs."""
    fitted = {name: weight.numpy() for name, weight in old.items()}
    if "kernel" in old and "kernel" in new:
        fitted["kernel"] = adapt_kernel(fitted["kernel"], new["kernel"].shape[2])
    elif "depthwise_kernel" in old and "depthwise_kernel" in new:
        channels, multiplier = new["depthwise_kernel"].shape[2:]
        full = _multiplied(fitted["depthwise_kernel"], fitted["pointwise_kernel"])
        fitted.update(_split(adapt_kernel(full, channels), multiplier))
    same = fitted.keys() == new.keys() and all(
        fitted[name].shape == tuple(weight.shape) for name, weight in new.items()
    )
    return fitted if same else None


def adapt_kernel(kernel: np.ndarray, channels: int) -> np.ndarray:
    """A kernel [k, k, c, d] for `channels` input channels instead of c; see `transfer_weights`."""
    old = kernel.shape[2]
    if channels == 1:
        return kernel.sum(axis=2, keepdims=True)
    return kernel[:, :, np.arange(channels) % old] * (old / channels)


def _multiplied(depthwise: np.ndarray, pointwise: np.ndarray) -> np.ndarray:
    """The full kernel [k, k, c, d] of a separable convolution, depthwise [k, k, c, m]."""
    channels, multiplier = depthwise.shape[2:]
    mixing = pointwise.reshape(channels, multiplier, -1)
    return np.einsum("hwcm,cmd->hwcd", depthwise, mixing)


def _split(kernel: np.ndarray, multiplier: int) -> dict[str, np.ndarray]:
    """The separable kernels closest to a full one: for each channel a truncated SVD."""
    side, _, channels, filters = kernel.shape
    per_channel = kernel.transpose(2, 0, 1, 3).reshape(channels, side * side, filters)
    left, singular, right = np.linalg.svd(per_channel)  # [c, k k, k k], [c, r], [c, d, d]
    rank = min(multiplier, singular.shape[1])
    # Orthonormal filters also beyond the rank, where only their weights are zero: with both halves
    # zero no gradient would reach either.
    depthwise = left[:, :, :multiplier]  # [c, k k, m]
    pointwise = np.zeros((channels, multiplier, filters))
    pointwise[:, :rank] = singular[:, :rank, None] * right[:, :rank]
    return {
        "depthwise_kernel": depthwise.reshape(channels, side, side, -1).transpose(1, 2, 0, 3),
        "pointwise_kernel": pointwise.reshape(1, 1, -1, filters),
    }
