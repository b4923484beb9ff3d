"""Networks that cannot be served, told before anything is traced."""

from __future__ import annotations

import keyword
import re

import keras

from bnzoo.preprocessing import Preprocessing
from bnzoo.surgery.graph import hidden_layers, layers_in, read_graphs

from .errors import ExportFailed, one_line
from .forms import input_specs
from .served import PROBABILITIES
from .settings import TOP_K, Settings
from .verify import Arrays, Examples, expected_outputs

# What TensorFlow leaves as it is, and takes as the name of an argument.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# Made of the probabilities, and served beside them.
_OF_PROBABILITIES = ("classes", "scores")
_WITH_TABLES = (
    *(keras.layers.StringLookup, keras.layers.IntegerLookup),
    keras.layers.TextVectorization,
)


def check_inputs(network: keras.Model, preprocessing: Preprocessing | None) -> None:
    """Whether a server can give the network what it takes.

    Args:
        network: as trained.
        preprocessing: what is done to an image before the network sees it, if that is known.

    Raises:
        ExportFailed: it cannot.
    """
    for name, spec in input_specs(network).items():
        if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name == "self":
            raise ExportFailed(
                f"the network has an input {name!r}: TensorFlow needs a name of letters, digits "
                "and _ that begins with a letter and is no word of Python's own"
            )
        if not (spec.dtype.is_floating or spec.dtype.is_integer or spec.dtype.is_bool):
            raise ExportFailed(
                f"the network's input {name!r} is of type {spec.dtype.name}: only numbers are "
                "served; what makes them of text is for the client"
            )
        if preprocessing is not None and not spec.dtype.is_floating:
            raise ExportFailed(
                f"the network's input is {spec.dtype.name}, but what preprocessing makes of an "
                "image is float32: leave out --preprocessing, or give the network a float32 input"
            )
    for outer, _ in layers_in(read_graphs(network)):
        for layer in (outer, *hidden_layers(outer)):
            if isinstance(layer, _WITH_TABLES):
                raise ExportFailed(
                    f"layer {layer.name!r}, a {type(layer).__name__}, looks up a table, which is "
                    "not exported: export the network behind it"
                )


def check_outputs(network: keras.Model, settings: Settings) -> None:
    """Whether what is called probabilities is of their shape.

    Args:
        network: what `served.served_network` gave.
        settings: what else is asked for.

    Raises:
        ExportFailed: it is not, its outputs have names that are taken, or what is asked for needs
            probabilities and there are none.
    """
    outputs = network.output
    if PROBABILITIES not in outputs:
        for flag, given in (
            ("labels", settings.labels is not None),
            ("top_k", settings.top_k != TOP_K),
        ):
            if given:
                raise ExportFailed(
                    f"--{flag} is for {PROBABILITIES}, and the network's outputs are "
                    f"{', '.join(outputs)}: leave it out"
                )
        return
    taken = [name for name in _OF_PROBABILITIES if name in outputs]
    if taken:
        raise ExportFailed(
            f"the network has outputs {PROBABILITIES!r} and {taken[0]!r}: the second is made of "
            "the first and would be served in its place; call one of them something else"
        )
    shape = tuple(outputs[PROBABILITIES].shape)
    if len(shape) < 2 or shape[-1] is None or (len(shape) > 2 and settings.outputs != "any"):
        raise ExportFailed(
            f"the network's output {PROBABILITIES!r} has shape {shape}, and class probabilities "
            "[N, classes] are needed: call it something else"
        )


def outputs_of(network: keras.Model, examples: Examples) -> Arrays:
    """The network's outputs for the examples.

    Raises:
        ExportFailed: it does not run on a batch of so many.
    """
    try:
        return expected_outputs(network, examples)[0]
    except Exception as error:
        batches = {tensor.shape[0] for tensor in network.inputs} - {None, len(examples)}
        if not batches:
            raise
        raise ExportFailed(
            f"the network was made for batches of {batches.pop()} and does not run on "
            f"{len(examples)}: a server needs any number; {one_line(error)}"
        ) from error
