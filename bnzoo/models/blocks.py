"""The blocks of the Inception networks, one builder for each kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from bnzoo.initializers import HeNormal
from bnzoo.layers.batch_normalization import BatchNormalization
from bnzoo.layers.local_response_normalization import LocalResponseNormalization
from bnzoo.layers.prelu import PReLU

from .inception_table import InceptionModule, Pools
from .pooling import PaddedMaxPooling2D
from .scaled_initializer import Scaled

# He et al. 2015: the slope that PReLU starts from, which the initial weights allow for.
PRELU_SLOPE = 0.25


@dataclasses.dataclass(frozen=True)
class InceptionBlocks:
    """Builders that share one choice of everything that the published networks disagree about.

    Each takes a Keras tensor and returns one. A convolution called X makes the layers X, X_bn (if
    normalised) and X_relu (or X_sigmoid, X_prelu).

    Attributes:
        activation: "relu", "sigmoid" or "prelu".
        batch_norm: constructor arguments of BatchNormalization, or None for a network without.
        conv_bias: whether a convolution has a bias even where BN makes it useless.
        padding: of convolutions; "same" is TensorFlow's, "symmetric" the same zeros on all sides.
        pools: how the pools are padded.
        width_multiplier: factor of all channel counts.
        weight_scale: factor of the standard deviation of the initial weights.
        data_format: "channels_last" or "channels_first".
    """

    activation: str
    batch_norm: Mapping[str, Any] | None
    conv_bias: bool
    padding: str
    pools: Pools
    width_multiplier: float
    weight_scale: float
    data_format: str

    @property
    def channel_axis(self) -> int:
        return -1 if self.data_format == "channels_last" else 1

    def width(self, channels: int) -> int:
        """The channel count `channels` of the table, made wider or narrower."""
        return max(1, round(self.width_multiplier * channels))

    def initializer(self) -> keras.initializers.Initializer:
        """That of the kernels before a nonlinearity: He et al. 2015, Eq. 10 and 15."""
        he = HeNormal(negative_slope=PRELU_SLOPE if self.activation == "prelu" else 0.0)
        return he if self.weight_scale == 1 else Scaled(he, self.weight_scale)

    def conv(
        self,
        x: Any,
        name: str,
        channels: int,
        size: int,
        stride: int = 1,
        *,
        normalize: bool = True,
        per_activation: bool = False,
        depth_multiplier: int | None = None,
    ) -> Any:
        """Convolution (separable for a `depth_multiplier`), BN, nonlinearity: z = g(BN(Wu))."""
        batch_norm = self.batch_norm if normalize else None
        padding = "same"
        # "same" is symmetric already for odd kernels of stride 1.
        if self.padding == "symmetric" and stride > 1:
            pad = keras.layers.ZeroPadding2D(
                size // 2, data_format=self.data_format, name=f"{name}_pad"
            )
            x, padding = pad(x), "valid"
        common = {
            "filters": self.width(channels),
            "kernel_size": size,
            "strides": stride,
            "padding": padding,
            "use_bias": self.conv_bias or batch_norm is None,
            "data_format": self.data_format,
            "name": name,
        }
        if depth_multiplier is None:
            layer = keras.layers.Conv2D(kernel_initializer=self.initializer(), **common)
        else:
            layer = keras.layers.SeparableConv2D(
                depth_multiplier=depth_multiplier,
                # No nonlinearity follows the depthwise half: Eq. 15 with a slope of 1.
                depthwise_initializer=HeNormal(negative_slope=1.0, kernel="depthwise"),
                pointwise_initializer=self.initializer(),
                **common,
            )
        x = layer(x)
        if batch_norm is not None:
            axis = (1, 2, 3) if per_activation else self.channel_axis
            x = BatchNormalization(axis=axis, name=f"{name}_bn", **batch_norm)(x)
        return self.nonlinearity(x, name)

    def nonlinearity(self, x: Any, name: str) -> Any:
        if self.activation == "prelu":
            layer = PReLU(
                alpha_initializer=PRELU_SLOPE, axis=self.channel_axis, name=f"{name}_prelu"
            )
        else:
            layer = keras.layers.Activation(self.activation, name=f"{name}_{self.activation}")
        return layer(x)

    def local_response_norm(self, x: Any, name: str) -> Any:
        """GoogLeNet's, whose constants only BVLC's replica tells: the defaults of the layer."""
        return LocalResponseNormalization(axis=self.channel_axis, name=name)(x)

    def max_pool(self, x: Any, name: str, pads: str | tuple[int, int]) -> Any:
        """Max pool 3x3 of stride 2."""
        if isinstance(pads, str):
            layer = keras.layers.MaxPooling2D(
                3, 2, padding=pads, data_format=self.data_format, name=name
            )
        else:
            layer = PaddedMaxPooling2D(3, 2, pads=pads, data_format=self.data_format, name=name)
        return layer(x)

    def module_pool(self, x: Any, row: InceptionModule) -> Any:
        """Pool 3x3 of an Inception module."""
        name = f"inception_{row.name}_pool"
        if row.stride == 2:
            return self.max_pool(x, name, self.pools.module)
        common = {"pool_size": 3, "strides": 1, "data_format": self.data_format, "name": name}
        if row.pool == "max":
            return keras.layers.MaxPooling2D(padding="same", **common)(x)
        if not self.pools.count_padding:
            return keras.layers.AveragePooling2D(padding="same", **common)(x)
        pad = keras.layers.ZeroPadding2D(1, data_format=self.data_format, name=f"{name}_pad")
        return keras.layers.AveragePooling2D(padding="valid", **common)(pad(x))

    def module(self, x: Any, row: InceptionModule, *, per_activation: bool = False) -> Any:
        """One Inception module: four branches (three at stride 2) and their concatenation."""
        name = f"inception_{row.name}"
        branches = []

        def conv(x: Any, branch: str, channels: int, size: int, stride: int = 1) -> Any:
            return self.conv(
                x, f"{name}_{branch}", channels, size, stride, per_activation=per_activation
            )

        if row.conv_1x1:
            branches.append(conv(x, "1x1", row.conv_1x1, 1))

        branch = conv(x, "3x3_reduce", row.reduce_3x3, 1)
        branches.append(conv(branch, "3x3", row.conv_3x3, 3, row.stride))

        branch = conv(x, "double_3x3_reduce", row.reduce_double, 1)
        branch = conv(branch, "double_3x3_1", row.conv_double, 3)
        branches.append(conv(branch, "double_3x3_2", row.conv_double, 3, row.stride))

        branch = self.module_pool(x, row)
        branches.append(conv(branch, "pool_proj", row.projection, 1) if row.projection else branch)

        spatial = slice(1, 3) if self.data_format == "channels_last" else slice(2, 4)
        if len({branch.shape[spatial] for branch in branches}) > 1:
            raise ValueError(
                "`input_shape` must give the modules of stride 2 maps of even height and width "
                "where `pools` are padded as in Caffe; multiples of 32 do. Received: a map of "
                f"{x.shape[spatial]} at {name}"
            )
        return keras.layers.Concatenate(axis=self.channel_axis, name=name)(branches)
