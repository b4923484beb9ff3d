"""Folds Batch Normalization into the layers next to it, for inference."""

from __future__ import annotations

from typing import Literal, overload

import keras

from bnzoo.layers import ChannelAffine

from .absorbers import ABSORBERS, store
from .graph import Graph, hidden_layers, layers_in, read_graphs, unwrap
from .plan import Plan
from .rebuild import copy_layer, copy_state, rebuild
from .report import FoldReport, Size


@overload
def fold_batch_norm(model: keras.Model, return_report: Literal[False] = False) -> keras.Model: ...
@overload
def fold_batch_norm(
    model: keras.Model, return_report: Literal[True]
) -> tuple[keras.Model, FoldReport]: ...


def fold_batch_norm(
    model: keras.Model, return_report: bool = False
) -> keras.Model | tuple[keras.Model, FoldReport]:
    """A copy of the model for inference in which Batch Normalization is part of other layers.

    At inference Batch Normalization is an affine map of each channel,

        y = scale * x + offset,    scale = gamma / sqrt(moving_variance + epsilon),
                                   offset = beta - scale * moving_mean

    (Ioffe & Szegedy 2015, Algorithm 2, step 11). After a layer with kernel W and bias b it is
    the same layer with `scale * W` and `scale * b + offset`. Before such a layer, where
    padding adds no zeros, it is the layer with `W * scale` and `b + W offset`, scaled along the
    inputs. The arithmetic is in float64.

    Layers that it goes into: Conv1D/2D/3D, Conv1D/2D/3DTranspose, DepthwiseConv1D/2D,
    SeparableConv1D/2D, Dense and EinsumDense, also across Dropout, noise, Identity, reshaping,
    cropping, upsampling and pooling where that is exact, and, backward, across Add and
    Concatenate. Another Batch Normalization next to it is merged with it. Where there is no
    exact way, a `bnzoo.layers.ChannelAffine` of the same name takes its place. It stays as it
    is where it is not an affine map (called with `training=True`, a derived class, integer
    inputs), inside a custom layer, or if its scale exceeds a float16.

    The given model and its weights are not touched. The copy is not compiled, computes the same
    in inference mode up to rounding, and keeps the names of inputs, outputs and remaining
    layers; where a folded layer gave an output its name, a `keras.layers.Identity` has it now.

    Args:
        model: A functional or Sequential Keras model, with models nested to any depth.
        return_report: Whether to return also what was done.

    Returns:
        The new model, or the given model itself if it has no Batch Normalization. With
        `return_report` a pair of the model and a `FoldReport`.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: For a subclassed or unbuilt model, or one with layers that have no
            `get_config`.

    Example:
        >>> import bnzoo, keras
        >>> model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, name="c"),
        ...     keras.layers.BatchNormalization(name="bn"), keras.layers.ReLU()])
        >>> folded, report = bnzoo.surgery.fold_batch_norm(model, return_report=True)
        >>> print(report)
        1 BatchNormalization: 1 folded, 0 affine, 0 kept; parameters 128 -> 112, operations 3 -> 2
        bn: folded into c
    """
    graphs = read_graphs(model)
    plan = Plan(graphs)
    folded = _apply(plan, graphs) if plan.fates else model
    if not return_report:
        return folded
    after = read_graphs(folded)
    return folded, FoldReport(tuple(plan.fates.values()), _size(graphs), _size(after))


def _apply(plan: Plan, graphs: list[Graph]) -> keras.Model:
    names_output = {
        id(call.operation)
        for graph in graphs
        for call in graph.calls
        if graph.is_output(call.output)
    }

    def replace(layer: keras.Layer) -> keras.Layer | None:
        if id(layer) in plan.folded:
            if id(layer) in names_output:
                # By name: Keras cannot write a policy that is an object into a file here.
                return keras.layers.Identity(name=layer.name, dtype=layer.dtype_policy.name)
            return None
        if id(layer) in plan.affines:
            return ChannelAffine(axis=layer.axis, name=layer.name, dtype=layer.dtype_policy)
        if id(layer) in plan.weights:
            absorber, rank = ABSORBERS[type(layer)], plan.input_rank(layer)
            return copy_layer(layer, **absorber.config(layer, plan.weights[id(layer)], rank))
        return copy_layer(layer)

    model, pairs = rebuild(graphs, replace)
    for old, new in pairs:
        if id(old) in plan.affines:
            affine = plan.affines[id(old)]
            new.scale.assign(affine.scale.reshape(new.scale.shape))
            new.offset.assign(affine.offset.reshape(new.offset.shape))
        elif id(old) in plan.weights:
            store(new, plan.weights[id(old)])
        elif id(old) not in plan.folded:
            copy_state(old, new)
    return model


def _size(graphs: list[Graph]) -> Size:
    by_model = {id(graph.model): graph for graph in graphs}

    def operations(graph: Graph) -> int:
        inner = [by_model.get(id(unwrap(call.operation))) for call in graph.calls]
        return sum(1 if nested is None else operations(nested) for nested in inner)

    layers = [layer for layer, _ in layers_in(graphs)]
    layers += [hidden for layer in layers for hidden in hidden_layers(layer)]
    return Size(
        batch_norms=sum(isinstance(layer, keras.layers.BatchNormalization) for layer in layers),
        parameters=graphs[0].model.count_params(),
        operations=operations(graphs[0]),
    )
