"""Checkpoints: everything that a run needs to go on as if it had never stopped."""

from __future__ import annotations

import os

import keras
import tensorflow as tf

KEPT = 3


class Checkpoints:
    """The checkpoints of one run, made by tf.train.CheckpointManager, numbered by their step.

    A checkpoint has the step, which is the position in the input too (`data.training_batches`);
    all variables of the model, among them the moving statistics and the state of each random
    number generator; those of the optimizer, with its momentum and scale of the loss; and the
    sums of the metrics since the last row of metrics.csv.

    Args:
        folder: where they are.
        model: built.
        optimizer: built on the model's trainable variables.
        step: int64, how many steps are done.
        sums: the sums of the metrics.
    """

    def __init__(
        self,
        folder: str,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        step: tf.Variable,
        sums: tf.Variable,
    ) -> None:
        self._step = step
        self._model = model
        # The variables themselves, in the order of their creation: nothing that Keras keeps in
        # them can be left out, whatever it hangs in its tree of objects.
        self._checkpoint = tf.train.Checkpoint(
            model=[variable.value for variable in model.variables],
            optimizer=[variable.value for variable in optimizer.variables],
            step=step,
            sums=sums,
        )
        self._manager = tf.train.CheckpointManager(self._checkpoint, folder, max_to_keep=KEPT)

    def restore(self) -> int:
        """Restores the newest checkpoint, if there is one, and returns its step, else 0."""
        newest = self._manager.latest_checkpoint
        if newest is None:
            return 0
        self._checkpoint.restore(newest).assert_consumed()
        return int(self._step.numpy())

    def save(self) -> None:
        """Saves the state of now. TensorFlow writes it aside and renames it."""
        self._manager.save(checkpoint_number=int(self._step.numpy()))

    def all_finite(self) -> bool:
        """Whether each weight and statistic of the model is a finite number."""
        return all(
            bool(tf.reduce_all(tf.math.is_finite(variable.value)))
            for variable in self._model.variables
            if variable.value.dtype.is_floating
        )

    @property
    def newest(self) -> str | None:
        """The newest checkpoint's name, or None."""
        path = self._manager.latest_checkpoint
        return None if path is None else os.path.basename(path)
