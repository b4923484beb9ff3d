"""Local response normalization across channels, as in AlexNet and GoogLeNet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bnzoo.checks import check_number, check_whole

from .axes import as_axis, positive_axes
from .real_inputs import as_floating


@keras.saving.register_keras_serializable(package="bnzoo")
class LocalResponseNormalization(keras.layers.Layer):
    """Divides each activation by a power of the energy of its neighbour channels.

    At every position, with x_j the value of channel j and r = `depth_radius`,

        y_i = x_i / (bias + alpha * sum_{j = i-r}^{i+r} x_j^2) ^ beta

    where the sum leaves out channels that do not exist (Krizhevsky et al. 2012, Section 3.3).

    `alpha` multiplies the sum itself, as in TensorFlow and in that paper. Caffe multiplies the mean
    over `local_size` = 2r + 1 channels: divide its `alpha` by its `local_size` to use it here. The
    defaults are those of Caffe's GoogLeNet (local_size 5, alpha 1e-4, beta 0.75, k 1); AlexNet has
    depth_radius=2, bias=2, alpha=1e-4, beta=0.75.

    float16 and bfloat16 are computed in float32, since the squares of float16 values beyond 255
    overflow.

    Args:
        depth_radius: r, the number of channels on either side that count; a whole number >= 0.
        bias: added to the weighted sum; a finite number > 0, which keeps the quotient finite.
        alpha: weight of the sum of squares; a finite number >= 0.
        beta: the exponent; a finite number.
        axis: the channel axis.
        **kwargs: `name`, `dtype` and so on, of `keras.layers.Layer`.

    Raises:
        ValueError: for an argument outside its range; for one that float32 (under `dtype="float64"`
            float64) cannot hold, and for a bias ** -beta of that kind; when built, for an axis that
            is out of range or the batch axis.

    Example:
        >>> import bnzoo, numpy as np
        >>> layer = bnzoo.layers.LocalResponseNormalization(1, bias=2.0, alpha=1.0, beta=1.0)
        >>> layer(np.array([[1.0, 1.0, 2.0, 1.0, 1.0]])).numpy().tolist()
        [[0.25, 0.125, 0.25, 0.125, 0.25]]
    """

    def __init__(
        self,
        depth_radius: int = 2,
        bias: float = 1.0,
        alpha: float = 2e-5,
        beta: float = 0.75,
        axis: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_whole("depth_radius", depth_radius, 0)
        check_number("bias", bias, 0, open_ends=True)
        check_number("alpha", alpha, 0)
        check_number("beta", beta)
        if isinstance(resolved := as_axis(axis), tuple):
            raise ValueError(f"`axis` must be one integer. Received: axis={axis!r}")
        bias, alpha, beta = float(bias), float(alpha), float(beta)
        kind = "float64" if self.compute_dtype == "float64" else "float32"
        least, largest = float(np.finfo(kind).tiny), float(np.finfo(kind).max)
        # The kernels take what is below `least` for 0, of which the power is infinite.
        held = least <= bias and max(bias, alpha, abs(beta)) <= largest
        if not held or -beta * math.log(bias) > math.log(largest):
            raise ValueError(
                f"`bias`, `alpha`, `beta` and bias ** -beta must be numbers that {kind} holds, or "
                f"an input of 0 gives NaN. Received: bias={bias}, alpha={alpha}, beta={beta}"
            )
        self.depth_radius = int(depth_radius)
        self.bias = bias
        self.alpha = alpha
        self.beta = beta
        self.axis = resolved

    def build(self, input_shape: Sequence[int | None]) -> None:
        positive_axes(self.axis, len(input_shape))
        self.input_spec = keras.layers.InputSpec(ndim=len(input_shape))

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        inputs = as_floating(inputs, self.compute_dtype)
        # The kernels know float32 only (on CPU), rank 4, channels last.
        rank = inputs.shape.rank
        order = [axis for axis in range(rank) if axis != self.axis % rank] + [self.axis % rank]
        last = tf.transpose(inputs, order) if order != sorted(order) else inputs
        if inputs.dtype == tf.float64:
            normalized = self._by_matrix(last)
        else:
            single = tf.cast(last, tf.float32)
            rank_4 = single if rank == 4 else tf.reshape(single, [-1, 1, 1, tf.shape(last)[-1]])
            normalized = tf.nn.local_response_normalization(
                rank_4, self.depth_radius, self.bias, self.alpha, self.beta
            )
            if rank != 4:
                normalized = tf.reshape(normalized, tf.shape(last))
            normalized = tf.cast(normalized, inputs.dtype)
        if order == sorted(order):
            outputs = normalized
        else:
            outputs = tf.transpose(normalized, [order.index(axis) for axis in range(rank)])
        return tf.ensure_shape(outputs, inputs.shape)

    def _by_matrix(self, inputs: tf.Tensor) -> tf.Tensor:
        """The same for float64, which has no kernel: a band matrix sums the neighbours' squares."""
        channels = tf.shape(inputs)[-1]
        ones = tf.ones([channels, channels], inputs.dtype)
        # band_part keeps at most channels - 1 diagonals on either side.
        reach = tf.minimum(self.depth_radius, channels - 1)
        neighbours = tf.linalg.band_part(ones, reach, reach)
        energy = tf.tensordot(tf.square(inputs), neighbours, axes=1)
        return inputs * tf.pow(self.bias + self.alpha * energy, -self.beta)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "depth_radius": self.depth_radius,
            "bias": self.bias,
            "alpha": self.alpha,
            "beta": self.beta,
            "axis": self.axis,
        }
