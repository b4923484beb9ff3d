"""The layers that can take an affine map into their weights: one row for each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np

from .affine import Affine, NotFoldable, Weights, channel_axis, float64
from .einsum import Einsum


class Absorber(Protocol):
    """How layers of one kind take an affine map into their weights.

    `weights` are float64 arrays, a bias always among them; `input_rank` is that of the
    inputs, with the batch. All but `load` raise NotFoldable where there is no exact way.
    """

    def load(self, layer: Any, input_rank: int) -> Weights:
        """The weights of a layer; the bias is zeros if the layer has none."""

    def absorb_output(
        self, layer: Any, weights: Weights, affine: Affine, input_rank: int
    ) -> Weights:
        """Weights that give affine(y) where `weights` give y, before any activation."""

    def absorb_input(
        self, layer: Any, weights: Weights, affine: Affine, input_rank: int
    ) -> Weights:
        """Weights that make of x what `weights` make of affine(x)."""

    def config(self, layer: Any, weights: Weights, input_rank: int) -> dict[str, Any]:
        """What the configuration of a layer must say so that it can hold the weights."""


@dataclass(frozen=True)
class ByChannel:
    """Layers with kernels over input and output channels.

    Attributes:
        output_kernel: Name of the kernel that makes the outputs.
        over_outputs: Lays a vector over the output channels out to multiply that kernel.
        input_kernel: Name of the kernel that sees the inputs.
        over_inputs: Lays a vector over the input channels out to multiply that kernel.
        response: The outputs where a kernel like `input_kernel` meets inputs that are all 1.
        shifts_evenly: Whether an offset of the inputs moves all positions of the outputs alike.
    """

    output_kernel: str
    over_outputs: Callable[[np.ndarray, Any], np.ndarray]
    input_kernel: str
    over_inputs: Callable[[np.ndarray, Any], np.ndarray]
    response: Callable[[np.ndarray, Weights], np.ndarray]
    shifts_evenly: Callable[[Any], bool]

    def load(self, layer: Any, input_rank: int) -> Weights:
        names = {self.input_kernel, self.output_kernel}
        weights = {name: float64(getattr(layer, name)) for name in names}
        if layer.bias is None:
            outputs = self.response(weights[self.input_kernel], weights).size
            return {**weights, "bias": np.zeros(outputs)}
        return {**weights, "bias": float64(layer.bias)}

    def absorb_output(
        self, layer: Any, weights: Weights, affine: Affine, input_rank: int
    ) -> Weights:
        scale, offset = affine.along(channel_axis(layer), weights["bias"].size)
        kernel = weights[self.output_kernel] * self.over_outputs(scale, layer)
        bias = weights["bias"] * scale + offset
        return {**weights, self.output_kernel: kernel, "bias": bias}

    def absorb_input(
        self, layer: Any, weights: Weights, affine: Affine, input_rank: int
    ) -> Weights:
        axis = channel_axis(layer)
        # The kernel and every tap of it see all channels of the input.
        channels = layer.input_spec.axes[-1 if axis == -1 else 1]
        scale, offset = affine.along(axis, channels)
        if offset.any() and not self.shifts_evenly(layer):
            raise NotFoldable(f"padding of '{layer.name}' would not get its offset")
        old = weights[self.input_kernel]
        bias = weights["bias"] + self.response(old * self.over_inputs(offset, layer), weights)
        return {**weights, self.input_kernel: old * self.over_inputs(scale, layer), "bias": bias}

    def config(self, layer: Any, weights: Weights, input_rank: int) -> dict[str, Any]:
        return {"use_bias": True}


def _over_groups(vector: np.ndarray, layer: Any) -> np.ndarray:
    """Over a kernel (..., inputs of a group, outputs), whose outputs go group by group."""
    by_group = vector.reshape(layer.groups, -1).T
    return np.repeat(by_group, layer.filters // layer.groups, axis=1)


def _sum_but(*axes: int) -> Callable[[np.ndarray, Weights], np.ndarray]:
    """Sums a kernel over all axes but these, which make the output channels."""

    def response(kernel: np.ndarray, weights: Weights) -> np.ndarray:
        kept = {axis % kernel.ndim for axis in axes}
        return kernel.sum(axis=tuple(set(range(kernel.ndim)) - kept)).reshape(-1)

    return response


def _separable_response(kernel: np.ndarray, weights: Weights) -> np.ndarray:
    pointwise = weights["pointwise_kernel"]
    between = _sum_but(-2, -1)(kernel, weights)
    return between @ pointwise.reshape(pointwise.shape[-2:])


def _pads_nothing(layer: Any) -> bool:
    # The zeros that padding adds are not shifted by what comes before the layer.
    return layer.padding == "valid" or max(layer.kernel_size) == 1


def _is_pointwise(layer: Any) -> bool:
    # At borders and between strides, fewer taps of a transposed kernel meet an input.
    return max(layer.kernel_size) == max(layer.strides) == 1


_CONVOLUTION = ByChannel(
    output_kernel="kernel",
    over_outputs=lambda vector, layer: vector,
    input_kernel="kernel",
    over_inputs=_over_groups,
    response=_sum_but(-1),
    shifts_evenly=_pads_nothing,
)
_TRANSPOSED = ByChannel(
    output_kernel="kernel",
    over_outputs=lambda vector, layer: vector[:, np.newaxis],
    input_kernel="kernel",
    over_inputs=lambda vector, layer: vector,
    response=_sum_but(-2),
    shifts_evenly=_is_pointwise,
)
_DEPTHWISE = ByChannel(
    output_kernel="kernel",
    over_outputs=lambda vector, layer: vector.reshape(-1, layer.depth_multiplier),
    input_kernel="kernel",
    over_inputs=lambda vector, layer: vector[:, np.newaxis],
    response=_sum_but(-2, -1),
    shifts_evenly=_pads_nothing,
)
_SEPARABLE = ByChannel(
    output_kernel="pointwise_kernel",
    over_outputs=lambda vector, layer: vector,
    input_kernel="depthwise_kernel",
    over_inputs=lambda vector, layer: vector[:, np.newaxis],
    response=_separable_response,
    shifts_evenly=_pads_nothing,
)
_DENSE = ByChannel(
    output_kernel="kernel",
    over_outputs=lambda vector, layer: vector,
    input_kernel="kernel",
    over_inputs=lambda vector, layer: vector[:, np.newaxis],
    response=_sum_but(-1),
    shifts_evenly=lambda layer: True,
)

# By exact class: one derived from these may compute something else.
ABSORBERS: dict[type, Absorber] = {
    keras.layers.Conv1D: _CONVOLUTION,
    keras.layers.Conv2D: _CONVOLUTION,
    keras.layers.Conv3D: _CONVOLUTION,
    keras.layers.Conv1DTranspose: _TRANSPOSED,
    keras.layers.Conv2DTranspose: _TRANSPOSED,
    keras.layers.Conv3DTranspose: _TRANSPOSED,
    keras.layers.DepthwiseConv1D: _DEPTHWISE,
    keras.layers.DepthwiseConv2D: _DEPTHWISE,
    keras.layers.SeparableConv1D: _SEPARABLE,
    keras.layers.SeparableConv2D: _SEPARABLE,
    keras.layers.Dense: _DENSE,
    keras.layers.EinsumDense: Einsum(),
}


def store(layer: Any, weights: Weights) -> None:
    """Assigns the weights to the variables of a layer."""
    for name, value in weights.items():
        variable = getattr(layer, name)
        # The bias of an EinsumDense has fewer axes, or sizes, than the one computed with.
        trailing = value.reshape(value.shape[value.ndim - len(variable.shape) :])
        variable.assign(np.broadcast_to(trailing, variable.shape))
