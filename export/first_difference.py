"""Where two networks that should compute the same begin to differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bnzoo.surgery import FoldReport
from bnzoo.surgery.graph import Graph, read_graphs


def first_difference(
    trained: keras.Model,
    exported: keras.Model,
    report: FoldReport | None,
    inputs: Mapping[str, tf.Tensor],
    allowed: float,
) -> str | None:
    """The first layer whose output differs by more than `allowed`, with by how much.

    A difference is a fraction of the layer's largest output. A layer that Batch Normalization was
    folded into gives what that gave, or what the layer itself gave, where it was folded forward;
    the nearer of them counts.

    Args:
        trained: the network before anything was folded.
        exported: the same network folded, in the precision that is exported.
        report: what was folded into what.
        inputs: what both take, by name.
        allowed: the largest difference that is none.

    Returns:
        Words for a message; None if there is no such layer, so that it is not the network that
        differs but what was made of it.
    """
    twins: dict[str, list[str]] = defaultdict(list)
    for fate in report.batch_norms if report is not None else ():
        for layer in fate.into:
            twins[layer].append(fate.name)
    ours = _outputs(exported, inputs)
    theirs = _outputs(trained, inputs)
    for path, found in ours.items():
        # The report names what was folded by its path, but not what it was folded into.
        names = (path, *twins[path.rpartition("/")[2]])
        candidates = [theirs[name] for name in names if name in theirs]
        differences = [_difference(found, one) for one in candidates if one.shape == found.shape]
        if differences and not min(differences) <= allowed:
            return f"it starts at layer {path!r}, which differs by {min(differences):.1e}"
    return None


def _outputs(network: keras.Model, inputs: Mapping[str, tf.Tensor]) -> dict[str, np.ndarray]:
    """The output of each layer, in the order of the network; of one that is called twice, the
    first. Layers of nested models are called by their paths: "member_1/conv"."""
    graphs = {id(graph.model): graph for graph in read_graphs(network)}
    outputs: dict[str, np.ndarray] = {}

    def run(graph: Graph, given: list[tf.Tensor], training: bool, prefix: str) -> Any:
        """What the graph computes of the values of its inputs."""
        keys = map(id, keras.tree.flatten(graph.inputs))
        values: dict[int, Any] = dict(zip(keys, given, strict=True))

        def value(x: Any) -> Any:
            return values[id(x)] if isinstance(x, keras.KerasTensor) else x

        for call in graph.calls:
            layer = call.operation
            args, kwargs = keras.tree.map_structure(value, (call.args, call.kwargs))
            if isinstance(layer, keras.Layer) and kwargs.get("training") is None:
                kwargs["training"] = training
            if id(layer) in graphs:
                inner = [values[id(tensor)] for tensor in call.inputs]
                result = run(graphs[id(layer)], inner, kwargs["training"], f"{prefix}{layer.name}/")
            else:
                result = layer(*args, **kwargs)
            results = keras.tree.flatten(result)
            values.update(zip(map(id, keras.tree.flatten(call.outputs)), results, strict=True))
            if isinstance(layer, keras.Layer) and id(layer) not in graphs and len(results) == 1:
                found = tf.cast(results[0], tf.float32).numpy()
                outputs.setdefault(prefix + layer.name, found)
        return keras.tree.map_structure(value, graph.outputs)

    run(graphs[id(network)], list(inputs.values()), False, "")
    return outputs


def _difference(found: np.ndarray, wanted: np.ndarray) -> float:
    scale = max(float(np.abs(wanted).max()), float(np.finfo(np.float32).tiny))
    return float(np.abs(found.astype(np.float64) - wanted).max() / scale)
