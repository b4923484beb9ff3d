"""Folds an affine map into `keras.layers.EinsumDense`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from .affine import Affine, NotFoldable, Weights, float64


class Einsum:
    """How an EinsumDense takes an affine map; see `absorbers.Absorber`.

    The bias that it computes with has all axes of the output but the batch, with size 1
    where it is constant.
    """

    def load(self, layer: keras.layers.EinsumDense, input_rank: int) -> Weights:
        rank = len(_Equation(layer, input_rank).outputs) - 1
        bias = np.zeros(()) if layer.bias is None else float64(layer.bias)
        bias = bias.reshape([1] * (rank - bias.ndim) + list(bias.shape))
        return {"kernel": float64(layer.kernel), "bias": bias}

    def absorb_output(
        self, layer: keras.layers.EinsumDense, weights: Weights, affine: Affine, input_rank: int
    ) -> Weights:
        equation = _Equation(layer, input_rank)
        return {
            "kernel": weights["kernel"] * equation.over_kernel(affine.scale, equation.outputs[1:]),
            "bias": weights["bias"] * affine.scale + affine.offset,
        }

    def absorb_input(
        self, layer: keras.layers.EinsumDense, weights: Weights, affine: Affine, input_rank: int
    ) -> Weights:
        equation = _Equation(layer, input_rank)
        if not set(equation.inputs) <= {*equation.kernel, *equation.outputs}:
            raise NotFoldable(f"'{layer.name}' sums over an axis that its kernel does not have")
        labels = equation.inputs[1:]
        shift = weights["kernel"] * equation.over_kernel(affine.offset, labels)
        summed = [i for i, label in enumerate(equation.kernel) if label not in equation.outputs]
        shift = shift.sum(axis=tuple(summed), keepdims=True)
        return {
            "kernel": weights["kernel"] * equation.over_kernel(affine.scale, labels),
            "bias": weights["bias"] + _transfer(shift, equation.kernel, equation.outputs[1:]),
        }

    def config(
        self, layer: keras.layers.EinsumDense, weights: Weights, input_rank: int
    ) -> dict[str, Any]:
        labels = _Equation(layer, input_rank).outputs[1:]
        axes = set(layer.bias_axes or "")
        axes |= {n for n, size in zip(labels, weights["bias"].shape, strict=True) if size > 1}
        axes = axes or {labels[-1]}
        return {"bias_axes": "".join(label for label in labels if label in axes)}


class _Equation:
    """The axes of an EinsumDense, one label each; those that dots stand for have digits."""

    def __init__(self, layer: keras.layers.EinsumDense, input_rank: int) -> None:
        operands, output = layer.equation.replace(" ", "").split("->")
        inputs, kernel = operands.split(",")
        elided = [str(i) for i in range(input_rank - len(inputs.replace("...", "")))]
        self.inputs = _labels(inputs, elided)
        self.kernel = list(kernel)
        self.outputs = _labels(output, elided)

    def over_kernel(self, array: np.ndarray, labels: Sequence[str]) -> np.ndarray:
        """An array over the axes `labels`, laid out to multiply the kernel."""
        for label, size in zip(labels, array.shape, strict=True):
            if size > 1 and label not in self.kernel:
                raise NotFoldable("it differs along an axis that the kernel does not have")
        return _transfer(array, labels, self.kernel)


def _labels(spec: str, elided: list[str]) -> list[str]:
    before, dots, after = spec.partition("...")
    return [*before, *(elided if dots else []), *after]


def _transfer(array: np.ndarray, labels: Sequence[str], onto: Sequence[str]) -> np.ndarray:
    """Moves axes from the order `labels` to the order `onto`; size 1 along axes not in both."""
    array = array.reshape(
        [n for n, label in zip(array.shape, labels, strict=True) if label in onto]
    )
    kept = [label for label in labels if label in onto]
    array = array.transpose([kept.index(label) for label in onto if label in kept])
    sizes = iter(array.shape)
    return array.reshape([next(sizes) if label in kept else 1 for label in onto])
