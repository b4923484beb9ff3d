"""Replaces Keras' Batch Normalization by bnzoo's in a model, or bnzoo's by Keras'."""

from __future__ import annotations

from typing import Any

import keras

from bnzoo.checks import check_choice
from bnzoo.layers import BatchNormalization

from .graph import hidden_layers, layers_in, read_graphs
from .rebuild import copy_layer, copy_state, rebuild

_CLASSES: dict[str, type[keras.Layer]] = {
    "bnzoo": BatchNormalization,
    "keras": keras.layers.BatchNormalization,
}


def convert_batch_norm(model: keras.Model, to: str = "bnzoo") -> keras.Model:
    """A copy of the model in which every Batch Normalization is of one implementation.

    The copy computes what the model computes in inference mode. Weights, names, `trainable`
    flags, dtype policies, regularizers, constraints, shared layers and the structure of
    inputs and outputs are kept. The given model, its weights and its optimizer are not
    touched; the copy is not compiled.

    A class that someone derived from either implementation may compute something else, so
    that such layers are copied as they are.

    Args:
        model: A functional or Sequential Keras model, with models nested to any depth.
        to: "bnzoo" for `bnzoo.layers.BatchNormalization`, "keras" for
            `keras.layers.BatchNormalization`.

    Returns:
        The new model; or the given model itself, if it has nothing to convert.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: For another `to`; for a subclassed or unbuilt model; for a layer that the
            other implementation cannot be: one with `renorm=True`, or, to Keras, one with
            `momentum=None` or several axes; for a layer to convert that is hidden in a
            custom layer.

    Example:
        >>> import bnzoo, keras
        >>> inputs = keras.Input((4,))
        >>> model = keras.Model(inputs, keras.layers.BatchNormalization(name="bn")(inputs))
        >>> converted = bnzoo.surgery.convert_batch_norm(model)
        >>> type(converted.get_layer("bn")) is bnzoo.layers.BatchNormalization
        True
    """
    check_choice("to", to, tuple(_CLASSES))
    target = _CLASSES[to]
    graphs = read_graphs(model)
    layers = list(layers_in(graphs))
    _refuse_hidden(layers, target)
    if not any(_is_convertible(layer, target) for layer, _ in layers):
        return model

    def replace(layer: keras.Layer) -> keras.Layer:
        return _convert(layer, target) if _is_convertible(layer, target) else copy_layer(layer)

    converted, pairs = rebuild(graphs, replace)
    for old, new in pairs:
        copy_state(old, new)
    return converted


def _is_convertible(layer: keras.Layer, target: type[keras.Layer]) -> bool:
    return type(layer) in _CLASSES.values() and type(layer) is not target


def _refuse_hidden(layers: list[tuple[keras.Layer, str]], target: type[keras.Layer]) -> None:
    for layer, path in layers:
        for hidden in hidden_layers(layer):
            if _is_convertible(hidden, target):
                raise ValueError(
                    "`model` must show its BatchNormalization layers to be converted. Received: "
                    f"'{hidden.name}' inside '{path}' of class {type(layer).__name__}, which "
                    "cannot be taken apart"
                )


def _convert(layer: keras.Layer, target: type[keras.Layer]) -> keras.Layer:
    config: dict[str, Any] = layer.get_config()
    if layer.renorm:
        raise ValueError(
            f"`model` must not use Batch Renormalization. Received: '{layer.name}' with renorm=True"
        )
    if target is keras.layers.BatchNormalization:
        if layer.momentum is None:
            raise ValueError(
                "`to` must be 'bnzoo' for a layer with momentum=None, which "
                f"keras.layers.BatchNormalization does not have. Received: '{layer.name}'"
            )
        if not isinstance(layer.axis, int):
            if len(layer.axis) > 1:
                raise ValueError(
                    "`to` must be 'bnzoo' for a layer with several axes, which "
                    "keras.layers.BatchNormalization does not have. "
                    f"Received: '{layer.name}' with axis={layer.axis}"
                )
            config["axis"] = layer.axis[0]
    return target.from_config(config)
