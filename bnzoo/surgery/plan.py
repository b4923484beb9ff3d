"""Decides for each Batch Normalization of a model which layers can take it in."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bnzoo.layers import BatchNormalization

from .absorbers import ABSORBERS
from .affine import Affine, NotFoldable, Weights, batch_norm_affine, channel_axis
from .graph import Call, Graph, hidden_layers, is_walkable, layers_in, unwrap
from .report import BatchNormFate
from .search import Direction, Placement, Search

# By exact class: one derived from these may compute something else.
FOLDABLE = (keras.layers.BatchNormalization, BatchNormalization)


class Plan:
    """What is to become of the layers of a model.

    Attributes:
        weights: By the id of a layer that takes something in: its new weights, in float64.
        affines: By the id of a BatchNormalization that becomes a ChannelAffine: its map.
        folded: The ids of the BatchNormalization layers that go.
        fates: What to report, by the id of the layer, in the order of the model.
    """

    def __init__(self, graphs: list[Graph]) -> None:
        self.weights: dict[int, Weights] = {}
        self.affines: dict[int, Affine] = {}
        self.folded: set[int] = set()
        self.fates: dict[int, BatchNormFate] = {}
        self._calls: dict[int, list[Call]] = defaultdict(list)
        self._unseen: set[int] = set()
        for graph in graphs:
            for call in graph.calls:
                layer = unwrap(call.operation)
                self._calls[id(layer)].append(call)
                # Of a wrapped or hidden layer, the tensors that it gets are not in a graph.
                if not is_walkable(layer):
                    self._unseen |= {id(hidden) for hidden in hidden_layers(layer)}
                if layer is not call.operation:
                    self._unseen.add(id(layer))
        self._search = Search(self.folded, self.affines)
        self._decide(list(layers_in(graphs)))

    def input_rank(self, layer: keras.Layer) -> int:
        """The rank of what the layer is called on, with the batch."""
        return len(self._calls[id(layer)][0].input.shape)

    def _decide(self, layers: list[tuple[keras.Layer, str]]) -> None:
        waiting: list[tuple[keras.Layer, str]] = []
        for layer, path in layers:
            for hidden in hidden_layers(layer):
                if isinstance(hidden, keras.layers.BatchNormalization):
                    reason = f"it is inside '{layer.name}' ({type(layer).__name__})"
                    self._note(hidden, f"{path}/{hidden.name}", "kept", reason)
            if isinstance(layer, keras.layers.BatchNormalization):
                reason = self._why_not_affine(layer)
                if reason:
                    self._note(layer, path, "kept", reason)
                else:
                    self._note(layer, path, "affine", "")
                    # Not the rank of a call: a wrapper may take an axis away.
                    self.affines[id(layer)] = batch_norm_affine(layer, layer.input_spec.ndim)
                    waiting.append((layer, path))
        # Backward first: it leaves the fewest operations where both ways are open.
        reasons: dict[int, list[str]] = defaultdict(list)
        directions: tuple[Direction, ...] = ("backward", "forward")
        for direction in directions:
            for layer, path in waiting:
                if id(layer) in self.folded:
                    continue
                try:
                    self._fold(layer, path, direction)
                except NotFoldable as error:
                    reasons[id(layer)].append(f"{direction}: {error}")
        for layer, path in waiting:
            if id(layer) in self.affines:
                self._note(layer, path, "affine", "; ".join(reasons[id(layer)]))

    def _note(self, layer: keras.Layer, path: str, outcome: Any, reason: str) -> None:
        self.fates[id(layer)] = BatchNormFate(path, outcome, reason=reason)

    def _why_not_affine(self, layer: keras.Layer) -> str:
        if type(layer) not in FOLDABLE:
            return f"its class {type(layer).__name__} may compute something else"
        calls = self._calls[id(layer)]
        if any(call.trains for call in calls):
            return "it is called with training=True"
        if not all(tf.as_dtype(call.input.dtype).is_floating for call in calls):
            return "its inputs are integers"
        try:
            affine = batch_norm_affine(layer, layer.input_spec.ndim)
            _require_range(layer, affine.scale, affine.offset)
        except NotFoldable as error:
            return str(error)
        return ""

    def _fold(self, layer: keras.Layer, path: str, direction: Direction) -> None:
        """Folds the layer into those that the direction leads to; else raises NotFoldable."""
        if id(layer) in self._unseen:
            raise NotFoldable("it is called inside another layer")
        affine = self.affines[id(layer)]
        by_layer: dict[int, list[Placement]] = defaultdict(list)
        for call in self._calls[id(layer)]:
            if call.input.dtype != call.output.dtype:
                raise NotFoldable(f"it makes {call.output.dtype} of {call.input.dtype}")
            for placement in self._search.placements(call, affine, direction):
                by_layer[id(placement.call.operation)].append(placement)
        # All or none: what is computed here is stored only when every layer has agreed.
        weights: dict[int, Weights] = {}
        affines: dict[int, Affine] = {}
        for key, placements in by_layer.items():
            target = placements[0].call.operation
            self._require_all_calls(target, placements)
            if key in self.affines:
                affines[key] = self._merge(target, placements[0].affine, direction)
            else:
                weights[key] = self._absorb(target, placements[0].affine, direction)
        self.weights.update(weights)
        self.affines.update(affines)
        del self.affines[id(layer)]
        self.folded.add(id(layer))
        into = tuple(placements[0].call.operation.name for placements in by_layer.values())
        self.fates[id(layer)] = BatchNormFate(path, "folded", into)

    def _require_all_calls(self, target: keras.Layer, placements: list[Placement]) -> None:
        called = {id(call) for call in self._calls[id(target)]}
        if id(target) in self._unseen or called != {id(p.call) for p in placements}:
            raise NotFoldable(f"'{target.name}' is called elsewhere too")
        first = placements[0].affine
        for other in placements[1:]:
            same = first.scale.shape == other.affine.scale.shape and np.array_equal(
                [first.scale, first.offset], [other.affine.scale, other.affine.offset]
            )
            if not same:
                raise NotFoldable(f"the calls of '{target.name}' would need different weights")

    def _absorb(self, target: keras.Layer, affine: Affine, direction: Direction) -> Weights:
        if target.quantization_mode is not None or getattr(target, "lora_enabled", False):
            raise NotFoldable(f"'{target.name}' is quantized or has LoRA weights")
        absorber, rank = ABSORBERS[type(target)], self.input_rank(target)
        old = self.weights.get(id(target)) or absorber.load(target, rank)
        if direction == "backward":
            if target.activation is not keras.activations.linear:
                raise NotFoldable(f"'{target.name}' has a nonlinear activation")
            new = absorber.absorb_output(target, old, affine, rank)
        else:
            new = absorber.absorb_input(target, old, affine, rank)
        _require_range(target, *new.values())
        for call in self._calls[id(target)]:
            _require_bias_lands(target, new["bias"], call.output.shape[1:])
        return new

    def _merge(self, target: keras.Layer, affine: Affine, direction: Direction) -> Affine:
        old = self.affines[id(target)]
        new = affine.after(old) if direction == "backward" else old.after(affine)
        if new.scale.shape != old.scale.shape:
            raise NotFoldable(f"'{target.name}' has fewer axes")
        _require_range(target, new.scale, new.offset)
        return new


def _require_range(layer: keras.Layer, *arrays: np.ndarray) -> None:
    """Raises NotFoldable for values beyond what the layer computes in (float16 ends at 65504)."""
    limit = tf.as_dtype(layer.compute_dtype).max
    if not all(np.abs(array).max() <= limit for array in arrays):
        raise NotFoldable(f"its values exceed the range of {layer.compute_dtype}")


def _require_bias_lands(
    layer: keras.Layer, bias: np.ndarray, shape: tuple[int | None, ...]
) -> None:
    """Raises NotFoldable if Keras would add the bias along another axis than the layer's own.

    `keras.ops.add` takes any array with one axis of more than one value for a bias of the last
    axis of the outputs if that has this size, else of the first. `shape` is without the batch.
    """
    sizes = [1] * len(shape)
    if bias.ndim == 1:
        sizes[channel_axis(layer)] = bias.size
    else:
        sizes = list(bias.shape)
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    if len(axes) != 1 or axes[0] == len(shape) - 1:
        return
    size = sizes[axes[0]]
    if shape[-1] in (size, None) or (axes[0] > 0 and shape[0] in (size, None)):
        raise NotFoldable(f"Keras could add a bias of '{layer.name}' along the wrong axis")
