"""Checkpoints: everything that a run needs to go on as if it had never stopped."""

from __future__ import annotations

import os
import shutil

import keras
import tensorflow as tf

from .command_line import RunFailed
from .failures import reason
from .run_directory import cannot_write

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
        """Restores the newest checkpoint, if there is one, and returns its step, else 0.

        Raises:
            RunFailed: it is damaged, or of another network.
        """
        newest = self._manager.latest_checkpoint
        if newest is None:
            return 0
        try:
            self._checkpoint.restore(newest).assert_consumed()
        except Exception as error:
            # What TensorFlow raises of damaged files has no common class.
            raise RunFailed(
                f"the checkpoint {newest} cannot be restored: {reason(error)}. "
                "--overwrite begins the run anew"
            ) from error
        return int(self._step.numpy())

    def save(self) -> None:
        """Saves the state of now. TensorFlow writes it aside and renames it.

        Raises:
            RunFailed: it cannot be written; the checkpoints of before stay.
        """
        number = int(self._step.numpy())
        try:
            self._manager.save(checkpoint_number=number)
        except (tf.errors.OpError, OSError) as error:
            folder = self._manager.directory
            # On a full disk it would keep the next attempt from its room.
            shutil.rmtree(os.path.join(folder, f"ckpt-{number}_temp"), ignore_errors=True)
            raise cannot_write(f"checkpoint {number} in {folder}", reason(error)) from error

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
