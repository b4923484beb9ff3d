"""Looks for the layers of a graph that an affine map can go into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Literal

import keras
import numpy as np

from .absorbers import ABSORBERS
from .affine import Affine, NotFoldable
from .graph import Call
from .passing import CROSSINGS

# Backward: into what comes before the map. Forward: into what comes after it.
Direction = Literal["backward", "forward"]


@dataclass(frozen=True)
class Placement:
    """A layer that is to take in an affine map, at one of its calls."""

    call: Call
    affine: Affine


class Search:
    """Finds where affine maps can go, in the graphs of one model.

    Args:
        folded: The ids of layers that are gone; what they get passes through.
        affines: By the id of a BatchNormalization that is still there, its affine map: it can
            take in another.
    """

    def __init__(self, folded: Set[int], affines: Mapping[int, Affine]) -> None:
        self._folded = folded
        self._affines = affines

    def placements(self, call: Call, affine: Affine, direction: Direction) -> Iterator[Placement]:
        """Where the map of a call can go so that the call can be left out.

        All the placements together take its place. Raises NotFoldable if there are none.
        """
        if direction == "backward":
            return self._above(call, call.input, affine)
        return self._below(call, call.output, affine)

    def _above(self, start: Call, tensor: keras.KerasTensor, affine: Affine) -> Iterator[Placement]:
        """Where to go so that the tensor becomes affine(tensor)."""
        graph = start.graph
        call = graph.producer(tensor)
        if call is None:
            raise NotFoldable("it follows an input of the model")
        layer = call.operation
        if graph.is_output(tensor):
            raise NotFoldable(f"'{layer.name}' is an output of the model")
        if len(graph.consumers(tensor)) > 1:
            raise NotFoldable(f"the output of '{layer.name}' is used elsewhere too")
        if id(layer) in self._folded:
            yield from self._above(call, call.input, affine)
        elif self._takes_in(layer):
            yield Placement(call, affine)
        elif type(layer) is keras.layers.Add:
            if any(summand.shape != tensor.shape for summand in call.inputs):
                raise NotFoldable(f"'{layer.name}' broadcasts what it adds")
            scale_only = Affine(affine.scale, np.zeros_like(affine.offset))
            for number, summand in enumerate(call.inputs):
                yield from self._above(call, summand, scale_only if number else affine)
        elif type(layer) is keras.layers.Concatenate:
            axis = layer.axis % len(tensor.shape)
            if axis == 0:
                raise NotFoldable(f"'{layer.name}' joins batches")
            start_of_part = 0
            for part in call.inputs:
                if affine.scale.shape[axis - 1] == 1:  # Constant along the axis.
                    yield from self._above(call, part, affine)
                    continue
                end_of_part = start_of_part + part.shape[axis]
                yield from self._above(call, part, affine.cut(axis - 1, start_of_part, end_of_part))
                start_of_part = end_of_part
        else:
            yield from self._above(call, call.input, _cross(call, affine, "backward"))

    def _below(self, start: Call, tensor: keras.KerasTensor, affine: Affine) -> Iterator[Placement]:
        """Where to go so that all goes on as if the tensor was affine(tensor)."""
        graph = start.graph
        if graph.is_output(tensor):
            raise NotFoldable(f"'{start.operation.name}' is an output of the model")
        for call in graph.consumers(tensor):
            if id(call.operation) in self._folded:
                yield from self._below(call, call.output, affine)
            elif self._takes_in(call.operation):
                yield Placement(call, affine)
            else:
                yield from self._below(call, call.output, _cross(call, affine, "forward"))

    def _takes_in(self, layer: keras.Operation) -> bool:
        return type(layer) in ABSORBERS or id(layer) in self._affines


def _cross(call: Call, affine: Affine, direction: Direction) -> Affine:
    """The map on the other side of the call."""
    layer = call.operation
    if type(layer) not in CROSSINGS:
        raise NotFoldable(f"'{layer.name}' ({type(layer).__name__}) is in the way")
    if call.trains:
        raise NotFoldable(f"'{layer.name}' is called with training=True")
    crossing = CROSSINGS[type(layer)]
    before, after = call.input.shape[1:], call.output.shape[1:]
    if direction == "forward":
        return crossing.forward(layer, affine, before, after)
    return crossing.backward(layer, affine, after, before)
