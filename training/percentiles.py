"""Percentiles of what layers get, over the course of training: Ioffe & Szegedy 2015, Figure 1."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bnzoo.layers import BatchNormalization

from .command_line import BadFlags
from .settings import did_you_mean

PERCENTILES = (15, 50, 85)
# Of more values in a layer, these many are looked at, spread over all of it.
SAMPLE = 65536


@dataclasses.dataclass(frozen=True)
class Chosen:
    """One layer to look at.

    Attributes:
        name: what it is called in the figures.
        layer: its name in the network.
        channel: one of its channels; None for all.
        normalizes: whether it is BN, so that its output is of interest too.
    """

    name: str
    layer: str
    channel: int | None
    normalizes: bool


def choose(model: keras.Model, names: Sequence[str]) -> list[Chosen]:
    """The layers that --bn_percentiles names.

    Args:
        model: the network.
        names: "last" or "all" BN layers in the order of `model.layers`, layers' names, or
            NAME:CHANNEL.

    Raises:
        BadFlags: there is no such layer or channel, or it has not one input.
    """
    layers = {layer.name: layer for layer in model.layers}
    normalizing = [
        name for name, layer in layers.items() if isinstance(layer, keras.layers.BatchNormalization)
    ]
    found = []
    for text in names:
        name, _, channel = text.partition(":")
        if name in ("last", "all") and name not in layers:
            if not normalizing:
                raise _refused(text, f"{model.name} has no BN layers; other layers can be named")
            of_kind = normalizing[-1:] if name == "last" else normalizing
        elif name in layers:
            of_kind = [name]
        else:
            hint = did_you_mean(name, tuple(layers))
            raise _refused(text, f"{model.name} has no layer of that name.{hint}")
        for one in of_kind:
            size = _channels(layers[one])
            if size is None:
                raise _refused(text, f"layer {one} of {model.name} has not one input")
            if channel and int(channel) >= size:
                raise _refused(text, f"layer {one} of {model.name} has {size} channels, from 0 on")
            found.append(
                Chosen(
                    f"{one}:{channel}" if channel else one,
                    one,
                    int(channel) if channel else None,
                    one in normalizing,
                )
            )
    return found


class Percentiles:
    """Measures the same images again and again, as the weights change.

    BN normalizes by the statistics of these images, as in training; dropout is off. It is done with
    a second network, to which the weights are copied each time: the one that is trained is read,
    and nothing else. Its moving statistics are not, so that one process can do it alone.

    Args:
        model: the network; functional.
        chosen: from `choose`.
        images: a batch, [N, height, width, channels].
    """

    def __init__(
        self, model: keras.Model, chosen: Sequence[Chosen], images: np.ndarray | tf.Tensor
    ) -> None:
        self._model = model
        self._images = tf.convert_to_tensor(images)
        self._twin = keras.models.clone_model(model, clone_function=_copy)
        tensors: dict[str, tuple[keras.KerasTensor, int | None]] = {}
        for one in chosen:
            layer = self._twin.get_layer(one.layer)
            tensors[f"{one.name}/input"] = layer.input, one.channel
            if one.normalizes:
                tensors[f"{one.name}/output"] = layer.output, one.channel
        self._names = list(tensors)
        looked_at = keras.Model(self._twin.inputs, [tensor for tensor, _ in tensors.values()])

        @tf.function(autograph=False)
        def values(images: tf.Tensor) -> list[tf.Tensor]:
            outputs = looked_at(images, training=False)
            channels = [channel for _, channel in tensors.values()]
            return [_sample(*pair) for pair in zip(_as_list(outputs), channels, strict=True)]

        self._values = values

    def measure(self) -> dict[str, float]:
        """Each percentile by its name, such as bn_percentiles/fc3_bn/input_15."""
        pairs = zip(self._model.trainable_variables, self._twin.trainable_variables, strict=True)
        for old, new in pairs:
            new.assign(tf.convert_to_tensor(old.value))
        found = {}
        for name, values in zip(self._names, self._values(self._images), strict=True):
            for percent, value in zip(
                PERCENTILES, np.percentile(values.numpy(), PERCENTILES), strict=True
            ):
                found[f"bn_percentiles/{name}_{percent}"] = float(value)
        return found


class _ByTheBatch(BatchNormalization):
    """Normalizes by the batch whenever it is called."""

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        return super().call(inputs, training=True, mask=mask)


def _copy(layer: keras.Layer) -> keras.Layer:
    if not isinstance(layer, keras.layers.BatchNormalization):
        return type(layer).from_config(layer.get_config())
    # Its own statistics need not move.
    changed: Mapping[str, Any] = {"momentum": 1.0, "synchronized": False}
    return _ByTheBatch.from_config({**layer.get_config(), **changed})


def _sample(values: tf.Tensor, channel: int | None) -> tf.Tensor:
    """At most about SAMPLE of the values, in float32."""
    if channel is not None:
        values = values[..., channel]
    count = math.prod(values.shape)
    stride = math.ceil(count / SAMPLE)
    # With no factor in common, it meets all channels and places alike.
    while math.gcd(stride, count) > 1:
        stride += 1
    return tf.cast(tf.reshape(values, [-1])[::stride], tf.float32)


def _as_list(outputs: Any) -> list[tf.Tensor]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _channels(layer: keras.Layer) -> int | None:
    """The size of the last axis of the input of `layer`; None if it has not one input."""
    try:
        tensor = layer.input
    except (AttributeError, ValueError):  # Keras': never called, or several times.
        return None
    return tensor.shape[-1] if isinstance(tensor, keras.KerasTensor) else None


def _refused(text: str, why: str) -> BadFlags:
    return BadFlags(f"--bn_percentiles={text}: {why}")
