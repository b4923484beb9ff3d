"""Algorithm 1 on rank 4, by TensorFlow's kernel or by the equations, chosen where the graph runs.

Compiled by XLA the kernel takes the variance as E[x^2] - E[x]^2, which is negative for a mean of
1000 and a standard deviation of 1. Whether a graph is going to be compiled is not known when it is
traced (`jit_compile` may be set on any function around it), so the choice has to be in the graph:
the op `DeviceIndex` gives the place of the device that it runs on in a list of names, and the
length of that list when XLA compiles it. It is a constant in either case: TensorFlow's runtime
takes one branch without touching the data (and without a copy from the GPU), XLA removes the
other at compile time.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from .graph_gradients import custom_gradient
from .moments import moments

# The least epsilon that cuDNN takes is 1e-5 as a double; 1e-5 as the op's float32 attribute
# is a little less than that.
CUDNN_MIN_EPSILON = 1.001e-5

# Calling oneDNN's kernel costs about 0.1 ms, as much as the equations written out on this many
# values (measured on x86 with 2 cores, docs/results/layers.md).
KERNEL_MIN_VALUES = 100_000

_OF_GRAPHS: weakref.WeakKeyDictionary[tf.Graph, dict] = weakref.WeakKeyDictionary()
"""What `_of_any_shape` made, by its arguments."""


class Use(NamedTuple):
    """How the kernel is called."""

    epsilon: float
    data_format: str

    @property
    def reduction_axes(self) -> list[int]:
        return [0, 1, 2] if self.data_format == "NHWC" else [0, 2, 3]


class _Pair(NamedTuple):
    """Two ways to the same values: from tensors of any shape and a `Use`."""

    kernel: Callable[..., tuple[tf.Tensor, ...]]
    equations: Callable[..., tuple[tf.Tensor, ...]]


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


def batch_norm_of_rank_4(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, use: Use
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """`fused.batch_norm` for what the kernel takes: `(y, mean, unbiased variance)`.

    Args:
        x: of rank 4, the channels as in `use.data_format`.
        gamma: of rank 1.
        beta: of rank 1.
        use: epsilon and layout.
    """
    if tf.executing_eagerly():
        # The device is known, and XLA is not in play.
        refused_by_cudnn = use.epsilon < CUDNN_MIN_EPSILON and "CPU" not in x.device
        function = _written_out if refused_by_cudnn else _fused
        y, mean, unbiased, *_ = function(x, gamma, beta, use=use)
        return y, mean, unbiased

    by_choice = pays(x)
    # Asked for once: XLA may compile the forward pass and not the backward pass, and the equations
    # leave nothing that the kernel's gradient could go on from.
    takes_kernel = _takes_kernel(x, use) if by_choice else None

    # Gradients are written here, since those of the choice would keep the intermediates of both
    # branches; so only the kernel's own residuals stay.
    @custom_gradient
    def forward(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple:
        function = functools.partial(_choose, _FORWARD, takes_kernel) if by_choice else _written_out
        y, mean, unbiased, *others = function(x, gamma, beta, use=use)
        # How they depend on `x` is known to `of_gradient`; no gradient may pass through the choice.
        residuals = [tf.stop_gradient(residual) for residual in others]

        def backward(dy: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            if by_choice:
                return gradient(dy, x, gamma, *residuals)
            # Plain operations, which need no other gradient.
            return _written_out_gradient(dy, x, gamma, use=use)

        return (y, mean, unbiased), backward

    @custom_gradient
    def gradient(dy: tf.Tensor, x: tf.Tensor, gamma: tf.Tensor, *residuals: tf.Tensor) -> tuple:
        # These may be tensors of the graph of the forward pass, which a third one cannot reach.
        sources = tf.identity_n([dy, x, gamma])

        def of_gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
            # From the equations, which know how the residuals depend on `x`.
            with tf.GradientTape() as tape:
                tape.watch(sources)
                results = _written_out_gradient(*sources, use=use)
            return [*tape.gradient(results, sources, upstream), *[None] * len(residuals)]

        return _choose(_BACKWARD, takes_kernel, *sources, *residuals, use=use), of_gradient

    return forward(x, gamma, beta)


def _takes_kernel(x: tf.Tensor, use: Use) -> tf.Tensor:
    """Whether the kernel is right for `x`, and pays, where the graph runs (see the top)."""
    devices = ["CPU"] if use.epsilon < CUDNN_MIN_EPSILON else ["CPU", "GPU"]
    index = tf.raw_ops.DeviceIndex(device_names=devices)
    takes_kernel = index < len(devices)
    if x.shape.num_elements() is None:
        takes_kernel &= (index > 0) | (tf.size(x, tf.int64) >= KERNEL_MIN_VALUES)
    return takes_kernel


def _choose(
    pair: _Pair, takes_kernel: tf.Tensor, *arguments: tf.Tensor, use: Use
) -> Sequence[tf.Tensor]:
    """Takes the kernel or the equations where the graph runs.

    Args:
        pair: the two.
        takes_kernel: which of them.
        arguments: tensors; the first has the shape of the input, as has the first result. The next
            two results have a value for each channel.
        use: what the two are told besides.
    """
    values = arguments[0]
    # Not tf.cond: a network has dozens of layers, and two more functions for each, forward and
    # backward, take as long to trace as all the rest of it.
    kernel, equations = (
        _of_any_shape(function, use).get_concrete_function(
            *(tf.TensorSpec(_of_rank(t.shape.rank), t.dtype) for t in arguments)
        )
        for function in pair
    )
    results = tf.raw_ops.StatelessIf(
        cond=takes_kernel,
        input=arguments,
        Tout=[result.dtype for result in kernel.outputs],
        then_branch=kernel,
        else_branch=equations,
    )
    # So tf.cond marks what it makes, to have it a part of the graph that the executor sees, and
    # not a call. There is no public name for it.
    mark = tf.compat.v1.AttrValue(b=True)
    results[0].op._set_attr("_lower_using_switch_merge", mark)
    # Gradients of unknown shape are not packed together by tf.distribute, for one.
    results[0].set_shape(values.shape)
    for of_channels in results[1:3]:
        of_channels.set_shape([values.shape[-1 if use.data_format == "NHWC" else 1]])
    return results


def _of_rank(rank: int | None) -> list[None] | None:
    return None if rank is None else [None] * rank


def _of_any_shape(
    function: Callable[..., tuple[tf.Tensor, ...]], use: Use
) -> tf.types.experimental.PolymorphicFunction:
    """`function` for all layers of the graph that is being traced.

    Not of the program: where TensorFlow freezes a graph, it takes away the functions it has.
    """
    made = _OF_GRAPHS.setdefault(tf.compat.v1.get_default_graph(), {})
    if (function, use) not in made:
        # The equations are seldom taken but under XLA, to which this means nothing: optimizing them
        # as a part of the graph, in each layer, would be most of the start-up time.
        rare = function in (_FORWARD.equations, _BACKWARD.equations)
        made[function, use] = tf.function(
            functools.partial(function, use=use),
            autograph=False,
            experimental_attributes={"_noinline": True} if rare else None,
        )
    return made[function, use]


def _fused(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, *, use: Use) -> tuple[tf.Tensor, ...]:
    """`(y, mean, unbiased variance)` and what the kernel's gradient asks for."""
    empty = tf.zeros([0])
    out = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=gamma,
        offset=beta,
        mean=empty,
        variance=empty,
        epsilon=use.epsilon,
        is_training=True,
        data_format=use.data_format,
    )
    residuals = (out.reserve_space_1, out.reserve_space_2, out.reserve_space_3)
    return out.y, out.batch_mean, out.batch_variance, *residuals


