"""The layers that an affine map can move across: one row for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from .affine import Affine, NotFoldable, channel_axis

Shape = Sequence[int | None]
# (layer, affine map, shape at the side where it is, shape at the other side), without the batch.
Move = Callable[[Any, Affine, Shape, Shape], Affine]


@dataclass(frozen=True)
class Crossing:
    """How an affine map moves across layers of one kind; each raises NotFoldable if it cannot.

    Attributes:
        forward: The map `b` with layer(a(x)) = b(layer(x)), for a map `a`.
        backward: The map `a` with layer(a(x)) = b(layer(x)), for a map `b`.
    """

    forward: Move
    backward: Move


def _stay(layer: Any, affine: Affine, here: Shape, there: Shape) -> Affine:
    return affine


def _stay_by_channel(layer: Any, affine: Affine, here: Shape, there: Shape) -> Affine:
    affine.require_constant_but(channel_axis(layer))
    return affine


def _require_rising(layer: Any, affine: Affine) -> None:
    if (affine.scale < 0).any():
        raise NotFoldable(f"a negative scale would turn the maximum of '{layer.name}' around")


def _stay_by_rising_channel(layer: Any, affine: Affine, here: Shape, there: Shape) -> Affine:
    _require_rising(layer, affine)
    return _stay_by_channel(layer, affine, here, there)


def _change_rank(layer: Any, affine: Affine, here: Shape, there: Shape) -> Affine:
    """Over global pooling, which takes the axes of an image away or gives them size 1."""
    axis = channel_axis(layer)
    if len(here) > 1:
        affine.require_constant_but(axis)
    shape = [1] * len(there)
    shape[axis] = affine.scale.size
    return affine.map(lambda array: array.reshape(shape))


def _change_rank_rising(layer: Any, affine: Affine, here: Shape, there: Shape) -> Affine:
    _require_rising(layer, affine)
    return _change_rank(layer, affine, here, there)


def _reshape(layer: Any, affine: Affine, here: Shape, there: Shape) -> Affine:
    return affine.reshape(here, there)


def _flatten(layer: Any, affine: Affine, here: Shape, there: Shape) -> Affine:
    if layer.data_format == "channels_first":
        raise NotFoldable(f"'{layer.name}' moves the channels to the end")
    return affine.reshape(here, there)


def _permute(layer: Any, affine: Affine, here: Shape, there: Shape) -> Affine:
    return affine.map(lambda array: array.transpose([axis - 1 for axis in layer.dims]))


def _permute_back(layer: Any, affine: Affine, here: Shape, there: Shape) -> Affine:
    return affine.map(lambda array: array.transpose(np.argsort(layer.dims)))


def _linear_only(layer: Any, affine: Affine, here: Shape, there: Shape) -> Affine:
    if layer.activation is not keras.activations.linear:
        raise NotFoldable(f"'{layer.name}' is a nonlinearity")
    return affine


_SAME = Crossing(_stay, _stay)
# Averages of values of one channel, with weights whose sum is 1.
_AVERAGE = Crossing(_stay_by_channel, _stay_by_channel)
_MAXIMUM = Crossing(_stay_by_rising_channel, _stay_by_rising_channel)
_GLOBAL_AVERAGE = Crossing(_change_rank, _change_rank)
_GLOBAL_MAXIMUM = Crossing(_change_rank_rising, _change_rank_rising)

_L = keras.layers
# By exact class: one derived from these may compute something else.
CROSSINGS: dict[type, Crossing] = {
    **dict.fromkeys([_L.Identity, _L.Dropout, _L.AlphaDropout, _L.GaussianDropout], _SAME),
    **dict.fromkeys([_L.SpatialDropout1D, _L.SpatialDropout2D, _L.SpatialDropout3D], _SAME),
    **dict.fromkeys([_L.GaussianNoise, _L.ActivityRegularization], _SAME),
    **dict.fromkeys([_L.AveragePooling1D, _L.AveragePooling2D, _L.AveragePooling3D], _AVERAGE),
    **dict.fromkeys([_L.UpSampling1D, _L.UpSampling2D, _L.UpSampling3D], _AVERAGE),
    **dict.fromkeys([_L.Cropping1D, _L.Cropping2D, _L.Cropping3D], _AVERAGE),
    **dict.fromkeys([_L.MaxPooling1D, _L.MaxPooling2D, _L.MaxPooling3D], _MAXIMUM),
    **dict.fromkeys(
        [_L.GlobalAveragePooling1D, _L.GlobalAveragePooling2D, _L.GlobalAveragePooling3D],
        _GLOBAL_AVERAGE,
    ),
    **dict.fromkeys(
        [_L.GlobalMaxPooling1D, _L.GlobalMaxPooling2D, _L.GlobalMaxPooling3D], _GLOBAL_MAXIMUM
    ),
    _L.Activation: Crossing(_linear_only, _linear_only),
    _L.Flatten: Crossing(_flatten, _flatten),
    _L.Reshape: Crossing(_reshape, _reshape),
    _L.Permute: Crossing(_permute, _permute_back),
}
