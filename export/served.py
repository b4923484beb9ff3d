"""What a network gives when it is served: its outputs, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from bnzoo.models import feature_extractor
from bnzoo.surgery.graph import is_walkable, read_graphs

from .errors import ExportFailed

PROBABILITIES = "probabilities"
FEATURES = "features"
POOLED = "pooled"
# What the one output of a network may be. Only what is a probability is called one.
KINDS = {
    "probabilities": "class probabilities, which sum to 1",
    "independent": "a probability of each class by itself, as of a sigmoid",
    "logits": "class scores, of which a softmax makes probabilities",
    "any": "something else, served under the name of its layer",
}
# A sum of a thousand float16 softmax values is off by as much.
_SUM_TOLERANCE = 2e-2
_WITHOUT_CHOICE = (
    *(keras.layers.Activation, keras.layers.Softmax, keras.layers.Dropout),
    *(keras.layers.Flatten, keras.layers.Reshape, keras.layers.Identity),
)


def served_network(
    network: keras.Model, kind: str = "probabilities", features: Sequence[str] = ()
) -> keras.Model:
    """The network with a dict of outputs, by the names that clients see.

    Args:
        network: as trained or folded; it is left as it is, and shares its layers.
        kind: one of `KINDS`. A network whose outputs are a dict keeps them and their names,
            whatever this is.
        features: layers or endpoints of the papers whose outputs are served too; "pooled" is
            what the classifier sees. One is called `features`, of several each
            `features_<endpoint>`.

    Raises:
        ExportFailed: there is no such endpoint, or the outputs are not what `kind` says by shape.
    """
    if isinstance(_output(network), dict) and not features:
        return network
    outputs = dict(_named_outputs(network, kind))
    for endpoint in features:
        name = FEATURES if len(features) == 1 else f"{FEATURES}_{endpoint}"
        outputs[name] = _feature(network, endpoint)
    # A single one is given as itself, in whatever list the network had it.
    # A Sequential network, which has one, does not know its `input` before it is called.
    several = not isinstance(network, keras.Sequential) and (
        len(network.inputs) > 1 or isinstance(network.input, dict)
    )
    inputs = network.input if several else network.inputs[0]
    # A name of Keras' own would have a counter in it, and with it the graph.
    return keras.Model(inputs, outputs, name=network.name)


def check_kind(
    network: keras.Model, kind: str, outputs: Mapping[str, np.ndarray], top: str
) -> None:
    """Whether `probabilities` are what `kind` says.

    Args:
        network: what `served_network` gave.
        kind: one of `KINDS`.
        outputs: its outputs for the examples.
        top: what is told of the network's last layer.

    Raises:
        ExportFailed: they are not.
    """
    if PROBABILITIES not in outputs or kind == "any":
        return
    values = np.asarray(outputs[PROBABILITIES], np.float64)
    if not np.isfinite(values).all():
        raise ExportFailed("the network gives NaN or infinity for an example")
    inside = ((values >= -_SUM_TOLERANCE) & (values <= 1 + _SUM_TOLERANCE)).all()
    sums = values.sum(axis=-1)
    worst = float(sums[np.abs(sums - 1).argmax()])
    if kind == "independent" and not inside:
        raise ExportFailed(
            f"the network's outputs are no probabilities: they reach from {values.min():.3g} to "
            f"{values.max():.3g}; {top}. "
            "--outputs=logits puts a softmax behind it, --outputs=any serves it as it is"
        )
    if kind == "probabilities" and not (inside and abs(worst - 1) <= _SUM_TOLERANCE):
        raise ExportFailed(
            f"the network's outputs are no class probabilities: for an example they sum to "
            f"{worst:.3g}; {top}. --outputs=logits puts a softmax behind it, "
            "--outputs=independent is for a probability of each class, --outputs=any for the rest"
        )


def check_labels(labels: Sequence[str] | None, outputs: Mapping[str, np.ndarray]) -> None:
    """Whether there is a name for each class.

    Args:
        labels: the name of each class, if they are known.
        outputs: those of the network that is served, for the examples.

    Raises:
        ExportFailed: there are more names than classes, or fewer.
    """
    if labels is None or PROBABILITIES not in outputs:
        return
    classes = outputs[PROBABILITIES].shape[-1]
    if len(labels) != classes:
        raise ExportFailed(
            f"the network has {classes} classes, but there are {len(labels)} labels: one a line "
            "is needed, in the order of the classes"
        )


def top_of(network: keras.Model) -> str:
    """What the last layer of a network is, in words."""
    last = network.layers[-1]
    activation = getattr(last, "activation", None)
    name = getattr(activation, "__name__", None)
    return f"its last layer is {last.name!r}" + (f" with activation {name}" if name else "")


def refused_logits(network: keras.Model) -> str | None:
    """Why no softmax is to be put behind the network: it ends with one."""
    last = network.layers[-1]
    activation = getattr(last, "activation", None)
    if isinstance(last, keras.layers.Softmax) or activation is keras.activations.softmax:
        return f"--outputs=logits is for a network without softmax; {top_of(network)}"
    return None


def _output(network: keras.Model) -> Any:
    # A Sequential has no structure of outputs: it has one.
    return network.outputs[0] if isinstance(network, keras.Sequential) else network.output


def _named_outputs(network: keras.Model, kind: str) -> Mapping[str, Any]:
    output = _output(network)
    if isinstance(output, dict):
        return output
    tensors = keras.tree.flatten(output)
    if kind == "any" or len(tensors) > 1:
        names = list(network.output_names)
        names = [f"{name}_{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]
        return dict(zip(names, tensors, strict=True))
    if len(tensors[0].shape) != 2:
        raise ExportFailed(
            f"the network's output has shape {tuple(tensors[0].shape)}, and class probabilities "
            "[N, classes] are needed: --outputs=any serves it as it is"
        )
    if kind == "logits":
        refused = refused_logits(network)
        if refused:
            raise ExportFailed(refused)
        return {PROBABILITIES: keras.layers.Softmax(name="softmax_of_logits")(tensors[0])}
    return {PROBABILITIES: tensors[0]}


def _feature(network: keras.Model, endpoint: str) -> Any:
    if endpoint != POOLED:
        try:
            return feature_extractor(network, [endpoint]).output[endpoint]
        except ValueError as error:
            if not any(layer.name == POOLED for layer in network.layers):
                raise ExportFailed(f"--features: {' '.join(str(error).split())}") from error
    layer = _classifier(network)
    if layer is None:
        raise ExportFailed(
            f"--features={POOLED} is what the classifier sees, and {network.name!r} does not end "
            "with one: name a layer"
        )
    return layer.input


def _classifier(network: keras.Model) -> keras.Layer | None:
    """The last layer with weights, if only activations and reshaping follow it."""
    graph = read_graphs(network)[0]
    tensors = keras.tree.flatten(graph.outputs)
    call = graph.producer(tensors[0]) if len(tensors) == 1 else None
    while call is not None and isinstance(call.operation, _WITHOUT_CHOICE):
        call = graph.producer(call.input)
    if call is None or is_walkable(call.operation) or not call.operation.weights:
        return None
    return call.operation
