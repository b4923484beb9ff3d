"""Multiply-adds and receptive fields of a model, computed from its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import keras

# Layers that multiply, with the attributes that hold their kernels.
_KERNELS = {
    keras.layers.Dense: ("kernel",),
    keras.layers.Conv2D: ("kernel",),
    keras.layers.SeparableConv2D: ("depthwise_kernel", "pointwise_kernel"),
}


def multiply_adds(model: keras.Model) -> Mapping[str, int]:
    """The multiply-adds of one image through each convolution and dense layer.

    A convolution takes (output positions) * k^2 * c * d of them, with c input channels and d
    filters; the two halves of a separable one are counted each. Biases, BN, nonlinearities and
    pools are left out, as is usual.

    Args:
        model: a functional model of known input size.

    Returns:
        The count for each layer that has any, by name, in the order of the model.

    Raises:
        ValueError: the size of a map is unknown.

    Example:

    >>> from bnzoo.models import mnist_mlp
    >>> multiply_adds(mnist_mlp())
    {'fc1': 78400, 'fc2': 10000, 'fc3': 10000, 'predictions': 1000}
    """
    counts = {}
    for layer in model.layers:
        kernels = [getattr(layer, kernel) for kernel in _KERNELS.get(type(layer), ())]
        if not kernels:
            continue
        shape = layer.output.shape
        channels_first = getattr(layer, "data_format", None) == "channels_first"
        positions = shape[2:] if channels_first else shape[1:-1]
        if None in positions:
            raise ValueError(
                "`model` must have an input of known size to count its operations. "
                f"Received: {model.name!r}, whose layer {layer.name!r} has the output {shape}"
            )
        counts[layer.name] = math.prod(positions) * sum(
            math.prod(kernel.shape) for kernel in kernels
        )
    return counts


def receptive_field(model: keras.Model, layer_name: str) -> tuple[int, int]:
    """How much of the input one output of a layer sees, ignoring the border.

    Behind a convolution or pool with a window of k and stride s, the side r of the field and the
    distance j between the fields of neighbours become r + (k - 1) j and s j (both 1 at the input);
    of the branches that a layer joins the largest field counts.

    Args:
        model: a functional model of images whose windows are square.
        layer_name: name of a layer ahead of any global pool.

    Returns:
        (r, j) in pixels of the input.

    Raises:
        ValueError: the model has no such layer.

    Example:

    >>> from bnzoo.models import bn_inception
    >>> receptive_field(bn_inception(include_top=False, width_multiplier=0.1), "pool2_3x3_s2")
    (27, 8)
    """
    if layer_name not in {layer.name for layer in model.layers}:
        raise ValueError(
            f"`layer_name` must be a layer of {model.name!r}. Received: layer_name={layer_name!r}"
        )
    fields: dict[int, tuple[int, int]] = {}
    for layer in model.layers:
        inputs = layer.input if isinstance(layer.input, list) else [layer.input]
        # The input layer has no inputs; one pixel of it is one pixel.
        side, jump = max((fields[id(x)] for x in inputs), default=(1, 1))
        window = getattr(layer, "kernel_size", getattr(layer, "pool_size", (1,)))[0]
        stride = getattr(layer, "strides", (1,))[0]
        fields[id(layer.output)] = (side + (window - 1) * jump, jump * stride)
        if layer.name == layer_name:
            break
    return fields[id(layer.output)]
