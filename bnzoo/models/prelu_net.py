"""The rectifier networks of He et al. 2015."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

from bnzoo.checks import check_choice, check_number, check_whole
from bnzoo.initializers import HeNormal
from bnzoo.layers.prelu import PReLU
from bnzoo.layers.spatial_pyramid_pooling import SpatialPyramidPooling

from .arguments import (
    build_model,
    check_data_format,
    check_weights,
    classifier,
    global_pool,
    image_input,
)
from .prelu_net_table import TABLES, PReLUNetTable

# Section 2.1: what slopes start from, which the initial weights allow for (Eq. 15).
SLOPE = 0.25
# (mode, whether the rectifier is allowed for). Xavier is He's form without the factor for the
# rectifier, as in the paper's comparison: n^ Var[w] = 1 (legends of Figures 2 and 3).
INITIALIZATIONS = {
    "he_backward": ("fan_out", True),
    "he_forward": ("fan_in", True),
    "xavier": ("fan_out", False),
}


_DOCUMENTATION = """{summary}

conv1 7x7 of stride 2, stages of small convolutions with max pools between them, a spatial
pyramid, and three fully connected layers; a rectifier after every layer but the last. Layers
are called as in the paper (`conv2_1`, `fc1`), with `_prelu` or `_relu` for what follows.

Args:
    include_top: whether to end with the pyramid, the fully connected layers and the classifier.
    weights: None for random weights, or the path of a Keras file (.weights.h5 or .keras) of
        this network.
    input_tensor: a Keras tensor to start from instead of a new input.
    input_shape: (height, width, channels) in pixels, or (channels, height, width) for
        channels_first, of at least {minimal_size} pixels a side; any number of channels. The
        pyramid fits every size, so that height and width may be None and the weights stay the
        same. Default: (224, 224, 3), and (None, None, 3) without the top.
    pooling: without the top: None for the last map, "avg" or "max" for its mean or maximum over
        positions.
    classes: number of classes.
    classifier_activation: activation of the top; None gives logits.
    name: name of the model.
    activation: "prelu", one slope for each channel; "prelu_shared", one for each layer; "relu".
    initialization: of the convolutions, untruncated Gaussians. "he_backward", Eq. 14 and 15,
        keeps the variance of the gradients and is what the paper trained with; "he_forward",
        Eq. 10 and 15, keeps that of the responses; "xavier" is the former without the factor of
        2 / (1 + a^2) for the rectifier, which the paper compares with.
    dropout: probability that an output of the first two fully connected layers is dropped.
    fc_stddev: standard deviations of the initial weights of the three fully connected layers.
        The paper's are small to absorb the range of its images, -128 to 128; None is the rule
        of `initialization`, for images of about unit variance.
    width_multiplier: factor of all channel counts but `classes`.
    data_format: "channels_last" or "channels_first" (on CPU, TensorFlow runs only the first);
        None is Keras' setting.

Returns:
    A functional `keras.Model` from images [N, height, width, channels] to class probabilities
    [N, classes].

Raises:
    ValueError: for an argument outside its range; the message has the value and what is
        allowed.

Example:

