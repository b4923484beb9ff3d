"""Auxiliary classifiers: heads in the middle of a network that only its training uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import keras

from bnzoo.layers.batch_normalization import BatchNormalization

from .arguments import classifier
from .blocks import InceptionBlocks


class AuxiliaryHeads(NamedTuple):
    """One published form of the heads.

    Attributes:
        modules: the Inception modules whose outputs they classify.
        pooled: whether a 5x5 average pool of stride 3 without padding comes first.
        normalized: whether BN follows its convolution and its hidden layer, in a network with BN.
        dropout: probability that a hidden unit is dropped.
    """

    modules: tuple[str, ...]
    pooled: bool
    normalized: bool
    dropout: float


AUXILIARY_HEADS = {
    # Szegedy et al. 2014, Section 5.
    "googlenet": AuxiliaryHeads(("4a", "4d"), pooled=True, normalized=False, dropout=0.7),
    # lim0606/caffe-googlenet-bn.
    "caffe": AuxiliaryHeads(("3c", "4e"), pooled=True, normalized=True, dropout=0.0),
    # tensorpack's examples.
    "tensorpack": AuxiliaryHeads(("3c", "4e"), pooled=False, normalized=False, dropout=0.0),
}
# Weight of the loss of each head, beside 1 for the classifier at the top; the same in all three.
AUXILIARY_LOSS_WEIGHT = 0.3

_POOL = 5
_CONV_CHANNELS = 128
_HIDDEN_UNITS = 1024


def auxiliary_head(
    blocks: InceptionBlocks,
    x: Any,
    number: int,
    heads: AuxiliaryHeads,
    classes: int,
    activation: Any,
) -> Any:
    """Average pool, 1x1 convolution of 128, hidden layer of 1024, dropout, classifier.

    Args:
        blocks: the builders of the network.
        x: the map to classify.
        number: 1 for the lowest head; its layers are called `auxiliary_1...`, its output layer
            `auxiliary_1`.
        heads: the form.
        classes: number of classes.
        activation: of the output.

    Raises:
        ValueError: the map is smaller than the pool's window, or of unknown size, which the hidden
            layer cannot be built for.
    """
    name = f"auxiliary_{number}"
    sides = x.shape[1:3] if blocks.data_format == "channels_last" else x.shape[2:4]
    smallest = _POOL if heads.pooled else 1
    if any(side is None or side < smallest for side in sides):
        raise ValueError(
            "`auxiliary` heads need an `input_shape` that gives them maps of a known size of at "
            f"least {smallest}x{smallest}. Received: a map of {sides[0]}x{sides[1]}"
        )
    if heads.pooled:
        pool = keras.layers.AveragePooling2D(
            _POOL, 3, data_format=blocks.data_format, name=f"{name}_pool"
        )
        x = pool(x)
    x = blocks.conv(x, f"{name}_conv", _CONV_CHANNELS, 1, normalize=heads.normalized)
    x = keras.layers.Flatten(data_format=blocks.data_format, name=f"{name}_flatten")(x)
    batch_norm = blocks.batch_norm if heads.normalized else None
    x = keras.layers.Dense(
        blocks.width(_HIDDEN_UNITS),
        use_bias=batch_norm is None,
        kernel_initializer=blocks.initializer(),
        name=f"{name}_fc",
    )(x)
    if batch_norm is not None:
        x = BatchNormalization(name=f"{name}_fc_bn", **batch_norm)(x)
    x = blocks.nonlinearity(x, f"{name}_fc")
    if heads.dropout:
        x = keras.layers.Dropout(heads.dropout, name=f"{name}_dropout")(x)
    return classifier(x, classes, activation, name=name)


def auxiliary_loss_weights(model: keras.Model) -> Mapping[str, float]:
    """The weight of each output's loss, for `model.compile(loss_weights=...)`.

    Args:
        model: a network built with `auxiliary`.

    Returns:
        1 for "predictions", 0.3 for each auxiliary head (Szegedy et al. 2014, Section 5).

    Raises:
        ValueError: the model has no auxiliary heads.

    Example:

    >>> from bnzoo.models import bn_inception
    >>> model = bn_inception(
    ...     input_shape=(64, 64, 3), stem="small", width_multiplier=0.1, auxiliary="googlenet"
    ... )
    >>> auxiliary_loss_weights(model)
    {'predictions': 1.0, 'auxiliary_1': 0.3, 'auxiliary_2': 0.3}
    """
    return {
        name: 1.0 if name == "predictions" else AUXILIARY_LOSS_WEIGHT
        for name in _outputs_with_heads(model)
    }


def without_auxiliary(model: keras.Model) -> keras.Model:
    """The network without its auxiliary heads, for evaluation, export and inference.

    Args:
        model: a network built with `auxiliary`.

    Returns:
        A model of the same name, from the same input to class probabilities [N, classes]. It has
        the layers of `model`, not copies: training one trains the other.

    Raises:
        ValueError: the model has no auxiliary heads.

    Example:

    >>> from bnzoo.models import bn_inception
    >>> model = bn_inception(
    ...     input_shape=(64, 64, 3), stem="small", width_multiplier=0.1, auxiliary="googlenet"
    ... )
    >>> [layer.name for layer in without_auxiliary(model).layers if "auxiliary" in layer.name]
    []
    """
    return keras.Model(model.input, _outputs_with_heads(model)["predictions"], name=model.name)


def _outputs_with_heads(model: keras.Model) -> Mapping[str, Any]:
    outputs = model.output
    if not isinstance(outputs, dict) or "predictions" not in outputs:
        raise ValueError(
            "`model` must have been built with `auxiliary` heads, whose outputs are a dict. "
            f"Received: model={model.name!r}, which has none"
        )
    return outputs
