"""TensorFlow's fused batch normalization, for any rank, and safe under XLA too.

`FusedBatchNormV3` does the work of Algorithm 1 in one kernel on CPU and GPU, several times
faster than the same equations written out. It has three limits, which this file hides:

- it knows rank 4 only, channels last or second: inputs are reshaped, which costs nothing;
- cuDNN refuses an epsilon below 1e-5;
- compiled by XLA its variance is wrong for a large mean: `kernel_or_equations.py` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from .kernel_or_equations import Use, batch_norm_of_rank_4

_FUSED_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


class _Layout(NamedTuple):
    """How an input is seen by the kernel: as (before, channels, after)."""

    shape: list[int | tf.Tensor]
    channels: int
    data_format: str


def can_fuse(x: tf.Tensor, axes: Sequence[int]) -> bool:
    """Whether the fused kernel serves this dtype and these statistics.

    The axes that keep statistics must be adjacent, so that they can be seen as one.

    Args:
        x: The input, of known rank.
        axes: The axes that keep statistics of their own, ascending.

    Example:
        >>> import tensorflow as tf
        >>> can_fuse(tf.zeros([2, 3, 4, 5]), [1, 2, 3]), can_fuse(tf.zeros([2, 3, 4, 5]), [1, 3])
        (True, False)
    """
    adjacent = list(axes) == list(range(axes[0], axes[0] + len(axes)))
    return adjacent and x.dtype in _FUSED_DTYPES


@tf.autograph.experimental.do_not_convert
def batch_norm(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float, axes: Sequence[int]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Algorithm 1: normalizes by the statistics of the batch, and returns them.

        y = gamma * (x - mean) / sqrt(variance + epsilon) + beta

    Args:
        x: Input, float32, float16 or bfloat16, for which `can_fuse` holds.
        gamma: Scale, float32, of the shape of the kept axes.
        beta: Offset, float32, of the same shape.
        epsilon: Added to the variance, inside the root.
        axes: The axes that keep statistics of their own, ascending and adjacent.

    Returns:
        `(y, mean, unbiased, count)`: `y` like `x`; the mean and the unbiased variance in
        float32, of the shape of `gamma`; the number of values behind each of them, a float32
        scalar. Gradients flow through `y` alone. With no value the mean is undefined (NaN on
        CPU), and the variance with none or one.

    Source:
        Ioffe & Szegedy 2015, Algorithm 1; gradients as in Section 3.

    Example:
        >>> import tensorflow as tf
        >>> x = tf.constant([[1.0], [2.0], [3.0], [4.0]])
        >>> y, mean, unbiased, count = batch_norm(x, tf.ones(1), tf.zeros(1), 1e-3, [1])
        >>> [round(float(v), 4) for v in (y[0, 0], mean[0], unbiased[0], count)]
        [-1.3411, 2.5, 1.6667, 4.0]
    """
    layout = _layout(x, axes)
    y, mean, unbiased = batch_norm_of_rank_4(
        tf.reshape(x, layout.shape),
        reshaped_to([layout.channels], gamma),
        reshaped_to([layout.channels], beta),
        Use(epsilon, layout.data_format),
    )
    size = x.shape.num_elements()
    if size is None:
        count = tf.cast(tf.size(x, tf.int64) // layout.channels, tf.float32)
    else:
        count = tf.constant(size // layout.channels, tf.float32)
    statistics = (reshaped_to(gamma.shape, value) for value in (mean, unbiased))
    return (tf.reshape(y, tf.shape(x)), *statistics, count)


@tf.autograph.experimental.do_not_convert
def batch_norm_inference(
    x: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
    axes: Sequence[int],
) -> tf.Tensor:
    """Algorithm 2, line 11: normalizes by the given population statistics.

        y = gamma * (x - mean) / sqrt(variance + epsilon) + beta

    Args:
        x: Input, float32, float16 or bfloat16, for which `can_fuse` holds.
        gamma: Scale, float32, of the shape of the kept axes; `beta`, `mean` and
            `variance` likewise.
        beta: Offset.
        mean: Population mean.
        variance: Population variance.
        epsilon: Added to the variance; at least `kernel_or_equations.CUDNN_MIN_EPSILON`.
        axes: The axes that keep statistics of their own, ascending and adjacent.

    Returns:
        `y`, of the shape and dtype of `x`.

    Example:
        >>> import tensorflow as tf
        >>> one = tf.ones(1)
        >>> y = batch_norm_inference(tf.constant([[5.0]]), 2 * one, one, one, 3 * one, 1.0, [1])
        >>> float(y[0, 0])
        5.0
    """
    layout = _layout(x, axes)
    y = tf.raw_ops.FusedBatchNormV3(
        x=tf.reshape(x, layout.shape),
        scale=tf.reshape(gamma, [-1]),
        offset=tf.reshape(beta, [-1]),
        mean=tf.reshape(mean, [-1]),
        variance=tf.reshape(variance, [-1]),
        epsilon=epsilon,
        is_training=False,
        data_format=layout.data_format,
    ).y
    return tf.reshape(y, tf.shape(x))


def reshaped_to(shape: Sequence[int], value: tf.Tensor) -> tf.Tensor:
    """`value` in a shape of known sizes: itself if it has it, with no op in the graph."""
    return value if value.shape == tf.TensorShape(shape) else tf.reshape(value, shape)


def _layout(x: tf.Tensor, axes: Sequence[int]) -> _Layout:
    """Sees the input as rank 4, the kept axes as one."""
    static, dynamic = x.shape, tf.shape(x)
    first, last = axes[0], axes[-1]
    channels = static[first : last + 1].num_elements()
    if last == static.rank - 1:
        # All other sizes are static, so that -1 is well defined for an empty batch too.
        return _Layout([-1, 1, 1, channels], channels, "NHWC")

    def product(begin: int, end: int) -> int | tf.Tensor:
        known = static[begin:end].num_elements()
        return tf.reduce_prod(dynamic[begin:end]) if known is None else known

    shape = [product(0, first), channels, 1, product(last + 1, static.rank)]
    return _Layout(shape, channels, "NCHW")
