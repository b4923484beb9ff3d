"""Checkpoints: everything that a run needs to go on as if it had never stopped."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import shutil
from collections.abc import Sequence

import keras
import tensorflow as tf

from .command_line import RunFailed
from .failures import reason
from .run_directory import cannot_write
from .strategies import Devices

KEPT = 3
_PREFIX = "ckpt"
_LIST = "checkpoint"
# A checkpoint's own files, and its number.
_FILE = re.compile(rf"{_PREFIX}-([0-9]+)\.(?:index|data-[0-9]+-of-[0-9]+)")


class Checkpoints:
    """The checkpoints of one run, made by tf.train.CheckpointManager, numbered by their step.

    A checkpoint has the step, which is the position in the input too (`data.training_batches`);
    all variables of the model, among them the moving statistics and the state of each random
    number generator; those of the optimizer, with its momentum and scale of the loss; and the
    sums of the metrics since the last row of metrics.csv.

    Of several processes that train together each has to call each method, and only the chief
    writes. What every replica keeps by itself, such as the moving statistics, goes into the
    checkpoint as the one value that all agree on, and from it to all.

    Args:
        folder: where they are; all processes see the same one.
        model: built.
        optimizer: built on the model's trainable variables.
        step: int64, how many steps are done.
        sums: the sums of the metrics.
        averages: the averages of the weights, if they are kept.
        devices: what trains; by default one device.
    """

    def __init__(
        self,
        folder: str,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        step: tf.Variable,
        sums: tf.Variable,
        averages: Sequence[tf.Variable] = (),
        devices: Devices | None = None,
    ) -> None:
        self._step = step
        self._devices = devices or Devices(tf.distribute.get_strategy())
        self._folder = folder
        self._newest: str | None = None
        # What each replica keeps by itself, and the one value of it.
        self._agreed: list[tuple[tf.Variable, tf.Variable]] = []
        # The variables themselves, in the order of their creation: nothing that Keras keeps in
        # them can be left out, whatever it hangs in its tree of objects.
        self._model_values = [self._one_value(variable.value) for variable in model.variables]
        self._checkpoint = tf.train.Checkpoint(
            model=self._model_values,
            optimizer=[self._one_value(variable.value) for variable in optimizer.variables],
            step=step,
            sums=sums,
            averages=[self._one_value(variable) for variable in averages],
        )
        self._manager = self._make_manager() if self._devices.is_chief else None

    def _make_manager(self) -> tf.train.CheckpointManager:
        if not _has_list(self._folder):
            # TensorFlow raises errors of some damaged ones.
            with contextlib.suppress(OSError):
                os.remove(os.path.join(self._folder, _LIST))
        return tf.train.CheckpointManager(
            self._checkpoint, self._folder, max_to_keep=KEPT, checkpoint_name=_PREFIX
        )

    def _one_value(self, variable: tf.Variable) -> tf.Variable:
        """`variable`, or one of this process that takes the value that all replicas agree on."""
        if self._devices.replicas == 1:
            return variable
        if variable.synchronization != tf.VariableSynchronization.ON_READ:
            return variable
        own = tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
        self._agreed.append((own, variable))
        return own

    @tf.function
    def _agree(self) -> None:
        for own, variable in self._agreed:
            own.assign(variable.read_value())

    def restore(self) -> int:
        """Restores the newest checkpoint that is whole, and returns its step; 0 if there is none.

        Raises:
            RunFailed: there are some, but all are damaged, or of another network.
        """
        step = 0
        if self._devices.is_chief:
            self._remove_unfinished()
            step = self._restore_newest()
        agreed = int(self._devices.total(step)[0])
        if agreed != step:
            path = os.path.join(self._folder, f"{_PREFIX}-{agreed}")
            if self._try(path) is not None:
                raise RunFailed(
                    f"this process cannot read {path}, with which the chief goes on: --run_dir "
                    "must be a folder that all processes share"
                )
        if agreed:
            self._newest = f"{_PREFIX}-{agreed}"
            for own, variable in self._agreed:
                variable.assign(own)
        return agreed

    def _remove_unfinished(self) -> None:
        """Removes what TensorFlow was writing aside when a process was killed."""
        for pattern in (f"{_PREFIX}-*_temp", f"{_LIST}.tmp*"):
            for path in glob.glob(os.path.join(self._folder, pattern)):
                if os.path.isdir(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        os.remove(path)

    def _restore_newest(self) -> int:
        for path in (candidates := self._newest_first()):
            why = self._try(path)
            if why is None:
                return int(self._step.numpy())
            if path != candidates[-1]:
                print(f"the checkpoint {path} is damaged: {why}; trying the one before", flush=True)
        if not candidates:
            return 0
        if self._never_finished(candidates):
            # Of an index that cannot be read no variable was restored.
            print(f"the first checkpoint {path} was not finished: the run begins anew", flush=True)
            return 0
        raise RunFailed(
            f"the checkpoint {path} cannot be restored: {why}. --overwrite begins the run anew"
        )

    def _newest_first(self) -> list[str]:
        """The checkpoints in the folder, also those that a torn list of them has not."""
        indices = os.path.join(glob.escape(self._folder), f"{_PREFIX}-*.index")
        found = [path for path in glob.glob(indices) if _FILE.fullmatch(os.path.basename(path))]
        return sorted((path.removesuffix(".index") for path in found), key=_number, reverse=True)

    def _never_finished(self, candidates: Sequence[str]) -> bool:
        """Whether no checkpoint was ever finished: each time the machine went down before.

        TensorFlow writes the index in its place, behind the data, and the list of checkpoints last.
        """
        return not _has_list(self._folder) and not any(map(_has_index, candidates))

    def _try(self, path: str) -> str | None:
        """Restores the checkpoint at `path`; why that cannot be, else None."""
        try:
            self._checkpoint.restore(path).assert_consumed()
        except Exception as error:
            # What TensorFlow raises of damaged files has no common class.
            return reason(error)
        return None

    def save(self) -> None:
        """Saves the state of now. One that is not finished is passed over when a run goes on.

        Raises:
            RunFailed: it cannot be written; the checkpoints of before stay.
        """
        self._read_agreed()
        number = int(self._step.numpy())
        try:
            if self._manager:
                self._manager.save(checkpoint_number=number)
                self._write_through(number)
                self._remove_older(number, self._manager.checkpoints)
        except (tf.errors.OpError, OSError) as error:
            # On a full disk it would keep the next attempt from its room.
            shutil.rmtree(
                os.path.join(self._folder, f"{_PREFIX}-{number}_temp"), ignore_errors=True
            )
            raise cannot_write(f"checkpoint {number} in {self._folder}", reason(error)) from error
        self._newest = f"{_PREFIX}-{number}"

    def _write_through(self, number: int) -> None:
        """Makes sure that checkpoint `number` outlasts a loss of power, which TensorFlow does not.

        Else all that are kept may be in memory alone, where steps are quick.
        """
        name = os.path.join(glob.escape(self._folder), f"{_PREFIX}-{number}")
        paths = [*glob.glob(f"{name}.data-*"), *glob.glob(f"{name}.index")]
        for path in (*paths, os.path.join(self._folder, _LIST), self._folder):
            opened = os.open(path, os.O_RDONLY)
            try:
                os.fsync(opened)
            except OSError as error:
                # Some file systems do not know it of folders.
                if error.errno != errno.EINVAL:
                    raise
            finally:
                os.close(opened)

    def _remove_older(self, number: int, listed: Sequence[str]) -> None:
        """Removes the older checkpoints beyond `KEPT` that TensorFlow has lost from its list.

        So it does where a process is killed before it has written the list, or while it removes
        one itself. Those of higher numbers stay: they are damaged, and were passed over for one of
        before, and in time they are written again or are older ones themselves.
        """
        files = glob.glob(os.path.join(glob.escape(self._folder), f"{_PREFIX}-*"))
        older: dict[str, int] = {}
        for file in files:
            if (found := _FILE.fullmatch(os.path.basename(file))) and int(found[1]) < number:
                older[file] = int(found[1])
        newest = sorted({older[file] for file in older if file.endswith(".index")}, reverse=True)
        kept = {*newest[: KEPT - 1], *map(_number, listed)}
        for file, its_number in older.items():
            if its_number not in kept:
                with contextlib.suppress(OSError):
                    os.remove(file)

    def _read_agreed(self) -> None:
        if self._agreed:
            self._agree()

    def all_finite(self) -> bool:
        """Whether each weight and statistic of the model is a finite number."""
        self._read_agreed()
        return all(
            bool(tf.reduce_all(tf.math.is_finite(variable)))
            for variable in self._model_values
            if variable.dtype.is_floating
        )

    @property
    def newest(self) -> str | None:
        """The name of the newest whole checkpoint, or None."""
        return self._newest


def _number(path: str) -> int:
    """The number of the checkpoint `path`, a name without that of its file's ending."""
    return int(path.rpartition("-")[2])


def _has_list(folder: str) -> bool:
    """Whether the list of checkpoints in `folder` can be read."""
    try:
        return tf.train.get_checkpoint_state(folder) is not None
    except ValueError:
        return False


def _has_index(path: str) -> bool:
    """Whether the index of the checkpoint `path` can be read."""
    try:
        tf.train.load_checkpoint(path)
    except Exception:
        return False  # See `_try`.
    return True
