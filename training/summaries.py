"""Event files for TensorBoard, which need no TensorBoard to be written."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping

import tensorflow as tf

from .command_line import RunFailed
from .failures import reason
from .run_directory import cannot_write, make, write_aside, writing

_EVENTS = "events.out.tfevents."
_VERSION = "brain.Event:2"


class Summaries:
    """The scalars of a run by their step, each once, however often the run was interrupted.

    Each process writes a file of its own, in which a mark tells a TensorBoard that is watching to
    forget what it read of later steps. From the files of earlier processes those steps are taken
    out, as they will be done again.

    `tf.summary.scalar` raises unless TensorBoard is installed, which TensorFlow does not bring; the
    records that it writes are made here by hand. (https://www.tensorflow.org/tensorboard)

    Args:
        folder: of the files; made if it is not there.
        last_step: the step that the run goes on from; 0 for its start.

    Raises:
        RunFailed: it cannot be written, or what is there cannot be read.
    """

    def __init__(self, folder: str, last_step: int) -> None:
        make(folder)
        self._path = _new_path(folder)
        with writing(folder):
            names = sorted(os.listdir(folder))
        for name in names:
            if name.startswith(_EVENTS):
                _cut(os.path.join(folder, name), last_step)
        with self._writing():
            self._writer = tf.io.TFRecordWriter(self._path)
        self._add(tf.compat.v1.Event(file_version=_VERSION))
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._add(tf.compat.v1.Event(step=last_step + 1, session_log=start))
        self.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one scalar for each name in `values`."""
        summary = tf.compat.v1.Summary(
            value=[
                tf.compat.v1.Summary.Value(tag=name, simple_value=value)
                for name, value in values.items()
            ]
        )
        self._add(tf.compat.v1.Event(step=step, summary=summary))

    def flush(self) -> None:
        """Lets others read what was written."""
        with self._writing():
            self._writer.flush()

    def sync(self) -> None:
        """Makes sure that all is on the disk."""
        self.flush()
        with self._writing(), open(self._path, "rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        """Ends the file."""
        with self._writing():
            self._writer.close()

    def _add(self, event: tf.compat.v1.Event) -> None:
        event.wall_time = time.time()
        with self._writing():
            self._writer.write(event.SerializeToString())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (tf.errors.OpError, OSError) as error:
            raise cannot_write(self._path, reason(error)) from error


def read_events(path: str) -> Iterator[tf.compat.v1.Event]:
    """The events of one file, up to a record that a killed process did not finish."""
    with contextlib.suppress(tf.errors.DataLossError):
        for record in tf.data.TFRecordDataset(path):
            yield tf.compat.v1.Event.FromString(record.numpy())


def _new_path(folder: str) -> str:
    """Of a file that is not there, also if this process had one in the same second.

    TensorBoard reads the files in the order of their names.
    """
    path = first = os.path.join(
        folder, f"{_EVENTS}{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
    )
    number = 0
    while os.path.exists(path):
        number += 1
        path = f"{first}.{number}"
    return path


def _cut(path: str, last_step: int) -> None:
    """Takes what is later than `last_step` out of a file, and what was not finished."""
    try:
        kept = [event for event in read_events(path) if event.step <= last_step]
    except tf.errors.OpError as error:
        raise RunFailed(
            f"{path} cannot be read: {reason(error)}. Once it is deleted, which loses what "
            "TensorBoard shows of that time, the same command goes on"
        ) from error
    if not any(event.HasField("summary") for event in kept):
        with writing(path):
            os.remove(path)
        return

    def write(partial: str) -> None:
        try:
            with tf.io.TFRecordWriter(partial) as writer:
                for event in kept:
                    writer.write(event.SerializeToString())
        except tf.errors.OpError as error:
            raise OSError(reason(error)) from error  # What `write_aside` tidies up after.

    write_aside(path, write)
