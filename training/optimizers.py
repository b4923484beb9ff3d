"""SGD with momentum, its learning rate, and the L2 weight of the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from .atomic_optimizer import AtomicSGD
from .settings import Settings

# The attributes in which Keras' layers hold weights that multiply their input. Gamma, beta,
# biases and the slopes of PReLU go by other names, and are never decayed.
_KERNELS = ("kernel", "depthwise_kernel", "pointwise_kernel")


def learning_rate_schedule(
    settings: Settings, examples: int
) -> keras.optimizers.schedules.LearningRateSchedule:
    """The learning rate of each step, counted from 0.

    "exponential": rate(step) = learning_rate * decay_rate^(step / decay_steps); as a staircase the
    exponent is rounded down.

    "steps": rate(step) = learning_rate * decay_rate^(number of boundaries passed), of which one of
    e epochs is passed when e * examples have been trained on.

    Args:
        settings: has `learning_rate`, `learning_rate_schedule`, `decay_rate`, `decay_epochs`,
            `staircase`, `boundaries` and `batch_size`.
        examples: how many there are in one epoch.
    """
    epoch = examples / settings.batch_size
    if settings.learning_rate_schedule == "steps":
        # Keras keeps a rate up to its boundary, that step included.
        last_steps = [math.ceil(boundary * epoch) - 1 for boundary in settings.boundaries]
        rates = [
            settings.learning_rate * settings.decay_rate**passed
            for passed in range(len(last_steps) + 1)
        ]
        return keras.optimizers.schedules.PiecewiseConstantDecay(last_steps, rates)
    decay_steps = settings.decay_epochs * epoch
    return keras.optimizers.schedules.ExponentialDecay(
        settings.learning_rate, decay_steps, settings.decay_rate, staircase=settings.staircase
    )


def build_optimizer(
    settings: Settings, examples: int, atomic: bool = False
) -> keras.optimizers.Optimizer:
    """SGD with momentum; under mixed_float16 with a dynamic scale of the loss.

    Args:
        settings: those of the run.
        examples: how many there are in one epoch.
        atomic: whether several workers update the same variables at a time.
    """
    kind = AtomicSGD if atomic else keras.optimizers.SGD
    optimizer = kind(learning_rate_schedule(settings, examples), momentum=settings.momentum)
    if settings.precision == "mixed_float16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def kernels(model: keras.Model) -> list[keras.Variable]:
    """The variables of `model` that L2 applies to, each once.

    They are told by which attribute of which layer they are, not by their names, so the answer is
    the same for a model that was saved and loaded, renamed or nested.
    """
    found: dict[int, keras.Variable] = {}
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            candidates = kernels(layer)
        else:
            candidates = [getattr(layer, name, None) for name in _KERNELS]
        for variable in candidates:
            if isinstance(variable, keras.Variable) and variable.trainable:
                found[id(variable)] = variable
    return list(found.values())


def clipped(
    gradients: Sequence[tf.Tensor], norm: tf.Tensor, limit: float | None
) -> list[tf.Tensor]:
    """min(1, limit / norm) * gradient, for each gradient; as they are if `limit` is None.

    Args:
        gradients: those of all variables.
        norm: the L2 norm of the gradients of the global batch, over all variables together. Where
            it is not finite they stay as they are: so the scale of the loss sees that they
            overflowed.
        limit: of the norm.
    """
    if limit is None:
        return list(gradients)
    factor = tf.where(tf.math.is_finite(norm), limit / tf.maximum(norm, limit), 1.0)
    return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]


def l2_loss(variables: list[keras.Variable], weight: float) -> tf.Tensor:
    """(weight / 2) * sum ||w||^2, whose gradient is weight * w."""
    if not variables or not weight:
        return tf.constant(0.0)
    return weight * tf.add_n([tf.nn.l2_loss(tf.cast(v.value, tf.float32)) for v in variables])
