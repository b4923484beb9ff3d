"""TensorFlow's fused batch normalization, for any rank, and safe under XLA too.

`FusedBatchNormV3` does the work of Algorithm 1 in one kernel on CPU and GPU, several times
faster than the same equations written out. It has three limits, which this file hides:

- it knows rank 4 only, channels last or second: inputs are reshaped, which costs nothing;
- cuDNN refuses an epsilon below 1e-5;
- compiled by XLA it takes the variance as E[x^2] - E[x]^2, which is negative for a mean of
  1000 and a standard deviation of 1. Whether a graph is going to be compiled is not known
  when it is traced (`jit_compile` may be set on any function around it), so the choice has
  to be in the graph: the op `DeviceIndex` gives the place of the device that it runs on in
  a list of names, and the length of that list when XLA compiles it. It is a constant in
  either case: TensorFlow's runtime takes one branch without touching the data (and without
  a copy from the GPU), XLA removes the other at compile time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from .moments import moments

# The least epsilon that cuDNN takes is 1e-5 as a double; 1e-5 as the op's float32 attribute
# is a little less than that.
CUDNN_MIN_EPSILON = 1.001e-5

# Calling oneDNN's kernel costs about 0.1 ms, as much as the equations written out on this many
# values (measured on x86 with 2 cores, docs/results/layers.md).
KERNEL_MIN_VALUES = 100_000

_FUSED_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


class _Layout(NamedTuple):
    """How an input is seen by the kernel: as (before, channels, after)."""

    shape: list[int | tf.Tensor]
    channels: int
    data_format: str
    reduction_axes: list[int]
    """Of the reshaped input."""


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


def pays(x: tf.Tensor) -> bool:
    """Whether the kernel is worth its call, as far as the shape tells.

    It is not for small inputs in a graph on the CPU. Eagerly each op has a cost of its own, and
    on a GPU each kernel's launch, so that one op is the faster one there for any size.

    Args:
        x: The input. Of rank 2 and unknown size it counts as small: a batch of features.

    Example:
        >>> import tensorflow as tf
        >>> pays(tf.zeros([32, 1024]))  # Eagerly.
        True
    """
    if tf.executing_eagerly() or tf.config.list_physical_devices("GPU"):
        return True
    size = x.shape.num_elements()
    return x.shape.rank > 2 if size is None else size >= KERNEL_MIN_VALUES


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
        `(y, mean, variance, count)`: `y` like `x`; the mean, the biased variance and the
        number of values behind them in float32, of the shape of `gamma`. Gradients flow
        through `y` alone. With no value, mean and variance are undefined (NaN on CPU).

    Source:
        Ioffe & Szegedy 2015, Algorithm 1; gradients as in Section 3.

    Example:
        >>> import tensorflow as tf
        >>> x = tf.constant([[1.0], [2.0], [3.0], [4.0]])
        >>> y, mean, variance, count = batch_norm(x, tf.ones(1), tf.zeros(1), 1e-3, [1])
        >>> [round(float(v), 4) for v in (y[0, 0], mean[0], variance[0], count[0])]
        [-1.3411, 2.5, 1.25, 4.0]
    """
    layout = _layout(x, axes)
    reshaped = tf.reshape(x, layout.shape)
    flat_gamma, flat_beta = tf.reshape(gamma, [-1]), tf.reshape(beta, [-1])
    if tf.executing_eagerly():
        # The device is known, and XLA is not in play.
        kernel = _written_out if _refused_by_cudnn(x, epsilon) else _fused
        y, mean, unbiased, *_ = kernel(reshaped, flat_gamma, flat_beta, epsilon, layout)
    else:
        y, mean, unbiased = _batch_norm_in_graph(reshaped, flat_gamma, flat_beta, epsilon, layout)

    count = tf.cast(tf.size(x, tf.int64) // layout.channels, tf.float32)
    variance = unbiased * (count - 1) / tf.maximum(count, 1)
    statistics = (
        tf.stop_gradient(tf.reshape(value, gamma.shape))
        for value in (mean, variance, tf.fill([layout.channels], count))
    )
    return (tf.reshape(y, tf.shape(x)), *statistics)


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
        epsilon: Added to the variance; at least `CUDNN_MIN_EPSILON`.
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


def _layout(x: tf.Tensor, axes: Sequence[int]) -> _Layout:
    """Sees the input as rank 4, the kept axes as one."""
    static, dynamic = x.shape, tf.shape(x)
    first, last = axes[0], axes[-1]
    channels = static[first : last + 1].num_elements()
    if last == static.rank - 1:
        # All other sizes are static, so that -1 is well defined for an empty batch too.
        return _Layout([-1, 1, 1, channels], channels, "NHWC", [0, 1, 2])

    def product(begin: int, end: int) -> int | tf.Tensor:
        known = static[begin:end].num_elements()
        return tf.reduce_prod(dynamic[begin:end]) if known is None else known

    shape = [product(0, first), channels, 1, product(last + 1, static.rank)]
    return _Layout(shape, channels, "NCHW", [0, 2, 3])


def _refused_by_cudnn(x: tf.Tensor, epsilon: float) -> bool:
    return epsilon < CUDNN_MIN_EPSILON and "CPU" not in x.device


def _switch(
    kernel: Callable[[], tuple[tf.Tensor, ...]],
    equations: Callable[..., tuple[tf.Tensor, ...]],
    arguments: Sequence[tf.Tensor],
    epsilon: float,
    layout: _Layout,
) -> tuple[tf.Tensor, ...]:
    """Takes the kernel where it is right and pays, the equations elsewhere (see the top).

    Args:
        kernel: what the kernel gives.
        equations: what gives the same from `arguments`, the epsilon and the layout.
        arguments: tensors; the first has the size of the input.
        epsilon: added to the variance.
        layout: how the input is seen.
    """
    values = arguments[0]
    if not pays(values):
        return equations(*arguments, epsilon, layout)
    devices = ["CPU"] if epsilon < CUDNN_MIN_EPSILON else ["CPU", "GPU"]
    index = tf.raw_ops.DeviceIndex(device_names=devices)
    takes_kernel = index < len(devices)
    if values.shape.num_elements() is None:
        takes_kernel &= (index > 0) | (tf.size(values, tf.int64) >= KERNEL_MIN_VALUES)
    shared = _shared(equations, epsilon, layout.data_format)
    return tf.cond(takes_kernel, kernel, lambda: shared(*arguments))


def _batch_norm_in_graph(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float, layout: _Layout
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    # The gradient of tf.cond would keep every intermediate of both branches, of the size of
    # the input each; with the gradient written here only the kernel's own residuals stay.
    @tf.custom_gradient
    def forward(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple:
        y, mean, unbiased, *residuals = _switch(
            lambda: _fused(x, gamma, beta, epsilon, layout),
            _written_out,
            (x, gamma, beta),
            epsilon,
            layout,
        )

        def backward(dy: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return _switch(
                lambda: _fused_gradient(dy, x, gamma, residuals, epsilon, layout),
                _written_out_gradient,
                (dy, x, gamma),
                epsilon,
                layout,
            )

        return (y, mean, unbiased), backward

    return forward(x, gamma, beta)


def _fused(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float, layout: _Layout
) -> tuple[tf.Tensor, ...]:
    """`(y, mean, unbiased variance)` and what the kernel's gradient asks for."""
    empty = tf.zeros([0])
    out = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=gamma,
        offset=beta,
        mean=empty,
        variance=empty,
        epsilon=epsilon,
        is_training=True,
        data_format=layout.data_format,
    )
    residuals = (out.reserve_space_1, out.reserve_space_2, out.reserve_space_3)
    return out.y, out.batch_mean, out.batch_variance, *residuals


def _fused_gradient(
    dy: tf.Tensor,
    x: tf.Tensor,
    gamma: tf.Tensor,
    residuals: Sequence[tf.Tensor],
    epsilon: float,
    layout: _Layout,
) -> tuple[tf.Tensor, ...]:
    out = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=dy,
        x=x,
        scale=gamma,
        reserve_space_1=residuals[0],
        reserve_space_2=residuals[1],
        reserve_space_3=residuals[2],
        epsilon=epsilon,
        is_training=True,
        data_format=layout.data_format,
    )
    return out.x_backprop, out.scale_backprop, out.offset_backprop


def _written_out(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float, layout: _Layout
) -> tuple[tf.Tensor, ...]:
    """The same as `_fused` from the equations, in float32, two-pass."""
    wide = tf.cast(x, tf.float32)
    mean, variance, count = moments(wide, layout.reduction_axes)
    gamma, beta = tf.reshape(gamma, tf.shape(mean)), tf.reshape(beta, tf.shape(mean))
    y = (wide - mean) * (tf.math.rsqrt(variance + epsilon) * gamma) + beta
    unbiased = variance * count / tf.maximum(count - 1, 1)
    flat_mean, flat_unbiased = (tf.reshape(v, [layout.channels]) for v in (mean, unbiased))
    # Its gradient needs no residuals, but the branches of a tf.cond return values alike: under
    # XLA those of the kernel have these shapes.
    unused = tf.zeros_like(flat_mean)
    return tf.cast(y, x.dtype), flat_mean, flat_unbiased, unused, unused, tf.zeros([0])


@functools.cache
def _shared(
    equations: Callable[..., tuple[tf.Tensor, ...]], epsilon: float, data_format: str
) -> Callable[..., tuple[tf.Tensor, ...]]:
    """`equations` as one function of the graph for all layers and sizes.

    A network has dozens of layers, and this branch is seldom taken but under XLA: tracing it for
    each of them, and optimizing it as a part of the graph, would be most of the start-up time.
    """

    def function(*arguments: tf.Tensor) -> tuple[tf.Tensor, ...]:
        axes = [0, 1, 2] if data_format == "NHWC" else [0, 2, 3]
        return equations(*arguments, epsilon, _Layout([], -1, data_format, axes))

    return tf.function(
        function,
        autograph=False,
        reduce_retracing=True,
        experimental_attributes={"_noinline": True},
    )


def _written_out_gradient(
    dy: tf.Tensor, x: tf.Tensor, gamma: tf.Tensor, epsilon: float, layout: _Layout
) -> tuple[tf.Tensor, ...]:
    """Section 3's gradients, simplified.

    The statistics are taken from `x` again and not kept from the forward pass, so that the
    gradient of this gradient sees how they depend on `x`. XLA finds that it has them.
    """
    wide, dy_wide = tf.cast(x, tf.float32), tf.cast(dy, tf.float32)
    mean, variance, count = moments(wide, layout.reduction_axes)
    inverse = tf.math.rsqrt(variance + epsilon)
    normalized = (wide - mean) * inverse
    dbeta = tf.reduce_sum(dy_wide, layout.reduction_axes, keepdims=True)
    dgamma = tf.reduce_sum(dy_wide * normalized, layout.reduction_axes, keepdims=True)
    mean_terms = (dbeta + normalized * dgamma) / tf.maximum(count, 1)
    dx = tf.reshape(gamma, tf.shape(mean)) * inverse * (dy_wide - mean_terms)
    flat = [tf.reshape(value, [-1]) for value in (dgamma, dbeta)]
    return tf.cast(dx, x.dtype), *flat
