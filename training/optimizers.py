"""SGD with momentum, its learning rate, and the L2 weight of the kernels."""

from __future__ import annotations

import keras
import tensorflow as tf

from .settings import Settings

# The attributes in which Keras' layers hold weights that multiply their input. Gamma, beta,
# biases and the slopes of PReLU go by other names, and are never decayed.
_KERNELS = ("kernel", "depthwise_kernel", "pointwise_kernel")


def learning_rate_schedule(
    settings: Settings, examples: int
) -> keras.optimizers.schedules.LearningRateSchedule:
    """Exponential decay, rate(step) = learning_rate * decay_rate^(step / decay_steps).

    As a staircase the exponent is rounded down.

    Args:
        settings: has `learning_rate`, `decay_rate`, `decay_epochs`, `staircase` and `batch_size`.
        examples: how many there are in one epoch.
    """
    decay_steps = settings.decay_epochs * examples / settings.batch_size
    return keras.optimizers.schedules.ExponentialDecay(
        settings.learning_rate, decay_steps, settings.decay_rate, staircase=settings.staircase
    )


def build_optimizer(settings: Settings, examples: int) -> keras.optimizers.Optimizer:
    """SGD with momentum; under mixed_float16 with a dynamic scale of the loss.

    Args:
        settings: those of the run.
        examples: how many there are in one epoch.
    """
    optimizer = keras.optimizers.SGD(
        learning_rate_schedule(settings, examples), momentum=settings.momentum
    )
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


def l2_loss(variables: list[keras.Variable], weight: float) -> tf.Tensor:
    """(weight / 2) * sum ||w||^2, whose gradient is weight * w."""
    if not variables or not weight:
        return tf.constant(0.0)
    return weight * tf.add_n([tf.nn.l2_loss(tf.cast(v.value, tf.float32)) for v in variables])
