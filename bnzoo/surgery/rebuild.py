"""Builds a Keras model from its graph again, with other layers in it."""

from __future__ import annotations

import inspect
import random
import tempfile
from collections.abc import Callable
from typing import Any

import keras

from .graph import Graph, inner_layer


def rebuild(
    graphs: list[Graph], replace: Callable[[keras.Layer], keras.Layer | None]
) -> tuple[keras.Model, list[tuple[keras.Layer, keras.Layer]]]:
    """A new model that makes the calls of the graphs with other layers.

    Names, shared layers, call arguments, the structure of inputs and outputs and the flags
    `trainable` are those of the old models, and so is the strategy of `tf.distribute`. The new
    one is not compiled. Its layers are new, with freshly initialized weights; Python's random
    numbers are left where they were.

    Args:
        graphs: What `read_graphs` gave.
        replace: Gives the new layer for an old one; or None, and the layer is left out. It
            sees the layers of `layers_in(graphs)`, each once.

    Returns:
        The model, and pairs of each old layer and the new one in its place.
    """
    builder = _Builder(graphs, replace)
    # New layers draw the seeds of their initializers and of dropout from Python's generator,
    # which would change what a seeded program does next.
    state = random.getstate()
    try:
        with graphs[0].model.distribute_strategy.scope():
            model = builder.operation(graphs[0].model)
    finally:
        random.setstate(state)
    pairs = [(old, new) for old, new in builder.made.values() if new is not None]
    # Setting the flag of a model sets those of all its layers. Each was made after all that it
    # holds, so that in reverse the outer ones come first.
    for old, new in reversed(pairs):
        if new.trainable != old.trainable:
            new.trainable = old.trainable
        if new.dtype_policy != old.dtype_policy:
            new.dtype_policy = old.dtype_policy
    containers = {id(graph.model) for graph in graphs}
    return model, [
        (old, new) for old, new in pairs if id(old) not in containers and inner_layer(old) is None
    ]


class _Builder:
    """Builds new models from graphs; holds what was made for each old operation."""

    def __init__(
        self, graphs: list[Graph], replace: Callable[[keras.Layer], keras.Layer | None]
    ) -> None:
        self._graphs = {id(graph.model): graph for graph in graphs}
        self._replace = replace
        self.made: dict[int, tuple[keras.Layer, keras.Layer | None]] = {}
        self._operations: dict[int, keras.Operation] = {}

    def operation(self, old: keras.Operation) -> keras.Operation | None:
        """The new operation for the old one, made at the first request."""
        if not isinstance(old, keras.Layer):
            if id(old) not in self._operations:
                self._operations[id(old)] = _copy_operation(old)
            return self._operations[id(old)]
        if id(old) not in self.made:
            self.made[id(old)] = (old, self._layer(old))
        return self.made[id(old)][1]

    def _layer(self, old: keras.Layer) -> keras.Layer | None:
        if id(old) in self._graphs:
            graph = self._graphs[id(old)]
            sequential = isinstance(old, keras.Sequential)
            return self._sequential(graph) if sequential else self._functional(graph)
        inner = inner_layer(old)
        if inner is None:
            return self._replace(old)
        new = self.operation(inner)
        config = {key: value for key, value in old.get_config().items() if key != "layer"}
        return None if new is None else keras.layers.TimeDistributed(new, **config)

    def _sequential(self, graph: Graph) -> keras.Sequential:
        layers = [self._input_layer(graph.input_layers[0])]
        new_layers = [self.operation(call.operation) for call in graph.calls]
        layers += [layer for layer in new_layers if layer is not None]
        return _class_of(graph.model, keras.Sequential, ["layers"])(layers, name=graph.model.name)

    def _functional(self, graph: Graph) -> keras.Model:
        tensors = {
            id(tensor): self._input_layer(layer).output
            for tensor, layer in zip(
                keras.tree.flatten(graph.inputs), graph.input_layers, strict=True
            )
        }

        def fill_in(structure: Any) -> Any:
            return keras.tree.map_structure(
                lambda x: tensors[id(x)] if isinstance(x, keras.KerasTensor) else x, structure
            )

        for call in graph.calls:
            operation = self.operation(call.operation)
            if operation is None:
                result = tensors[id(call.input)]
            else:
                kwargs = fill_in(call.kwargs)
                if type(operation) is not type(call.operation):
                    # Another class need not know `training`, say.
                    known = inspect.signature(operation.call).parameters
                    kwargs = {name: kwargs[name] for name in kwargs if name in known}
                result = operation(*fill_in(call.args), **kwargs)
            old, new = keras.tree.flatten(call.outputs), keras.tree.flatten(result)
            tensors.update(zip(map(id, old), new, strict=True))
        return _class_of(graph.model, keras.Model, ["inputs", "outputs"])(
            fill_in(graph.inputs), fill_in(graph.outputs), name=graph.model.name
        )

    def _input_layer(self, old: keras.layers.InputLayer) -> keras.layers.InputLayer:
        if id(old) not in self._operations:
            self._operations[id(old)] = type(old).from_config(old.get_config())
        return self._operations[id(old)]


def _class_of(model: keras.Model, base: type, arguments: list[str]) -> Any:
    """The class of the model if it is constructed as `base` is, else `base`."""
    parameters = inspect.signature(type(model).__init__).parameters.values()
    if [parameter.name for parameter in parameters][1 : 1 + len(arguments)] == arguments:
        return type(model)
    kinds = {parameter.kind for parameter in parameters}
    passes_on = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    return type(model) if passes_on else base


def copy_layer(layer: keras.Layer, **changes: Any) -> keras.Layer:
    """A layer of the same class and configuration, but for `changes` of the configuration."""
    if type(layer) is keras.layers.Lambda:
        # Its configuration is a function as text, which would lose the names it refers to.
        return keras.layers.Lambda(
            layer.function,
            output_shape=layer._output_shape,  # There is no public name.
            mask=layer.mask,
            arguments=layer.arguments,
            name=layer.name,
            trainable=layer.trainable,
            dtype=layer.dtype_policy,
        )
    try:
        config = layer.get_config()
    except NotImplementedError as error:
        raise ValueError(
            "`model` must consist of layers that can be copied, which takes `get_config`. "
            f"Received: layer '{layer.name}' of class {type(layer).__name__}, which has none"
        ) from error
    return type(layer).from_config({**config, **changes})


def _copy_operation(operation: keras.Operation) -> keras.Operation:
    try:
        config = operation.get_config()
    except NotImplementedError:
        return operation  # It has no weights, so that both models can call it.
    return type(operation).from_config(config)


def copy_state(old: keras.Layer, new: keras.Layer) -> None:
    """Gives the new layer what the old one has learned: its variables and lookup tables."""
    for source, target in zip(old.variables, new.variables, strict=True):
        target.assign(source)
        if target.trainable != source.trainable:
            target.trainable = source.trainable
    if hasattr(old, "save_assets"):  # Vocabularies are in tables, not in variables.
        with tempfile.TemporaryDirectory() as folder:
            old.save_assets(folder)
            new.load_assets(folder)
    if isinstance(new, keras.layers.Normalization):
        new.finalize_state()  # It computes with constants that it derives from its variables.
