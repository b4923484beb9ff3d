"""What the model functions share of keras.applications' manners: inputs, heads and their checks."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from typing import Any

import keras

from bnzoo.checks import check_choice, is_whole
from bnzoo.initializers import HeNormal


def check_data_format(data_format: str | None) -> str:
    """The data format meant: None is Keras' setting."""
    if data_format is None:
        return keras.config.image_data_format()
    check_choice("data_format", data_format, ("channels_last", "channels_first"))
    return data_format


def image_input(
    input_tensor: Any,
    input_shape: Sequence[int | None] | None,
    default_size: int | None,
    minimal_size: int,
    data_format: str,
) -> Any:
    """The Keras tensor that a network of images starts from.

    Args:
        input_tensor: a Keras tensor to start from, or None.
        input_shape: (height, width, channels), or (channels, height, width) for "channels_first",
            without the batch; height and width may be None. None is the default size, RGB.
        default_size: height and width without an `input_shape`; None leaves them open.
        minimal_size: the smallest height and width that leave something of the last map, in pixels.
        data_format: "channels_last" or "channels_first".

    Raises:
        ValueError: for a shape that is none of an image, or too small, or not that of
            `input_tensor`.
    """
    first = data_format == "channels_first"
    if input_tensor is not None:
        if not keras.utils.is_keras_tensor(input_tensor):
            raise ValueError(
                "`input_tensor` must be a Keras tensor, such as keras.Input() returns. "
                f"Received: input_tensor of type {type(input_tensor).__name__}"
            )
        shape = tuple(input_tensor.shape[1:])
        if input_shape is not None and _as_tuple(input_shape) != shape:
            raise ValueError(
                "`input_shape` must be None or the shape of `input_tensor` without the batch, "
                f"{shape}. Received: input_shape={input_shape!r}"
            )
    elif input_shape is None:
        size = (default_size, default_size)
        shape = (3, *size) if first else (*size, 3)
    else:
        shape = _as_tuple(input_shape)

    order = "(channels, height, width)" if first else "(height, width, channels)"
    whole = [size is None or (is_whole(size) and size > 0) for size in shape]
    if len(shape) != 3 or not all(whole) or shape[0 if first else -1] is None:
        received = shape if input_tensor is not None else input_shape
        raise ValueError(
            f"`input_shape` must be {order}, whole numbers or, for height and width, None. "
            f"Received: input_shape={received!r}"
        )
    shape = tuple(None if size is None else int(size) for size in shape)
    sides = shape[1:] if first else shape[:-1]
    if any(side is not None and side < minimal_size for side in sides):
        raise ValueError(
            f"`input_shape` must have a height and width of at least {minimal_size} pixels. "
            f"Received: input_shape={shape}"
        )
    return keras.Input(shape=shape, name="image") if input_tensor is None else input_tensor


def _as_tuple(shape: Any) -> tuple[Any, ...]:
    """A shape as a tuple; of what is none, a tuple that is no shape."""
    try:
        return tuple(shape)
    except TypeError:
        return (shape,)


def classifier(
    x: Any,
    classes: int,
    activation: Any,
    name: str = "predictions",
    kernel_initializer: keras.initializers.Initializer | None = None,
) -> Any:
    """The linear layer and softmax at the top.

    It computes in the type of its variables also under a mixed-precision policy: a softmax over a
    thousand classes is too fine for float16.
    """
    layer = keras.layers.Dense(
        int(classes),  # Keras takes no integers of NumPy's.
        activation=activation,
        # A slope of 1 is He et al.'s Eq. 15 for a layer without a rectifier: std = sqrt(1 / n).
        kernel_initializer=kernel_initializer or HeNormal(negative_slope=1.0),
        dtype=keras.config.dtype_policy().variable_dtype,
        name=name,
    )
    return layer(x)


def global_pool(x: Any, pooling: str, data_format: str) -> Any:
    """The mean or the maximum of each channel over all positions."""
    kind = {
        "avg": keras.layers.GlobalAveragePooling2D,
        "max": keras.layers.GlobalMaxPooling2D,
    }[pooling]
    return kind(data_format=data_format, name=f"{pooling}_pool")(x)


# Published weights that bnzoo.pretrained can download.
DOWNLOADED = ("slim",)


def check_weights(weights: Any) -> None:
    """ValueError unless `weights` is None, to be downloaded, or a file that Keras can load."""
    if weights is None or (isinstance(weights, str) and weights in DOWNLOADED):
        return
    if not isinstance(weights, (str, os.PathLike)) or not os.path.isfile(weights):
        raise ValueError(
            "`weights` must be None, 'slim' or the path of an existing weights file. "
            f"Received: weights={weights!r}"
        )
    if not os.fspath(weights).endswith((".weights.h5", ".keras")):
        raise ValueError(
            "`weights` must be a file of Keras' that ends in .weights.h5 or .keras. "
            f"Received: weights={os.fspath(weights)!r}"
        )


def build_model(input_tensor: Any, image: Any, outputs: Any, name: str, weights: Any) -> Any:
    """The model from the source of `image` to `outputs`, with `weights` loaded if there are any."""
    inputs = image
    if input_tensor is not None:
        sources = keras.utils.get_source_inputs(input_tensor)
        inputs = sources[0] if len(sources) == 1 else sources
    model = keras.Model(inputs, outputs, name=name)
    if weights in DOWNLOADED:
        # Here and not at the top: it builds models, so that it imports this package.
        from bnzoo import pretrained

        pretrained.load_weights(model, pretrained.fetch(weights), source=weights)
    elif weights is not None:
        try:
            model.load_weights(weights)
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            # Keras' own text lists every object of the network over many lines.
            raise ValueError(
                "`weights` must be a file of this network. "
                f"Received: weights={os.fspath(weights)!r}, for {model.name!r} with "
                f"{model.count_params()} parameters"
            ) from error
    return model
