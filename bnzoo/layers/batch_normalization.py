"""Batch Normalization (Ioffe & Szegedy 2015), exact to the paper and drop-in for Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from bnzoo.checks import check_number

from . import fused
from .axes import as_axis, resolve_axes
from .kernel_or_equations import CUDNN_MIN_EPSILON, pays
from .moments import moments
from .real_inputs import as_floating


@keras.saving.register_keras_serializable(package="bnzoo")
class BatchNormalization(keras.layers.BatchNormalization):
    """Normalizes each activation by the mean and variance of the mini-batch.

    **Training** (`training=True`), over the m values of one channel in the batch:

        mean     = sum(x) / m
        variance = sum((x - mean)^2) / m                      (biased)
        y        = gamma * (x - mean) / sqrt(variance + epsilon) + beta

    **Inference**, an affine map of each value on its own:

        y = gamma * (x - moving_mean) / sqrt(moving_variance + epsilon) + beta

    **Moving statistics**, updated at each training call, with the unbiased variance of
    Algorithm 2; m counts all values of the channel, m*p*q for maps of p x q:

        moving_mean     = momentum * moving_mean     + (1 - momentum) * mean
        moving_variance = momentum * moving_variance + (1 - momentum) * variance * m / (m - 1)

    With one value per channel the output is beta, the mean moves and the variance stays;
    with none, nothing moves. Under `tf.distribute` each replica moves statistics of its
    own; their mean over the replicas is the one value that inference, saving and reading
    see.

    **Freezing**: with `layer.trainable = False` the layer runs in inference mode also for
    `training=True`, and its moving statistics stay.

    It takes the place of `keras.layers.BatchNormalization` (of which it is a subclass, so
    that an `isinstance` check finds it): the same arguments, defaults, weights and mask.
    Statistics and the arithmetic are float32 or wider under every dtype policy.

    Args:
        axis: The axis that keeps statistics of its own, usually that of the channels; or
            a tuple of axes. `axis=(1, 2, 3)` normalizes each activation of an image on
            its own ("non-convolutional", Section 4.2.3), and needs static sizes.
        momentum: Weight of the old moving statistics, in [0, 1]; or None for the plain
            average over all batches seen, for which the layer keeps one more weight,
            `batches_seen`.
        epsilon: Added to the variance, inside the root; not negative.
        center: Whether to add beta.
        scale: Whether to multiply by gamma.
        beta_initializer: Initializer of beta.
        gamma_initializer: Initializer of gamma.
        moving_mean_initializer: Initializer of the moving mean.
        moving_variance_initializer: Initializer of the moving variance.
        beta_regularizer: Regularizer of beta, none by default.
        gamma_regularizer: Regularizer of gamma, none by default.
        beta_constraint: Constraint of beta, none by default.
        gamma_constraint: Constraint of gamma, none by default.
        renorm: Only False. Batch Renormalization is another paper's.
        renorm_clipping: Not used; in the place that it has in Keras.
        renorm_momentum: Not used; in the place that it has in Keras.
        synchronized: Whether to normalize by the statistics of the global batch, over all
            replicas, when trained under `tf.distribute`.
        **kwargs: Those of `keras.layers.Layer`: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: Tensor of rank 2 or more.
        training: Whether to use the statistics of the batch, and move the others.
        mask: None, or a boolean tensor of the shape of `inputs` without the last axis, as
            Keras' layers pass it on, whatever `axis` is; an axis of it may be 1. Where that
            does not fit, one without the channel axis (of a tuple, the last). Only values
            where it is True enter the statistics.

    Raises:
        ValueError: For an axis out of range, repeated or naming the batch; a momentum
            outside [0, 1]; a negative epsilon; one of them that is no number;
            `renorm=True`; a kept axis of unknown size; inputs that are no real numbers, or
            whose channels are not those that the layer was built for; a mask of another
            shape.

    Source:
        Ioffe & Szegedy 2015, Algorithms 1 and 2, Sections 3.1 and 3.2.

    Example:
        >>> import numpy as np
        >>> layer = BatchNormalization(momentum=0.0)
        >>> y = layer(np.array([[1.0], [2.0], [3.0], [4.0]]), training=True)
        >>> [round(float(v), 4) for v in (y[0, 0], layer.moving_mean[0], layer.moving_variance[0])]
        [-1.3411, 2.5, 1.6667]
    """

    def __init__(
        self,
        axis: int | Sequence[int] = -1,
        momentum: float | None = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        moving_mean_initializer: Any = "zeros",
        moving_variance_initializer: Any = "ones",
        beta_regularizer: Any = None,
        gamma_regularizer: Any = None,
        beta_constraint: Any = None,
        gamma_constraint: Any = None,
        renorm: bool = False,
        renorm_clipping: dict[str, float] | None = None,
        renorm_momentum: float = 0.99,
        synchronized: bool = False,
        **kwargs: Any,
    ) -> None:
        if renorm:
            raise ValueError(
                "`renorm` must be False: Batch Renormalization (Ioffe 2017) is another paper's "
                "layer; keras.layers.BatchNormalization has it. Received: renorm="
                f"{renorm}"
            )
        check_number("momentum", momentum, 0, 1, or_none=True)
        check_number("epsilon", epsilon, 0)
        super().__init__(
            momentum=0.0 if momentum is None else momentum,
            epsilon=float(epsilon),
            center=center,
            scale=scale,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            moving_mean_initializer=moving_mean_initializer,
            moving_variance_initializer=moving_variance_initializer,
            beta_regularizer=beta_regularizer,
            gamma_regularizer=gamma_regularizer,
            beta_constraint=beta_constraint,
            gamma_constraint=gamma_constraint,
            synchronized=synchronized,
            **kwargs,
        )
        # What Keras' own layer has no notion of.
        self.axis = as_axis(axis)
        self.momentum = None if momentum is None else float(momentum)

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Makes the weights: gamma, beta, moving_mean, moving_variance (, batches_seen)."""
        sizes = resolve_axes(self.axis, input_shape)
        self._axes = list(sizes)
        self._reduction_axes = [a for a in range(len(input_shape)) if a not in sizes]
        shape = tuple(sizes.values())
        if self.scale:
            self.gamma = self.add_weight(
                name="gamma",
                shape=shape,
                initializer=self.gamma_initializer,
                regularizer=self.gamma_regularizer,
                constraint=self.gamma_constraint,
                autocast=False,
            )
        if self.center:
            self.beta = self.add_weight(
                name="beta",
                shape=shape,
                initializer=self.beta_initializer,
                regularizer=self.beta_regularizer,
                constraint=self.beta_constraint,
                autocast=False,
            )
        self.moving_mean = self._add_statistic("moving_mean", shape, self.moving_mean_initializer)
        self.moving_variance = self._add_statistic(
            "moving_variance", shape, self.moving_variance_initializer
        )
        if self.momentum is None:
            # Apart for the mean and the variance: a batch of one value moves only the mean.
            # Per statistic: under a mask, some may have had no value.
            self.batches_seen = self._add_statistic(
                "batches_seen", (2, *shape), keras.initializers.Zeros()
            )
        self.input_spec = keras.layers.InputSpec(ndim=len(input_shape), axes=sizes)

    def _add_statistic(
        self, name: str, shape: tuple[int, ...], initializer: keras.initializers.Initializer
    ) -> keras.Variable:
        """A weight that each replica moves on its own and that reads as the mean of all.

        `Layer.add_weight` has no `synchronization`; a variable set as an attribute becomes
        a weight of the layer all the same.
        """
        return keras.Variable(
            initializer,
            shape=shape,
            dtype=keras.backend.result_type(self.variable_dtype, "float32"),
            trainable=False,
            autocast=False,
            aggregation="mean",
            synchronization="on_read",
            name=name,
        )

    # Autograph has nothing to convert here and would only slow down tracing.
    @tf.autograph.experimental.do_not_convert
    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Normalizes `inputs`; see the class."""
        x = tf.convert_to_tensor(inputs)  # Outside of __call__ it may be a NumPy array.
        x = as_floating(x, keras.backend.result_type(self.compute_dtype, "float32"))
        mask = None if mask is None else self._expand_mask(mask, x)
        if training and self.trainable:
            y = self._normalize_by_batch(x, mask)
        else:
            y = self._normalize_by_population(x)
        return tf.cast(y, self.compute_dtype)

    def _normalize_by_batch(self, x: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
        across_replicas = self.synchronized and _replicas() > 1
        if mask is None and not across_replicas and fused.can_fuse(x, self._axes):
            gamma, beta = self._affine(tf.float32)
            y, mean, unbiased, count = fused.batch_norm(x, gamma, beta, self.epsilon, self._axes)
        else:
            x = _widen(x)
            mean, variance, count = moments(x, self._reduction_axes, mask, self.synchronized)
            y = self._normalize(x, mean, variance)
            unbiased = variance * (count / tf.maximum(count - 1, 1))
            shape = self.moving_mean.shape
            mean, unbiased, count = (
                tf.stop_gradient(fused.reshaped_to(shape, value))
                for value in (mean, unbiased, count)
            )
        self._move_statistics(mean, unbiased, count)
        return y

    def _normalize_by_population(self, x: tf.Tensor) -> tf.Tensor:
        mean, variance = self._population_statistics()
        accepted = fused.can_fuse(x, self._axes) and self.epsilon >= CUDNN_MIN_EPSILON
        if accepted and pays(x):
            gamma, beta = self._affine(tf.float32)
            mean, variance = tf.cast(mean, tf.float32), tf.cast(variance, tf.float32)
            return fused.batch_norm_inference(
                x, gamma, beta, mean, variance, self.epsilon, self._axes
            )
        x = _widen(x)
        return self._normalize(x, tf.cast(mean, x.dtype), tf.cast(variance, x.dtype))

    def _normalize(self, x: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> tf.Tensor:
        """`gamma * (x - mean) / sqrt(variance + epsilon) + beta`, written out."""
        shape = [x.shape[axis] if axis in self._axes else 1 for axis in range(x.shape.rank)]
        gamma, beta, mean, variance = (
            tf.reshape(value, shape) for value in (*self._affine(x.dtype), mean, variance)
        )
        return (x - mean) * (tf.math.rsqrt(variance + self.epsilon) * gamma) + beta

    def _affine(self, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """Gamma and beta, or what stands for them where the layer has none."""
        shape = self.moving_mean.shape
        gamma = tf.ones(shape, dtype) if self.gamma is None else tf.cast(self.gamma, dtype)
        beta = tf.zeros(shape, dtype) if self.beta is None else tf.cast(self.beta, dtype)
        return gamma, beta

    def _expand_mask(self, mask: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        mask = tf.cast(mask, tf.bool)
        sizes = x.shape.as_list()
        for axis in (len(sizes) - 1, self._axes[-1]):
            rest = [*sizes[:axis], *sizes[axis + 1 :]]
            if mask.shape.rank == len(rest) and all(
                one in (1, None) or size in (one, None)
                for one, size in zip(mask.shape, rest, strict=True)
            ):
                return tf.expand_dims(mask, axis)
        raise ValueError(
            "`mask` must have the shape of the inputs without the last axis, or without the "
            f"channel axis. Received: mask of shape {mask.shape} for inputs of shape {x.shape}"
        )

    def _population_statistics(self) -> list[tf.Tensor]:
        """The moving mean and variance: in a replica, those that all replicas agree on."""
        statistics = [tf.convert_to_tensor(v) for v in (self.moving_mean, self.moving_variance)]
        if _replicas() == 1:
            return statistics
        context = tf.distribute.get_replica_context()
        # In a graph what is read of a variable has no device, and with one replica in each of
        # several processes the sum would have no place to go to.
        placed = [tf.identity(value) for value in statistics]
        try:
            return context.all_reduce(tf.distribute.ReduceOp.MEAN, placed)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name!r}, not trained here, needs the moving statistics of all replicas, "
                "which TensorFlow cannot give in a tf.function, tf.cond or loop inside of what a "
                "replica runs: call it outside of that"
            ) from error

    def _move_statistics(self, mean: tf.Tensor, unbiased: tf.Tensor, count: tf.Tensor) -> None:
        """Moves the statistics towards those of a batch; see the class.

        Args:
            mean: of the shape of the statistics.
            unbiased: Algorithm 2's variance.
            count: the values behind each statistic, one number if it is the same for all.
        """
        shape, dtype = self.moving_mean.shape, self.moving_mean.value.dtype
        mean, unbiased = tf.cast(mean, dtype), tf.cast(unbiased, dtype)
        # What the mean and the variance can be known from: one value, and two.
        number = tf.get_static_value(count)
        known = [
            tf.cast(count > least, dtype) if number is None else (number > least).astype(dtype.name)
            for least in (0, 1)
        ]
        if self.momentum is None:
            seen = tf.stack([tf.broadcast_to(value, shape) for value in known])
            _subtract(self.batches_seen, -seen)
            rates = tf.unstack(seen / tf.maximum(tf.convert_to_tensor(self.batches_seen), 1))
        else:
            rates = [value * (1 - self.momentum) for value in known]
        for variable, batch, rate in (
            (self.moving_mean, mean, rates[0]),
            (self.moving_variance, unbiased, rates[1]),
        ):
            moving = tf.convert_to_tensor(variable)
            # Where the rate is 0 the statistic of the batch may be NaN.
            change = tf.math.multiply_no_nan(moving - batch, rate)
            _subtract(variable, change)
            if not self.momentum:
                # At a rate of 1 the old value is to vanish, but next to a small new one the
                # rounding of the subtraction stays: from 1 to 1e-8 would give 0.
                rest = (moving - change) - batch
                _subtract(variable, tf.math.multiply_no_nan(rest, tf.floor(rate)))

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """The shape of the inputs."""
        resolve_axes(self.axis, input_shape)
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {**super().get_config(), "axis": self.axis, "momentum": self.momentum}


def _subtract(variable: keras.Variable, change: tf.Tensor) -> None:
    """`variable -= change`, atomically where the variable is one of TensorFlow's.

    `keras.Variable.assign_sub` reads, subtracts and writes: of two workers that do so at
    the same time on a parameter server, one is lost.
    """
    value = variable.value
    if isinstance(value, tf.Variable):
        value.assign_sub(change)
    else:  # In a keras.StatelessScope it is a tensor, and the scope notes the new one.
        variable.assign(value - change)


def _replicas() -> int:
    """In how many replicas of `tf.distribute` the layer is being called."""
    context = tf.distribute.get_replica_context()
    return 1 if context is None else context.num_replicas_in_sync


def _widen(x: tf.Tensor) -> tf.Tensor:
    """Float32, or float64 if it was that: no moments in half precision."""
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
