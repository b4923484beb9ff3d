"""One scale and one offset per channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from .axes import as_axis, resolve_axes


@keras.saving.register_keras_serializable(package="bnzoo")
class ChannelAffine(keras.layers.Layer):
    """y = scale * x + offset, with one `scale` and one `offset` per channel.

    This is Batch Normalization at inference (Ioffe & Szegedy 2015, Algorithm 2, step 11): with
    population statistics E[x] and Var[x],

        scale = gamma / sqrt(Var[x] + epsilon)
        offset = beta - scale * E[x]

    `bnzoo.surgery` puts it where a BatchNormalization cannot be folded into a layer next to it.

    Args:
        axis: the channel axis, or a tuple of axes that have a scale and an offset of their own:
            (1, 2, 3) is one for each activation of a feature map. `scale` and `offset` have the
            shape of these axes, in ascending order.
        scale_initializer: Keras initializer of `scale`.
        offset_initializer: Keras initializer of `offset`.
        **kwargs: `name`, `dtype`, `trainable` and so on, of `keras.layers.Layer`.

    Raises:
        ValueError: when built, for an axis that is out of range, repeated, or the batch axis, or
            whose size is unknown.

    Example:
        >>> import bnzoo, numpy as np
        >>> layer = bnzoo.layers.ChannelAffine()
        >>> layer.build((None, 2))
        >>> layer.set_weights([np.array([2.0, 3.0]), np.array([0.5, -1.0])])
        >>> layer(np.array([[1.0, 1.0]])).numpy().tolist()
        [[2.5, 2.0]]
    """

    def __init__(
        self,
        axis: int | Sequence[int] = -1,
        scale_initializer: Any = "ones",
        offset_initializer: Any = "zeros",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.axis = as_axis(axis)
        self.scale_initializer = keras.initializers.get(scale_initializer)
        self.offset_initializer = keras.initializers.get(offset_initializer)
        self.supports_masking = True

    def build(self, input_shape: Sequence[int | None]) -> None:
        sizes = resolve_axes(self.axis, input_shape)
        shape = list(sizes.values())
        self.scale = self.add_weight(name="scale", shape=shape, initializer=self.scale_initializer)
        self.offset = self.add_weight(
            name="offset", shape=shape, initializer=self.offset_initializer
        )
        # Trailing axes broadcast by themselves; others need ones behind them.
        self._broadcast_shape = [sizes.get(axis, 1) for axis in range(min(sizes), len(input_shape))]
        self.input_spec = keras.layers.InputSpec(ndim=len(input_shape), axes=sizes)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        # Plain products and sums: XLA, Grappler and TFLite merge them with their neighbours, and on
        # CPU they are no slower than FusedBatchNormV3 in inference mode and faster in training.
        scale = tf.reshape(self.scale, self._broadcast_shape)
        offset = tf.reshape(self.offset, self._broadcast_shape)
        return inputs * scale + offset

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "axis": self.axis,
            "scale_initializer": keras.initializers.serialize(self.scale_initializer),
            "offset_initializer": keras.initializers.serialize(self.offset_initializer),
        }
