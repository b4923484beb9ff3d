"""The training step: what a replica computes of its part of the batch, and several in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from bnzoo import models

from .averaging import WeightAverages
from .metrics import in_top
from .optimizers import clipped, kernels, l2_loss
from .strategies import Devices, sum_over_processes

# In a replica, from its part of the batch to its parts of what is summed over all replicas: the
# loss, the fraction of right answers, and the norm of the gradients.
TrainStep = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor, tf.Tensor]]
# From an iterator of batches and a number of steps: each step's loss, fraction of right answers,
# learning rate and norm of the gradients.
TrainSteps = Callable[[Iterator[Any], tf.Tensor], tuple[tf.Tensor, ...]]


def make_train_step(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    batch_size: int,
    weight_decay: float,
    clip_norm: float | None = None,
    averages: WeightAverages | None = None,
    replicas: int = 1,
) -> TrainStep:
    """The step of one replica, which changes the weights by what all replicas found.

    What is minimised is the sum over the replicas of their parts: the cross-entropies of a
    replica's examples over the size of the global batch, however many they are, and of L2 one
    replica's share.

    Args:
        model: built; its output is class probabilities, or a dict of them with auxiliary heads.
        optimizer: built on the model's trainable variables.
        batch_size: examples in a batch, over all replicas.
        weight_decay: L2 weight of the kernels.
        clip_norm: limit of the norm of the gradients, if there is one.
        averages: those of the weights, if they are kept.
        replicas: how many there are.
    """
    decayed = kernels(model)
    trained = model.trainable_variables
    weights: Mapping[str, float] = {"predictions": 1.0}
    if isinstance(model.output, dict):
        weights = models.auxiliary_loss_weights(model)
    if replicas > 1:
        _take_sums(optimizer)

    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = model(images, training=True)
            if not isinstance(outputs, dict):
                outputs = {"predictions": outputs}
            losses = {
                # Keras takes it from the logits that the softmax was computed from.
                name: tf.nn.compute_average_loss(
                    keras.losses.sparse_categorical_crossentropy(labels, outputs[name]),
                    global_batch_size=batch_size,
                )
                for name in weights
            }
            weighted = tf.add_n([weight * losses[name] for name, weight in weights.items()])
            decay = l2_loss(decayed, weight_decay) / replicas
            minimised = optimizer.scale_loss(weighted + decay)
        gradients = tape.gradient(minimised, trained)
        if replicas > 1:
            # Before they are clipped, or looked at for an overflow: all replicas do the same.
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        norm = tf.linalg.global_norm(gradients) / optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply(clipped(gradients, norm, clip_norm), trained)
        if averages is not None:
            averages.update(tf.convert_to_tensor(optimizer.iterations))
        hits = tf.cast(in_top(outputs["predictions"], labels, 1), tf.float32)
        return losses["predictions"], tf.reduce_sum(hits) / batch_size, norm / replicas

    return train_step


def make_train_steps(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    step: tf.Variable,
    batch_size: int,
    weight_decay: float,
    clip_norm: float | None = None,
    averages: WeightAverages | None = None,
    devices: Devices | None = None,
) -> TrainSteps:
    """The compiled function that trains `model`, several steps a call, on all replicas in step.

    The loss that is reported is the mean cross-entropy of the top over the batch; the auxiliary
    heads' and L2 are added to what is minimised.

    Args:
        step: int64; counts the steps.
        devices: what computes; by default one device.

        The others are those of `make_train_step`.
    """
    place = devices or Devices(tf.distribute.get_strategy())
    train_step = make_train_step(
        model, optimizer, batch_size, weight_decay, clip_norm, averages, place.replicas
    )

    def stacked(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return tf.stack(train_step(images, labels))

    @tf.function
    def train_steps(batches: Iterator[Any], count: tf.Tensor) -> tuple[tf.Tensor, ...]:
        rows = tf.TensorArray(tf.float32, size=count)
        rates = tf.TensorArray(tf.float32, size=count)
        for index in tf.range(count):
            rates = rates.write(index, tf.convert_to_tensor(optimizer.learning_rate))
            parts = place.strategy.run(stacked, args=next(batches))
            local = tf.add_n(place.strategy.experimental_local_results(parts))
            rows = rows.write(index, local)
            step.assign_add(1)
        # Over the processes once a call: nothing in a step waits for what is only reported.
        losses, accuracies, norms = tf.unstack(sum_over_processes(place, rows.stack()), axis=1)
        return losses, accuracies, rates.stack(), norms

    return train_steps


def _take_sums(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets `optimizer` take gradients that are summed over the replicas already.

    Keras sums what its `apply` is given over the replicas, after each has clipped its own part
    and looked at it for overflows. It has no public way to be given the sums.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    inner._all_reduce_sum_gradients = lambda gradients_and_variables: gradients_and_variables
