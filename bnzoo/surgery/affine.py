"""An affine map of the values of one example, which is what Batch Normalization is at inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

Weights = dict[str, np.ndarray]


class NotFoldable(Exception):
    """Why an affine map cannot become part of a layer; the message is for the report."""


@dataclass(frozen=True)
class Affine:
    """x -> scale * x + offset, elementwise, in float64.

    `scale` and `offset` have the rank of x without the batch axis; where they have size 1
    along an axis, they are constant there.
    """

    scale: np.ndarray
    offset: np.ndarray

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Affine:
        """The affine map whose arrays are the function's results."""
        return Affine(function(self.scale), function(self.offset))

    def after(self, first: Affine) -> Affine:
        """The affine map that applies `first`, then this one."""
        return Affine(self.scale * first.scale, self.scale * first.offset + self.offset)

    def along(self, axis: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """`scale` and `offset` as vectors of `size` along the axis, counted without the batch.

        Raises:
            NotFoldable: If they vary along another axis.
        """
        self.require_constant_but(axis)
        vectors = self.map(lambda array: np.broadcast_to(array.reshape(-1), (size,)))
        return vectors.scale, vectors.offset

    def require_constant_but(self, *axes: int) -> None:
        """Raises NotFoldable if the map varies along an axis that is not one of `axes`."""
        rank = self.scale.ndim
        free = {axis % rank for axis in axes}
        varying = [a for a in range(rank) if a not in free and self.scale.shape[a] > 1]
        if varying:
            raise NotFoldable(f"it differs along axis {varying[0] + 1}, not by channel alone")

    def cut(self, axis: int, start: int, stop: int) -> Affine:
        """The map of the part of x from `start` to `stop` along the axis."""
        if self.scale.shape[axis] == 1:
            return self
        return self.map(lambda array: np.take(array, range(start, stop), axis))

    def reshape(self, before: Sequence[int | None], after: Sequence[int | None]) -> Affine:
        """The map of the same values when x of shape `before` is laid out in shape `after`."""
        known_before = [size for size in before if size is not None]
        known_after = [size for size in after if size is not None]
        if len(known_before) < len(before) or len(known_after) < len(after):
            raise NotFoldable("sizes that a reshape needs are unknown")
        full = self.map(lambda array: np.broadcast_to(array, known_before).reshape(known_after))
        return full._reduced()

    def _reduced(self) -> Affine:
        """The same map with size 1 along each axis along which it is constant."""
        reduced = self
        for axis in range(self.scale.ndim):
            first = reduced.cut(axis, 0, 1)
            if (reduced.scale == first.scale).all() and (reduced.offset == first.offset).all():
                reduced = first
        return reduced


def batch_norm_affine(layer: keras.layers.BatchNormalization, rank: int) -> Affine:
    """What a built BatchNormalization computes at inference, for inputs of the rank.

    scale = gamma / sqrt(moving_variance + epsilon), offset = beta - scale * moving_mean
    (Ioffe & Szegedy 2015, Algorithm 2, step 11).
    """
    mean, variance = float64(layer.moving_mean), float64(layer.moving_variance)
    gamma = 1.0 if layer.gamma is None else float64(layer.gamma)
    beta = 0.0 if layer.beta is None else float64(layer.beta)
    scale = gamma / np.sqrt(variance + layer.epsilon)
    return spread(scale, beta - scale * mean, layer.axis, rank)


def spread(scale: np.ndarray, offset: np.ndarray, axis: int | Sequence[int], rank: int) -> Affine:
    """The affine map whose arrays lie along `axis`, an axis or several of an input of the rank."""
    axes = sorted(item % rank for item in ((axis,) if isinstance(axis, int) else axis))
    shape = [1] * (rank - 1)
    for item, size in zip(axes, scale.shape, strict=True):
        shape[item - 1] = size
    return Affine(scale.reshape(shape), offset.reshape(shape))


def channel_axis(layer: Any) -> int:
    """The channel axis of what a layer takes and gives, counted without the batch."""
    return 0 if getattr(layer, "data_format", "channels_last") == "channels_first" else -1


def float64(variable: keras.Variable) -> np.ndarray:
    """The value of a variable, in float64."""
    return keras.ops.convert_to_numpy(variable).astype("float64")
