"""The forms in which a network is exported: where its weights are, and what it computes in.

A form is a traced function from images to what the network gives. The signatures of a SavedModel,
a LiteRT file and an ONNX file are all made of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bnzoo.surgery.graph import (
    Graph,
    hidden_layers,
    inner_layer,
    is_walkable,
    layers_in,
    read_graphs,
    unwrap,
)
from bnzoo.surgery.rebuild import copy_layer, copy_state, rebuild

VARIABLES = "variables"
CONSTANTS = "constants"
FORMS = (VARIABLES, CONSTANTS)
PRECISIONS = ("float32", "bfloat16")
# What a server can write as JSON; the other floating types become float32.
_SERVABLE = {
    *(tf.bool, tf.string, tf.float32, tf.float64),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
}


def build_form(
    network: keras.Model, form: str = VARIABLES, precision: str = "float32"
) -> tf.types.experimental.ConcreteFunction:
    """`network` at inference, traced, with a batch of any size.

    Args:
        network: a built network with its weights, Batch Normalization folded or not.
        form: "variables", read at each call and stored beside the graph; or "constants", weights
            that are part of the graph, so that a runtime may rearrange them once and fold what
            can be computed from them.
        precision: "float32" leaves each layer as it is; "bfloat16": see `in_precision`.

    Returns:
        A function that takes each of `input_specs(network)` by its name and returns what the
        network does, floating point as float32. The variables that it reads live as long as
        `network` in float32, and as long as the function in another precision.

    Raises:
        ValueError: `form` or `precision` is unknown, or see `in_precision`.

    Example:

    >>> import bnzoo, tensorflow as tf
    >>> network = bnzoo.models.mnist_mlp()
    >>> form = build_form(bnzoo.surgery.fold_batch_norm(network), "constants")
    >>> form(images=tf.zeros((3, 28, 28, 1))).shape, len(form.graph.variables)
    (TensorShape([3, 10]), 0)
    """
    if form not in FORMS:
        raise ValueError(f"`form` must be one of {', '.join(FORMS)}. Received: form={form!r}")
    network = in_precision(network, precision)
    specs = input_specs(network)
    run = _with_variables(network) if form == VARIABLES else _with_constants(network)

    def call(**inputs: tf.Tensor) -> Any:
        images = [inputs[name] for name in specs]
        structure = keras.tree.pack_sequence_as(network.input, images)
        return keras.tree.map_structure(_servable, run(structure))

    # Keras' layers are written without Python control flow on tensors: nothing to convert.
    function = tf.function(call, autograph=False).get_concrete_function(**specs)
    if form == CONSTANTS:
        function = _without_captured(function, specs)
    function.network = network  # A traced function holds its variables weakly.
    return function


def input_specs(network: keras.Model) -> dict[str, tf.TensorSpec]:
    """The inputs by name, in the order of the network.

    Of a dict these are the keys, below a key those of the path with underscores between; of a list,
    the names of the Input layers. A single input, if in no dict, is `images`.
    """
    paths, inputs = zip(*keras.tree.flatten_with_path(network.input), strict=True)
    if isinstance(network.input, dict):
        names = ["_".join(map(str, path)) for path in paths]
    else:
        names = ["images"] if len(inputs) == 1 else [tensor.name for tensor in inputs]
    return {
        name: tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype, name)
        for name, tensor in zip(names, inputs, strict=True)
    }


def in_precision(network: keras.Model, precision: str) -> keras.Model:
    """The network with its weights, and what it computes, in another type.

    In float32, and in the type that they were, stay the layers that give the outputs, those of
    nested networks too, with the classifier before an activation of its own: a logit of 10 is
    rounded by 0.03 in bfloat16, and a probability with it. So does Batch Normalization that is
    not folded.

    Args:
        network: a functional or Sequential network. It is left as it is.
        precision: "float32", which returns `network` itself, or "bfloat16".

    Raises:
        ValueError: `precision` is unknown, or a layer cannot be copied.
    """
    if precision not in PRECISIONS:
        raise ValueError(
            f"`precision` must be one of {', '.join(PRECISIONS)}. Received: precision={precision!r}"
        )
    if precision == "float32":
        return network
    graphs = read_graphs(network)
    kept = {id(unwrap(layer)) for graph in graphs for layer in _output_layers(graph)}

    def lowered(layer: keras.Layer) -> bool:
        return id(layer) not in kept and not isinstance(layer, keras.layers.BatchNormalization)

    return _with_policy(graphs, precision, lowered)


def in_float32(network: keras.Model) -> keras.Model:
    """The network with each layer that computes in another floating type in float32.

    Args:
        network: a functional or Sequential network. It is left as it is, and returned itself if
            there is no such layer.

    Raises:
        ValueError: a layer cannot be copied.
    """
    graphs = read_graphs(network)

    def other(layer: keras.Layer) -> bool:
        layers = [layer, *hidden_layers(layer)]
        return any(one.compute_dtype in ("float16", "bfloat16", "float64") for one in layers)

    if not any(other(layer) for layer, _ in layers_in(graphs)):
        return network
    return _with_policy(graphs, "float32", other)


def _with_policy(
    graphs: list[Graph], policy: str, changed: Callable[[keras.Layer], bool]
) -> keras.Model:
    """A copy of a network in which the layers that are `changed` have this policy."""
    copy, pairs = rebuild(
        graphs,
        lambda layer: copy_layer(layer, dtype=policy) if changed(layer) else copy_layer(layer),
    )
    for old, new in pairs:
        if changed(old):
            for layer in (new, *hidden_layers(new)):
                layer.dtype_policy = keras.DTypePolicy(policy)
        copy_state(old, new)
    made = {id(new) for old, new in pairs if changed(old)}
    for call in (call for graph in read_graphs(copy) for call in graph.calls):
        # A wrapper casts to its own type what the layer inside gets.
        layer = call.operation
        while (inner := inner_layer(layer)) is not None:
            if id(unwrap(layer)) in made:
                layer.dtype_policy = keras.DTypePolicy(policy)
            layer = inner
    return copy


def _output_layers(graph: Graph) -> list[keras.Layer]:
    """The layers that give the outputs, and those before them up to the first with weights."""
    found = []
    for tensor in keras.tree.flatten(graph.outputs):
        call = graph.producer(tensor)
        while call is not None and not is_walkable(call.operation):
            found.append(call.operation)
            if not isinstance(call.operation, (keras.layers.Activation, keras.layers.Softmax)):
                break
            call = graph.producer(call.input)
    return found


def _with_variables(network: keras.Model) -> Callable[[Any], Any]:
    return lambda inputs: network(inputs, training=False)


def _with_constants(network: keras.Model) -> Callable[[Any], Any]:
    # As arrays: a tensor from outside of a graph would become one of its inputs.
    trainable = [variable.value.numpy() for variable in network.trainable_variables]
    others = [_value(variable) for variable in network.non_trainable_variables]

    def run(inputs: Any) -> Any:
        outputs, _ = network.stateless_call(
            [tf.constant(value) for value in trainable],
            [tf.constant(value) for value in others],
            inputs,
            training=False,
        )
        return outputs

    return run


def _without_captured(
    function: tf.types.experimental.ConcreteFunction, specs: dict[str, tf.TensorSpec]
) -> tf.types.experimental.ConcreteFunction:
    """The function with the tensors that layers hold, as keras.layers.Normalization its
    statistics, in the graph; they would be inputs of it, and are no variables."""
    captured = function.captured_inputs
    if not captured or any(tensor.dtype == tf.resource for tensor in captured):
        return function
    values = [tensor.numpy() for tensor in captured]
    names = [tensor.name for tensor in function.inputs]
    graph = function.graph.as_graph_def()
    for nodes in (graph.node, *(one.node_def for one in graph.library.function)):
        for node in nodes:
            # A custom gradient would belong to the graph that is copied.
            node.attr.pop("_gradient_op_type", None)

    def call(**inputs: tf.Tensor) -> Any:
        given = [*tf.nest.flatten(inputs), *map(tf.constant, values)]
        results = tf.graph_util.import_graph_def(
            graph,
            input_map=dict(zip(names, given, strict=True)),
            return_elements=[tensor.name for tensor in function.outputs],
            name="",
        )
        return tf.nest.pack_sequence_as(function.structured_outputs, results)

    return tf.function(call, autograph=False).get_concrete_function(**specs)


def _value(variable: keras.Variable) -> np.ndarray:
    value = variable.value.numpy()
    # Dropout's seed, which inference does not look at, differs in each process.
    return np.zeros_like(value) if variable.path.endswith("seed_generator_state") else value


def _servable(tensor: tf.Tensor) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    return tensor if tensor.dtype in _SERVABLE else tf.cast(tensor, tf.float32)