>>> model = {name}(input_shape=(64, 64, 3), classes=10, width_multiplier=0.0625)
>>> model.output.shape
(None, 10)
"""


def _prelu_net(
    table: str,
    include_top: bool = True,
    weights: str | None = None,
    input_tensor: Any = None,
    input_shape: Sequence[int | None] | None = None,
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: Any = "softmax",
    name: str = "prelu_net",
    *,
    activation: str = "prelu",
    initialization: str = "he_backward",
    dropout: float = 0.5,
    fc_stddev: Sequence[float] | None = (0.01, 0.01, 0.001),
    width_multiplier: float = 1.0,
    data_format: str | None = None,
) -> keras.Model:
    """The network of the row `table`; the arguments are documented in `_DOCUMENTATION`."""
    check_choice("activation", activation, ("prelu", "prelu_shared", "relu"))
    check_choice("initialization", initialization, tuple(INITIALIZATIONS))
    check_choice("pooling", pooling, (None, "avg", "max"))
    check_number("dropout", dropout, 0, 1)
    check_number("width_multiplier", width_multiplier, 0, open_ends=True)
    check_whole("classes", classes)
    check_weights(weights)
    if fc_stddev is not None:
        if not isinstance(fc_stddev, Sequence) or len(fc_stddev) != 3:
            raise ValueError(
                "`fc_stddev` must be None or three numbers, one for each fully connected layer. "
                f"Received: fc_stddev={fc_stddev!r}"
            )
        for stddev in fc_stddev:
            check_number("fc_stddev", stddev, 0)
    data_format = check_data_format(data_format)

    row = TABLES[table]
    image = image_input(
        input_tensor,
        input_shape,
        224 if include_top else None,
        row.minimal_image_size(),
        data_format,
    )
    blocks = _Blocks(activation, initialization, width_multiplier, data_format)
    x = blocks.features(image, row)
    if include_top:
        x = SpatialPyramidPooling(row.bins, data_format, name="spp")(x)
        stddevs = fc_stddev or (None, None, None)
        for index in (1, 2):
            x = blocks.dense(x, f"fc{index}", stddevs[index - 1])
            if dropout:
                x = keras.layers.Dropout(dropout, name=f"fc{index}_dropout")(x)
        # No rectifier follows: Eq. 15 with a slope of 1.
        initializer = blocks.initializer(stddevs[2], negative_slope=1.0)
        x = classifier(x, classes, classifier_activation, kernel_initializer=initializer)
    elif pooling is not None:
        x = global_pool(x, pooling, data_format)
    return build_model(input_tensor, image, x, name, weights)


class _Blocks:
    """Builders that share one choice of the options; each takes a Keras tensor and gives one."""

    def __init__(
        self, activation: str, initialization: str, width_multiplier: float, data_format: str
    ) -> None:
        self.activation = activation
        self.mode, self.allows_for_rectifier = INITIALIZATIONS[initialization]
        self.width_multiplier = width_multiplier
        self.data_format = data_format

    def width(self, channels: int) -> int:
        return max(1, round(self.width_multiplier * channels))

    def initializer(
        self, stddev: float | None = None, negative_slope: float | None = None
    ) -> keras.initializers.Initializer:
        """Gaussian of `stddev`, or by the rule chosen; the slope is that of the rectifier after."""
        if stddev is not None:
            return keras.initializers.RandomNormal(stddev=stddev)
        if negative_slope is None:
            negative_slope = 0.0 if self.activation == "relu" else SLOPE
        if not self.allows_for_rectifier:
            negative_slope = 1.0
        return HeNormal(negative_slope, self.mode)

    def rectifier(self, x: Any, name: str, axis: int) -> Any:
        if self.activation == "relu":
            return keras.layers.ReLU(name=f"{name}_relu")(x)
        shared = self.activation == "prelu_shared"
        layer = PReLU(shared=shared, alpha_initializer=SLOPE, axis=axis, name=f"{name}_prelu")
        return layer(x)

    def conv(
        self, x: Any, name: str, filters: int, size: int, stride: int = 1, padding: int | str = 0
    ) -> Any:
        """Convolution and rectifier; `padding` is "same" or the zeros on all sides, in places."""
        if isinstance(padding, int):
            if padding:
                pad = keras.layers.ZeroPadding2D(
                    padding, data_format=self.data_format, name=f"{name}_pad"
                )
                x = pad(x)
            padding = "valid"
        x = keras.layers.Conv2D(
            self.width(filters),
            size,
            strides=stride,
            padding=padding,
            data_format=self.data_format,
            kernel_initializer=self.initializer(),
            name=name,
        )(x)
        return self.rectifier(x, name, -1 if self.data_format == "channels_last" else 1)

    def max_pool(self, x: Any, name: str, size: int) -> Any:
        return keras.layers.MaxPooling2D(size, data_format=self.data_format, name=name)(x)

    def features(self, x: Any, row: PReLUNetTable) -> Any:
        """All convolutions and the pools between them."""
        x = self.conv(x, "conv1", row.conv1_filters, 7, 2, row.conv1_padding)
        x = self.max_pool(x, "pool1", row.pool1)
        for index, stage in enumerate(row.stages, start=2):
            if index > 2:
                x = self.max_pool(x, f"pool{index - 1}", 2)
            for number in range(stage.convs):
                # Even kernels keep the size of a map, and its centre, two by two: one enlarges the
                # map by a place, the next takes it away.
                padding = "same" if stage.size % 2 else 1 - number % 2
                name = f"conv{index}_{number + 1}"
                x = self.conv(x, name, stage.filters, stage.size, padding=padding)
        return x

    def dense(self, x: Any, name: str, stddev: float | None) -> Any:
        """The 4096 units of a fully connected layer and their rectifier."""
        layer = keras.layers.Dense(
            self.width(4096), kernel_initializer=self.initializer(stddev), name=name
        )
        return self.rectifier(layer(x), name, -1)


def _function(table: str, summary: str) -> Callable[..., keras.Model]:
    """The public function of one row of the table, with a signature and docstring of its own."""
    name = f"prelu_net_{table}"
    signature = inspect.signature(_prelu_net)
    parameters = [
        parameter.replace(default=name) if parameter.name == "name" else parameter
        for parameter in signature.parameters.values()
        if parameter.name != "table"
    ]
    signature = signature.replace(parameters=parameters)

    def build(*args: Any, **kwargs: Any) -> keras.Model:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return _prelu_net(table, *given.args, **given.kwargs)

    build.__name__ = build.__qualname__ = name
    build.__module__ = __name__
    build.__signature__ = signature  # type: ignore[attr-defined]
    build.__doc__ = _DOCUMENTATION.format(
        summary=summary, minimal_size=TABLES[table].minimal_image_size(), name=name
    )
    return build


prelu_net_14 = _function("14", "The 14-layer network of He et al. 2015, Table 1.")
prelu_net_30 = _function(
    "30", "The 30-layer network of He et al. 2015, Section 2.2, on which Xavier stalls (Figure 3)."
)
prelu_net_a = _function("a", "Model A of He et al. 2015, Table 3: 19 layers.")
prelu_net_b = _function(
    "b", "Model B of He et al. 2015, Table 3: 22 layers, also those of Figure 2."
)
prelu_net_c = _function("c", "Model C of He et al. 2015, Table 3: 22 layers, the widest.")
