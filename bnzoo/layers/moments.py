"""Batch statistics in a numerically safe form, with a mask and across replicas."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


@tf.autograph.experimental.do_not_convert
def moments(
    x: tf.Tensor,
    reduction_axes: Sequence[int],
    mask: tf.Tensor | None = None,
    synchronized: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Mean, biased variance and number of values, in two passes over the input.

    The textbook second pass, `variance = E[(x - mean)^2]`, is only as good as the mean
    in it, and a float32 sum of many values far from zero has a rounding error that is
    large against a small variance. So the first mean, `c`, serves as a mere shift:

        d        = x - c
        mean     = c + E[d]
        variance = E[d^2] - E[d]^2

    These two hold for any `c`, and for a `c` near the mean nothing cancels: `E[d]` is a
    correction of the order of the rounding error. Because they hold for any `c`, no
    gradient has to pass through it, and the derivatives are those of the exact moments.

    Args:
        x: Floating-point tensor, float32 or wider.
        reduction_axes: The axes over which to average.
        mask: None, or a boolean tensor of the rank of `x` that broadcasts against it.
            Only values where it is True count; the others may be anything, also NaN.
        synchronized: Whether to take in the values of all replicas when called in a
            replica context of `tf.distribute`.

    Returns:
        `(mean, variance, count)`, each of the shape of `x` with the reduced axes kept as
        1. Where `count` is 0 (an empty batch, nothing valid under the mask) mean and
        variance are 0.

    Source:
        Ioffe & Szegedy 2015, Algorithm 1, lines 1 and 2; under `synchronized`, B is
        the global batch.

    Example:
        >>> import tensorflow as tf
        >>> mean, variance, count = moments(tf.constant([[1.0], [2.0], [3.0], [4.0]]), [0])
        >>> float(mean[0, 0]), float(variance[0, 0]), float(count[0, 0])
        (2.5, 1.25, 4.0)
    """
    context = tf.distribute.get_replica_context() if synchronized else None

    def total(*values: tf.Tensor) -> list[tf.Tensor]:
        sums = [tf.reduce_sum(value, reduction_axes, keepdims=True) for value in values]
        if context is None or context.num_replicas_in_sync == 1:
            return sums
        return context.all_reduce(tf.distribute.ReduceOp.SUM, sums)

    def valid(value: tf.Tensor) -> tf.Tensor:
        # Not a product with the mask: NaN * 0 is NaN.
        return value if mask is None else tf.where(mask, value, tf.zeros([], value.dtype))

    # Counted per statistic and in int32: ones summed in float32 stop at 2^24.
    counted = _count(x, reduction_axes, mask)
    value_sum, count = total(valid(x), tf.cast(counted, x.dtype))
    divisor = tf.maximum(count, 1)

    shift = tf.stop_gradient(value_sum / divisor)
    centered = valid(x - shift)
    centered_sum, square_sum = total(centered, tf.square(centered))
    correction = centered_sum / divisor
    # The difference of the two is positive but for rounding where the variance is 0.
    variance = tf.maximum(square_sum / divisor - tf.square(correction), 0)
    return shift + correction, variance, tf.broadcast_to(count, tf.shape(shift))


def _count(x: tf.Tensor, reduction_axes: Sequence[int], mask: tf.Tensor | None) -> tf.Tensor:
    """The number of values behind each statistic, reduced axes kept as 1."""
    if mask is None:
        sizes = tf.gather(tf.shape(x), list(reduction_axes))
        return tf.reshape(tf.reduce_prod(sizes), [1] * x.shape.rank)
    covered = tf.broadcast_to(mask, _broadcast_shape(x, reduction_axes, mask))
    return tf.reduce_sum(tf.cast(covered, tf.int32), reduction_axes, keepdims=True)


def _broadcast_shape(x: tf.Tensor, reduction_axes: Sequence[int], mask: tf.Tensor) -> tf.Tensor:
    """The shape of the mask with its reduced axes as long as those of the input.

    An axis that keeps statistics of its own stays as it is in the mask, so that a mask
    without a channel axis is not blown up to the size of the input just to be counted.
    """
    input_shape, mask_shape = tf.shape(x), tf.shape(mask)
    reduced = tf.constant([axis in reduction_axes for axis in range(x.shape.rank)])
    return tf.where(reduced, input_shape, mask_shape)
