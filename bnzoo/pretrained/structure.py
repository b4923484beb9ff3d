"""Whether a model is built in the form that weights are made for."""

from __future__ import annotations

import functools
from typing import Any

import keras

from bnzoo.models import FORMS
from bnzoo.surgery.graph import read_graphs

# What decides, besides the weights, what a layer computes.
_SETTINGS = ("kernel_size", "strides", "padding", "pool_size", "pads", "epsilon", "activation")


def check_form(model: keras.Model, form: str) -> None:
    """ValueError unless `model` has all layers of a form, with its settings and connections.

    Weights fit by their shapes into networks that pad, pool or normalise otherwise, and that
    would then compute something else.

    Args:
        model: a functional model.
        form: a row of `FORMS`.
    """
    found = _description(model)
    for layer, expected in _expected(form).items():
        if layer not in found:
            difference = f"no layer {layer!r}"
        else:
            difference = "; ".join(
                f"{key}={found[layer].get(key)!r} of {layer!r}, expected {value!r}"
                for key, value in expected.items()
                if found[layer].get(key) != value
            )
        if difference:
            raise ValueError(
                f"`model` must have the form of the weights: bnzoo.models.FORMS[{form!r}].build() "
                f"makes it. Received: {model.name!r} with {difference}"
            )


@functools.cache
def _expected(form: str) -> dict[str, dict[str, Any]]:
    """The description of a form without the classifier."""
    # What is compared does not depend on the widths, and the narrowest network is soon built.
    model = FORMS[form].build(include_top=False, width_multiplier=0.01)
    description = _description(model)
    # Something may come between the image and the first layer.
    del next(iter(description.values()))["inputs"]
    return description


def _description(model: keras.Model) -> dict[str, dict[str, Any]]:
    """Of each layer what it is, its settings, and the layers that its inputs come from."""
    graph = read_graphs(model)[0]
    description: dict[str, dict[str, Any]] = {}
    for call in graph.calls:
        layer = call.operation
        config = layer.get_config()
        producers = [graph.producer(tensor) for tensor in call.inputs]
        description[layer.name] = {
            "class": type(layer).__name__,
            **{setting: config[setting] for setting in _SETTINGS if setting in config},
            "inputs": [producer and producer.operation.name for producer in producers],
        }
    return description
