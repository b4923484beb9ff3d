"""Makes two exports of one network equal byte by byte.

TensorFlow numbers functions by a counter of the process, so that a second export has other names
in it, orders the functions as they happened to be made, and gives each SavedModel a random
identifier. None of it is read by a client: signatures, inputs and outputs keep their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorflow.core.protobuf import fingerprint_pb2, saved_model_pb2

# tf.saved_model.experimental reads fingerprints, but what writes them has no public name.
from tensorflow.python.saved_model import fingerprinting_utils

_COUNTER = re.compile(r"(_+\d+)+$")
# An attribute that says which gradient a call has. Nobody asks a server for one, a custom gradient
# is not stored, and of an attribute that names one TensorFlow would warn when it loads the network.
_GRADIENT = "_gradient_op_type"
# What a captured tensor is called that nobody named: a counter.
_ARGUMENT = "_user_specified_name"
# In the name of an argument it is a counter, or may be.
_NUMBERED = re.compile(r"_\d+")


def make_reproducible(folder: Path) -> None:
    """Rewrites `saved_model.pb` and `fingerprint.pb` of the SavedModel in `folder`.

    Functions are named after their first use, walking the graph from its start, the proto is
    written with its maps in order, and the fingerprint's random identifier becomes the checksum of
    the rest of it.
    """
    path = folder / "saved_model.pb"
    saved_model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    for meta_graph in saved_model.meta_graphs:
        _name_functions(meta_graph)
    path.write_bytes(saved_model.SerializeToString(deterministic=True))
    fingerprint = folder / "fingerprint.pb"
    if fingerprint.exists():
        fingerprinting_utils.write_fingerprint(str(folder))
        found = fingerprint_pb2.FingerprintDef.FromString(fingerprint.read_bytes())
        found.uuid = str(found.saved_model_checksum)
        fingerprint.write_bytes(found.SerializeToString(deterministic=True))


def _name_functions(meta_graph: Any) -> None:
    library = meta_graph.graph_def.library
    functions = {function.signature.name: function for function in library.function}
    names: dict[str, str] = {}

    def visit(name: str) -> None:
        # A stack, as functions may be nested deeper than Python's calls.
        stack = [name]
        while stack:
            name = stack.pop()
            if name in names or name not in functions:
                continue
            names[name] = f"{_COUNTER.sub('', name)}_{len(names)}"
            used = [one for node in functions[name].node_def for one in _functions_of(node)]
            stack.extend(reversed(used))

    for node in meta_graph.graph_def.node:
        for used in _functions_of(node):
            visit(used)
    for saved in meta_graph.object_graph_def.nodes:
        for name in _functions_of_object(saved):
            visit(name)
    for name in sorted(functions):
        visit(name)

    bodies = [functions[name] for name in names]
    for nodes in (meta_graph.graph_def.node, *(body.node_def for body in bodies)):
        for node in nodes:
            _rename_in_node(node, names)
    for function in bodies:
        _rename_arguments(function)
        function.signature.name = names[function.signature.name]
    ordered = [type(function).FromString(function.SerializeToString()) for function in bodies]
    del library.function[:]
    library.function.extend(ordered)
    for gradient in library.gradient:
        gradient.function_name = names[gradient.function_name]
        gradient.gradient_func = names[gradient.gradient_func]
    _rename_in_objects(meta_graph.object_graph_def, names)


def _functions_of(node: Any) -> Iterator[str]:
    """The names of the functions that a node's attributes refer to, in the attributes' order."""
    for key in sorted(node.attr):
        value = node.attr[key]
        if value.HasField("func"):
            yield value.func.name
        elif value.HasField("list"):
            yield from (function.name for function in value.list.func)


def _functions_of_object(saved: Any) -> Iterator[str]:
    kind = saved.WhichOneof("kind")
    if kind == "function":
        yield from saved.function.concrete_functions
    elif kind == "bare_concrete_function":
        yield saved.bare_concrete_function.concrete_function_name


def _rename_in_node(node: Any, names: Mapping[str, str]) -> None:
    node.attr.pop(_GRADIENT, None)
    for value in node.attr.values():
        if value.HasField("func"):
            value.func.name = names.get(value.func.name, value.func.name)
        elif value.HasField("list"):
            for function in value.list.func:
                function.name = names.get(function.name, function.name)
    node.op = names.get(node.op, node.op)


def _rename_arguments(function: Any) -> None:
    """Takes counters out of the names of arguments and results, which callers tell by position."""
    for attributes in function.arg_attr.values():
        if attributes.attr[_ARGUMENT].s.isdigit() or not attributes.attr[_ARGUMENT].s:
            del attributes.attr[_ARGUMENT]
    names = {}
    for number, argument in enumerate(function.signature.input_arg):
        if _NUMBERED.search(argument.name):
            names[argument.name] = f"argument_{number}"
            # What waits for an argument, without taking it, has it among its inputs as well.
            names[f"^{argument.name}"] = f"^argument_{number}"
            argument.name = f"argument_{number}"
    for node in function.node_def:
        node.input[:] = [names.get(name, name) for name in node.input]
    outputs = {}
    for number, argument in enumerate(function.signature.output_arg):
        name = f"output_{number}" if _NUMBERED.search(argument.name) else argument.name
        value = function.ret[argument.name]
        outputs[name] = names.get(value, value)
        argument.name = name
    function.ret.clear()
    function.ret.update(outputs)


def _rename_in_objects(objects: Any, names: Mapping[str, str]) -> None:
    for saved in objects.nodes:
        kind = saved.WhichOneof("kind")
        if kind == "function":
            saved.function.concrete_functions[:] = [
                names[name] for name in saved.function.concrete_functions
            ]
        elif kind == "bare_concrete_function":
            bare = saved.bare_concrete_function
            bare.concrete_function_name = names[bare.concrete_function_name]
        elif kind == "captured_tensor":
            captured = saved.captured_tensor
            captured.concrete_function = names[captured.concrete_function]
    concrete = {name: type(value)() for name, value in objects.concrete_functions.items()}
    for name, value in concrete.items():
        value.CopyFrom(objects.concrete_functions[name])
    objects.concrete_functions.clear()
    for name, value in concrete.items():
        objects.concrete_functions[names[name]].CopyFrom(value)
