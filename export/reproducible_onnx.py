"""Makes two ONNX files of one network equal byte by byte.

tf2onnx numbers what it makes by a counter of the process, orders by these names and by sets, which
Python orders anew in each process, and of what is there twice keeps any. Here operations are
ordered by the way that leads to them from the outputs, and numbered. The names of inputs and
outputs stay as they are. Of a loop, as of a SimpleRNN, tf2onnx keeps one of two equal values by
such a set: two processes may write it in two ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def make_reproducible(model: Any) -> None:
    """Rewrites an `onnx.ModelProto`."""
    _sort(model.graph)
    names = _Names(one.name for one in (*model.graph.input, *model.graph.output))
    _rename(model.graph, names, _Names(()))


def _sort(graph: Any) -> None:
    """Each operation after those that it reads, the first output's first."""
    producers = {}
    for number, node in enumerate(graph.node):
        for inner in _graphs_of(node):
            _sort(inner)
        producers.update(dict.fromkeys(node.output, number))
    order: dict[int, None] = {}
    stack = [(name, False) for name in reversed([one.name for one in graph.output])]
    while stack:
        name, read = stack.pop()
        number = producers.get(name, -1)
        if number < 0 or number in order:
            continue
        if read:
            order[number] = None
        else:
            stack.append((name, True))
            stack += [(one, False) for one in reversed(list(_reads(graph.node[number])))]
    nodes = [_copy(graph.node[number]) for number in order]
    del graph.node[:]
    graph.node.extend(nodes)
    weights = {one.name: one for one in graph.initializer}
    used = dict.fromkeys(name for node in nodes for name in _reads(node) if name in weights)
    used |= dict.fromkeys(one.name for one in graph.output if one.name in weights)
    found = [_copy(weights[name]) for name in used]
    del graph.initializer[:]
    graph.initializer.extend(found)


def _reads(node: Any) -> Iterator[str]:
    """The names that an operation reads, those that its bodies take from outside too."""
    yield from node.input
    for graph in _graphs_of(node):
        yield from (one.name for one in graph.output)
        for inner in graph.node:
            yield from _reads(inner)


def _graphs_of(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _copy(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


class _Names:
    """A numbered name for each name, the same one each time."""

    def __init__(self, kept: Iterable[str]) -> None:
        self._given = {"": "", **{name: name for name in kept}}
        self._taken = set(self._given)

    def __call__(self, name: str, kind: str = "constant") -> str:
        if name not in self._given:
            number = len(self._given)
            while f"{kind}_{number}" in self._taken:
                number += 1
            self._given[name] = f"{kind}_{number}"
            self._taken.add(self._given[name])
        return self._given[name]


def _rename(graph: Any, values: _Names, extents: _Names) -> None:
    # Both are made of the name of a function, which has a counter.
    graph.name, graph.doc_string = "graph", ""
    for one in graph.input:
        one.name = values(one.name, "input")
    for node in graph.node:
        # What was not met before, as an input or output of an operation, is a constant.
        node.input[:] = map(values, node.input)
        for inner in _graphs_of(node):
            _rename(inner, values, extents)
        node.output[:] = [values(name, node.op_type) for name in node.output]
        node.name = next(filter(None, node.output), "")
    for one in (*graph.initializer, *graph.output, *graph.value_info):
        one.name = values(one.name)
    told = sorted(graph.value_info, key=lambda one: one.name)
    copies = [_copy(one) for one in told]
    del graph.value_info[:]
    graph.value_info.extend(copies)
    for one in (*graph.input, *graph.output, *graph.value_info):
        for extent in one.type.tensor_type.shape.dim:
            if extent.dim_param:  # Or it has a value instead.
                extent.dim_param = extents(extent.dim_param, "extent")
