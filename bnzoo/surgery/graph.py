"""Reads a Keras model as a graph of calls."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras


@dataclass(eq=False)
class Call:
    """One call of a layer, of a nested model or of a Keras operation such as `x + y`.

    The tensors in `args`, `kwargs` and `outputs` are symbolic and belong to the `Graph`.
    """

    operation: keras.Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    graph: Graph = field(repr=False)

    @property
    def inputs(self) -> list[keras.KerasTensor]:
        """The tensors among the arguments, in order."""
        flat = keras.tree.flatten((self.args, self.kwargs))
        return [leaf for leaf in flat if isinstance(leaf, keras.KerasTensor)]

    @property
    def input(self) -> keras.KerasTensor:
        """The first tensor among the arguments."""
        return self.inputs[0]

    @property
    def output(self) -> keras.KerasTensor:
        """The first tensor of the result."""
        return keras.tree.flatten(self.outputs)[0]

    @property
    def trains(self) -> bool:
        """Whether the call runs in training mode even when the model does inference."""
        try:
            bound = inspect.signature(self.operation.call).bind(*self.args, **self.kwargs)
        except TypeError:  # Keras takes context arguments that `call` does not name.
            return bool(self.kwargs.get("training", self.graph.trains))
        training = bound.arguments.get("training")
        return self.graph.trains if training is None else bool(training)


@dataclass(eq=False)
class Graph:
    """What one functional or Sequential model computes, nested models left as single calls.

    Attributes:
        model: The model.
        inputs: Structure of symbolic tensors, as the model takes it.
        outputs: Structure of symbolic tensors, as the model gives it.
        input_layers: The `keras.layers.InputLayer` of each tensor of `inputs`, flattened.
        calls: All calls, each after those that it depends on.
        trains: Whether an enclosing model calls the model with `training=True`.
    """

    model: keras.Model
    inputs: Any
    outputs: Any
    input_layers: list[keras.layers.InputLayer]
    calls: list[Call] = field(default_factory=list)
    trains: bool = False

    def __post_init__(self) -> None:
        self._producers: dict[int, Call] = {}
        self._consumers: dict[int, list[Call]] = defaultdict(list)
        self._outputs = {id(tensor) for tensor in keras.tree.flatten(self.outputs)}

    def add(self, call: Call) -> None:
        """Appends a call."""
        self.calls.append(call)
        for tensor in keras.tree.flatten(call.outputs):
            self._producers[id(tensor)] = call
        for tensor in call.inputs:
            self._consumers[id(tensor)].append(call)

    def producer(self, tensor: keras.KerasTensor) -> Call | None:
        """The call that computes the tensor; None for an input of the model."""
        return self._producers.get(id(tensor))

    def consumers(self, tensor: keras.KerasTensor) -> list[Call]:
        """The calls that take the tensor, one entry for each time that they take it."""
        return self._consumers[id(tensor)]

    def is_output(self, tensor: keras.KerasTensor) -> bool:
        """Whether the tensor is an output of the model."""
        return id(tensor) in self._outputs


class _Recorded(keras.Operation):
    """Stands for an operation in the copy of a graph, without being called or built itself."""

    def __init__(self, operation: keras.Operation) -> None:
        super().__init__()
        self._operation = operation

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        return self._operation.compute_output_spec(*args, **kwargs)


def is_walkable(operation: keras.Operation) -> bool:
    """Whether it is a functional or Sequential model that computes what its graph says."""
    if not isinstance(operation, keras.Model):
        return False
    if not isinstance(operation, (keras.Sequential, keras.Function)):
        return False
    return type(operation).call.__module__.startswith("keras.")


def inner_layer(operation: keras.Operation) -> keras.Layer | None:
    """The layer that `keras.layers.TimeDistributed` wraps; None for any other operation."""
    return operation.layer if type(operation) is keras.layers.TimeDistributed else None


def unwrap(operation: keras.Operation) -> keras.Operation:
    """The operation itself, or the layer inside, however often it is wrapped."""
    while (inner := inner_layer(operation)) is not None:
        operation = inner
    return operation


def hidden_layers(operation: keras.Operation) -> list[keras.Layer]:
    """The layers inside a layer that cannot be taken apart (a custom one, say)."""
    if not isinstance(operation, keras.Layer):
        return []
    # Keras has no public name for the layers that a layer tracks.
    return operation._flatten_layers(include_self=False)


def read_graphs(model: keras.Model) -> list[Graph]:
    """The graphs of the model and of all models nested in it, outer models first.

    The model is only read. A nested model has one graph, however often it is called.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If it is a subclassed model, or not built.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: {type(model).__name__}")
    if not is_walkable(model):
        raise ValueError(
            "`model` must be a functional or Sequential model: what a subclassed model calls "
            f"cannot be seen. Received: {type(model).__name__} '{model.name}'"
        )
    finished: dict[int, Graph] = {}

    def visit(operation: keras.Operation) -> None:
        if is_walkable(operation) and id(operation) not in finished:
            graph = _read_graph(operation)
            for call in graph.calls:
                visit(unwrap(call.operation))
            finished[id(operation)] = graph

    visit(model)
    # Each was finished after all that it holds: in reverse, outer models come first.
    graphs = list(reversed(finished.values()))
    for graph in graphs:
        for call in graph.calls:
            nested = finished.get(id(unwrap(call.operation)))
            if nested is not None:
                nested.trains = nested.trains or call.trains
    return graphs


