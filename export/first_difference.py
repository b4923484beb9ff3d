"""Where two networks that should compute the same begin to differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from bnzoo.surgery import FoldReport


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
    for name, found in ours.items():
        candidates = [theirs[twin] for twin in (name, *twins[name]) if twin in theirs]
        differences = [_difference(found, one) for one in candidates if one.shape == found.shape]
        if differences and not min(differences) <= allowed:
            return f"it starts at layer {name!r}, which differs by {min(differences):.1e}"
    return None


def _outputs(network: keras.Model, inputs: Mapping[str, tf.Tensor]) -> dict[str, np.ndarray]:
    """The output of each layer, in the order of the network; of one that is called twice, the
    first."""
    tensors = {}
    for layer in network.layers:
        output = keras.tree.flatten(_first_output(layer))
        if len(output) == 1 and not isinstance(layer, keras.layers.InputLayer):
            tensors[layer.name] = output[0]
    every = keras.Model(network.inputs, tensors)
    found = every(list(inputs.values()), training=False)
    return {name: tf.cast(found[name], tf.float32).numpy() for name in tensors}


def _first_output(layer: keras.Layer) -> object:
    try:
        return layer.output
    except (AttributeError, ValueError):  # Called several times, or inside of another model.
        return []


def _difference(found: np.ndarray, wanted: np.ndarray) -> float:
    scale = max(float(np.abs(wanted).max()), float(np.finfo(np.float32).tiny))
    return float(np.abs(found.astype(np.float64) - wanted).max() / scale)
