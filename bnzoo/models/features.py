"""Intermediate features of a network by the names of the paper."""

from __future__ import annotations

from collections.abc import Sequence

import keras

# The stages of the Inception networks: the outputs of the table's rows, in its order.
INCEPTION_ENDPOINTS = (
    "conv1_7x7_s2",
    "pool1_3x3_s2",
    "conv2_3x3_reduce",
    "conv2_3x3",
    "pool2_3x3_s2",
    "inception_3a",
    "inception_3b",
    "inception_3c",
    "inception_4a",
    "inception_4b",
    "inception_4c",
    "inception_4d",
    "inception_4e",
    "inception_5a",
    "inception_5b",
)
# What may follow a convolution, latest first: its endpoint is what the next layer sees.
_SUFFIXES = ("_relu", "_sigmoid", "_prelu", "")


def feature_extractor(model: keras.Model, endpoints: Sequence[str]) -> keras.Model:
    """A model that returns chosen intermediate features of `model`.

    Args:
        model: a functional model, such as `bn_inception(include_top=False)`.
        endpoints: names of the paper, such as `INCEPTION_ENDPOINTS`, or any layer's. Of a
            convolution, `inception_3a_double_3x3_1`, the endpoint is its output after BN and the
            nonlinearity; of a module, `inception_3a`, the concatenation.

    Returns:
        A functional model from the same input to a dict of one feature map for each endpoint, in
        the given order. It has the layers of `model`, not copies, and none behind the last
        endpoint.

    Raises:
        ValueError: there are no endpoints, a repeated one, or one that is no layer of `model`.

    Example:

    >>> from bnzoo.models import bn_inception
    >>> model = bn_inception(include_top=False, width_multiplier=0.25)
    >>> extractor = feature_extractor(model, ["inception_3b", "inception_4d", "inception_5b"])
    >>> {name: map.shape[-1] for name, map in extractor.output.items()}
    {'inception_3b': 80, 'inception_4d': 144, 'inception_5b': 256}
    """
    names_layers = (
        isinstance(endpoints, (tuple, list))
        and len(endpoints) > 0
        and all(isinstance(endpoint, str) for endpoint in endpoints)
    )
    if not names_layers or len(set(endpoints)) < len(endpoints):
        raise ValueError(
            "`endpoints` must be a list of different layers' names, at least one. "
            f"Received: endpoints={endpoints!r}"
        )
    layers = {layer.name: layer for layer in model.layers}
    outputs = {}
    for endpoint in endpoints:
        names = [endpoint + suffix for suffix in _SUFFIXES if endpoint + suffix in layers]
        if not names:
            stages = [name for name in INCEPTION_ENDPOINTS if name in layers]
            raise ValueError(
                f"`endpoints` must name layers of the model {model.name!r}, such as "
                f"{', '.join(stages) or ', '.join(layers)}. Received: {endpoint!r}"
            )
        outputs[endpoint] = layers[names[0]].output
    return keras.Model(model.input, outputs, name=f"{model.name}_features")