def _read_graph(model: keras.Model) -> Graph:
    if not model.built or (isinstance(model, keras.Sequential) and not model.layers):
        raise ValueError(
            "`model` must be built: give it an Input, or call it on a batch first. "
            f"Received: {type(model).__name__} '{model.name}', not built"
        )
    if isinstance(model, keras.Sequential):
        inputs, outputs = model.inputs[0], model.outputs[0]
    else:
        inputs, outputs = model.input, model.output
    # `clone_model` tells a call function of every call, in order. It is given a model over the
    # same tensors, since it would compile its copy of a compiled one, and refuses a Sequential.
    view = keras.Model(inputs, outputs, name=model.name)
    recorded: list[tuple[keras.Operation, tuple[Any, ...], dict[str, Any], Any]] = []

    def record(operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
        result = _Recorded(operation)(*args, **kwargs)
        # Keras notes a mask of None also for calls that were made without a mask.
        unmasked = [name for name in kwargs if name.endswith("mask") and kwargs[name] is None]
        kwargs = {name: kwargs[name] for name in kwargs if name not in unmasked}
        recorded.append((operation, args, kwargs, result))
        return result

    copy = keras.models.clone_model(
        view, clone_function=lambda operation: operation, call_function=record
    )
    input_layers = {
        id(layer.output): layer
        for layer in view.layers
        if isinstance(layer, keras.layers.InputLayer)
    }
    graph = Graph(
        model, copy.input, copy.output, [input_layers[id(tensor)] for tensor in view.inputs]
    )
    for entry in recorded:
        graph.add(Call(*entry, graph))
    return graph


def layers_in(graphs: list[Graph]) -> Iterator[tuple[keras.Layer, str]]:
    """Each layer that is called in the graphs or wrapped there, once, with the path of its name.

    Models whose graphs are among `graphs` and wrappers give way to what they hold. A path
    consists of the names of the enclosing models below the outermost and of the layer.
    """
    paths = {id(graphs[0].model): ""}
    seen: set[int] = set()
    for graph in graphs:
        for call in graph.calls:
            layer = unwrap(call.operation)
            path = paths[id(graph.model)] + layer.name
            if is_walkable(layer):
                paths.setdefault(id(layer), path + "/")
            elif isinstance(layer, keras.Layer) and id(layer) not in seen:
                seen.add(id(layer))
                yield layer, path
