"""Parametric rectifier: a leaky ReLU whose slopes are learned."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bnzoo.checks import check_number

from .axes import as_axis, positive_axes
from .graph_gradients import custom_gradient
from .real_inputs import as_floating


@keras.saving.register_keras_serializable(package="bnzoo")
class PReLU(keras.layers.Layer):
    """Parametric Rectified Linear Unit (He et al. 2015, Section 2.1, Eq. 1).

    The layer computes

        f(y) = max(0, y) + alpha * min(0, y)

    with one slope `alpha` for each channel ("channel-wise"), or one for all ("channel-shared").
    Its gradients are those of the paper: df/dalpha is y where y <= 0 and 0 elsewhere, summed over
    the batch and over every axis that shares a slope; df/dy is 1 where y > 0 and alpha elsewhere.

    The slopes start at 0.25 and are neither regularised nor constrained unless asked for: weight
    decay would push them to zero, i.e. to ReLU (Section 2.1). Leave `alpha` out of an optimizer's
    weight decay for the same reason.

    `alpha` has the rank of one example, with length 1 along the axes that share a slope, just as in
    `keras.layers.PReLU`: (1, 1, C) for feature maps (H, W, C), (C, 1, 1) for (C, H, W), (C,) after
    a dense layer, and length 1 along every axis when shared. Weights of
    `keras.layers.PReLU(shared_axes=[1, 2])` therefore load into `PReLU()` and back. Only the
    channels must be known when the layer is built; height and width may be None.

    Under a mixed-precision policy the output has the compute type while the gradient of `alpha` is
    summed in the type of the variable (float32), since a sum over batch and positions overflows
    float16.

    Args:
        shared: False for one slope per channel, True for one slope in the whole layer.
        alpha_initializer: a number, which all slopes start at, or any Keras initializer.
        alpha_regularizer: Keras regularizer of the slopes, or None.
        alpha_constraint: Keras constraint of the slopes, or None.
        shared_axes: the axes that share slopes, as in `keras.layers.PReLU` but also counted from
            the end: `[-3, -2]` are `[1, 2]` of a rank 4 input. `[]` gives each position a slope of
            its own, which is what `keras.layers.PReLU()` does. None follows `shared` and `axis`.
        axis: the channel axis, -1 or, for channels first, 1; or a tuple of the axes that have
            slopes of their own. Not to be given with `shared_axes`.
        **kwargs: `name`, `dtype`, `trainable` and so on, of `keras.layers.Layer`.

    Raises:
        ValueError: for `shared` that is no bool, or combined with `shared_axes`; for an
            `alpha_initializer` that is a bool, NaN or infinite; when built, for an axis that is out
            of range, repeated, or the batch axis, and for an unknown size of an axis that has
            slopes of its own.

    Example:
        >>> import bnzoo, numpy as np
        >>> layer = bnzoo.layers.PReLU()
        >>> layer(np.array([[-4.0, 8.0]])).numpy().tolist()
        [[-1.0, 8.0]]
        >>> layer.count_params()
        2
    """

    def __init__(
        self,
        shared: bool = False,
        alpha_initializer: Any = 0.25,
        alpha_regularizer: Any = None,
        alpha_constraint: Any = None,
        shared_axes: int | Sequence[int] | None = None,
        axis: int | Sequence[int] = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(shared, (bool, np.bool_)):
            raise ValueError(f"`shared` must be True or False. Received: shared={shared!r}")
        if shared_axes is not None and (shared or axis != -1):
            raise ValueError(
                "`shared_axes` must be None when `shared` or `axis` says which slopes are shared. "
                f"Received: shared_axes={shared_axes}, shared={shared}, axis={axis}"
            )
        if isinstance(alpha_initializer, (numbers.Real, np.bool_)):
            check_number("alpha_initializer", alpha_initializer)
            alpha_initializer = keras.initializers.Constant(float(alpha_initializer))
        self.shared = bool(shared)
        self.alpha_initializer = keras.initializers.get(alpha_initializer)
        self.alpha_regularizer = keras.regularizers.get(alpha_regularizer)
        self.alpha_constraint = keras.constraints.get(alpha_constraint)
        if shared_axes is not None:
            axes = as_axis(shared_axes, "shared_axes")
            shared_axes = [axes] if isinstance(axes, int) else list(axes)
        self.shared_axes = shared_axes
        self.axis = as_axis(axis)
        self.supports_masking = True

    def build(self, input_shape: Sequence[int | None]) -> None:
        rank = len(input_shape)
        if self.shared_axes is not None:
            shared = set(positive_axes(tuple(self.shared_axes), rank, "shared_axes"))
        elif self.shared:
            shared = set(range(1, rank))
        else:
            shared = set(range(1, rank)) - set(positive_axes(self.axis, rank))
        own = {axis: input_shape[axis] for axis in range(1, rank) if axis not in shared}
        for axis, size in own.items():
            if size is None:
                raise ValueError(
                    "An axis that has slopes of its own must have a known size when PReLU is "
                    f"built. Received: input_shape={tuple(input_shape)}, of which axis {axis} is "
                    "unknown"
                )
        self.alpha = self.add_weight(
            name="alpha",
            shape=[own.get(axis, 1) for axis in range(1, rank)],
            initializer=self.alpha_initializer,
            regularizer=self.alpha_regularizer,
            constraint=self.alpha_constraint,
            # The sum over positions in its gradient needs the wide type: see _prelu.
            autocast=False,
        )
        self.input_spec = keras.layers.InputSpec(ndim=rank, axes=own)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        # A slope is not a whole number.
        inputs = as_floating(inputs, self.compute_dtype)
        return _prelu(inputs, tf.convert_to_tensor(self.alpha))

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "shared": self.shared,
            "alpha_initializer": keras.initializers.serialize(self.alpha_initializer),
            "alpha_regularizer": keras.regularizers.serialize(self.alpha_regularizer),
            "alpha_constraint": keras.constraints.serialize(self.alpha_constraint),
            "shared_axes": self.shared_axes,
            "axis": self.axis,
        }


@custom_gradient
def _prelu(y: tf.Tensor, alpha: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Eq. 1 with its two gradients, keeping only `y` for the backward pass.

    Written out rather than left to autodiff for the sum of the slopes' gradient: autodiff would
    sum in the type of `y`, where float16 overflows. It also gives the paper's choice at y = 0.
    """
    slope = tf.cast(alpha, y.dtype)
    output = tf.nn.relu(y) + slope * tf.minimum(y, 0)

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        of_y = tf.where(y > 0, upstream, slope * upstream)
        wide = tf.cast(upstream, alpha.dtype) * tf.cast(tf.minimum(y, 0), alpha.dtype)
        shared = [0, *(axis + 1 for axis, size in enumerate(alpha.shape) if size == 1)]
        return of_y, tf.reshape(tf.reduce_sum(wide, axis=shared), alpha.shape)

    return output, gradient