def _fused_gradient(
    dy: tf.Tensor, x: tf.Tensor, gamma: tf.Tensor, *residuals: tf.Tensor, use: Use
) -> tuple[tf.Tensor, ...]:
    out = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=dy,
        x=x,
        scale=gamma,
        reserve_space_1=residuals[0],
        reserve_space_2=residuals[1],
        reserve_space_3=residuals[2],
        epsilon=use.epsilon,
        is_training=True,
        data_format=use.data_format,
    )
    return out.x_backprop, out.scale_backprop, out.offset_backprop


def _written_out(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, *, use: Use
) -> tuple[tf.Tensor, ...]:
    """The same as `_fused` from the equations, in float32, two-pass."""
    wide = tf.cast(x, tf.float32)
    mean, variance, count = moments(wide, use.reduction_axes)
    gamma, beta = tf.reshape(gamma, tf.shape(mean)), tf.reshape(beta, tf.shape(mean))
    y = (wide - mean) * (tf.math.rsqrt(variance + use.epsilon) * gamma) + beta
    unbiased = variance * count / tf.maximum(count - 1, 1)
    flat_mean, flat_unbiased = tf.reshape(mean, [-1]), tf.reshape(unbiased, [-1])
    # Its gradient needs no residuals, but both branches of a choice return values alike: under
    # XLA those of the kernel have these shapes.
    unused = tf.zeros_like(flat_mean)
    return tf.cast(y, x.dtype), flat_mean, flat_unbiased, unused, unused, tf.zeros([0])


def _written_out_gradient(
    dy: tf.Tensor, x: tf.Tensor, gamma: tf.Tensor, *residuals: tf.Tensor, use: Use
) -> tuple[tf.Tensor, ...]:
    """Section 3's gradients, simplified.

    The statistics are taken from `x` again and not kept from the forward pass as `residuals`, so
    that the gradient of this gradient sees how they depend on `x`. XLA finds that it has them.
    """
    wide, dy_wide = tf.cast(x, tf.float32), tf.cast(dy, tf.float32)
    mean, variance, count = moments(wide, use.reduction_axes)
    inverse = tf.math.rsqrt(variance + use.epsilon)
    normalized = (wide - mean) * inverse
    dbeta = tf.reduce_sum(dy_wide, use.reduction_axes, keepdims=True)
    dgamma = tf.reduce_sum(dy_wide * normalized, use.reduction_axes, keepdims=True)
    mean_terms = (dbeta + normalized * dgamma) / tf.maximum(count, 1)
    dx = tf.reshape(gamma, tf.shape(mean)) * inverse * (dy_wide - mean_terms)
    flat = [tf.reshape(value, [-1]) for value in (dgamma, dbeta)]
    return tf.cast(dx, x.dtype), *flat


_FORWARD = _Pair(_fused, _written_out)
_BACKWARD = _Pair(_fused_gradient, _written_out_gradient)
