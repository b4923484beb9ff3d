"""What is measured: accuracy on a split, every example counted once, and the file metrics.csv."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .command_line import RunFailed
from .run_directory import write_text, writing

TOP = 5

COLUMNS = (
    "step",
    "epoch",
    "loss",
    "accuracy",
    "learning_rate",
    "images_per_second",
    "eval_loss",
    "eval_accuracy",
    "eval_top5_accuracy",
)
# The number of a step, then numbers or nothing.
_ROW = re.compile(rf"[0-9]+(,[-+.0-9a-z]*){{{len(COLUMNS) - 1}}}")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Means over a split: cross-entropy in nats, and the fractions of right answers."""

    examples: int
    loss: float
    accuracy: float
    top5_accuracy: float


def in_top(scores: tf.Tensor, labels: tf.Tensor, k: int) -> tf.Tensor:
    """Whether the label is among the k highest scores; of equal scores the first class counts.

    tf.math.in_top_k counts all of equal scores as hits, so a network that has collapsed to a
    constant output would be right every time.

    Args:
        scores: [N, classes].
        labels: int64 [N].
        k: how many answers count.

    Returns:
        bool [N]; False where a score is not finite.
    """
    own = tf.gather(scores, labels, axis=1, batch_dims=1)[:, tf.newaxis]
    earlier = tf.range(scores.shape[1], dtype=labels.dtype) < labels[:, tf.newaxis]
    ahead = (scores > own) | ((scores == own) & earlier)
    rank = tf.reduce_sum(tf.cast(ahead, tf.int32), axis=1)
    return (rank < k) & tf.reduce_all(tf.math.is_finite(scores), axis=1)


def make_evaluator(model: keras.Model) -> Callable[[Iterable[Any], int], Evaluation]:
    """A function that evaluates `model` as it is at each call.

    Its arguments: batches of images, labels and a mask (`data.evaluation_batches`), and how many
    examples they must come to. Where the model is in the scope of a strategy, batches are those of
    its replicas, and the result that over all of them.

    Raises:
        RunFailed: (the function) the batches held another number of examples.
    """

    strategy = model.distribute_strategy

    def replica_sums(images: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        return batch_sums(model, images, labels, mask)

    @tf.function(reduce_retracing=True)
    def sums(images: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        parts = strategy.run(replica_sums, args=(images, labels, mask))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)

    def evaluate(batches: Iterable[Any], examples: int) -> Evaluation:
        # Added up on the device: only the last sum is waited for.
        total = tf.zeros(4, tf.float64)
        for images, labels, mask in batches:
            total += sums(images, labels, mask)
        return evaluation(total.numpy(), examples)

    return evaluate


def batch_sums(
    model: keras.Model, images: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor
) -> tf.Tensor:
    """What one batch adds to an evaluation: number of examples, loss, hits and hits of the top 5.

    Args:
        model: its output is class probabilities.
        images: of the batch.
        labels: int64 [N].
        mask: [N]; examples of 0 do not count.

    Returns:
        float64 [4].
    """
    probabilities = model(images, training=False)
    loss = keras.losses.sparse_categorical_crossentropy(labels, probabilities)
    hits = [in_top(probabilities, labels, k) for k in (1, TOP)]
    rows = [tf.ones_like(mask), *(tf.cast(row, tf.float32) for row in (loss, *hits))]
    # A masked loss may be infinite, and 0 * inf is no number.
    kept = [tf.where(mask > 0, row, 0.0) for row in rows]
    return tf.reduce_sum(tf.cast(tf.stack(kept), tf.float64), axis=1)


def evaluation(sums: np.ndarray, examples: int) -> Evaluation:
    """The means, from `batch_sums` added up over a split.

    Raises:
        RunFailed: the sums are over another number of examples.
    """
    counted, loss, top1, top5 = sums
    if counted != examples:
        raise RunFailed(
            f"{counted:.0f} examples were evaluated, but the split has {examples}: "
            "the data set is damaged"
        )
    return Evaluation(examples, loss / counted, top1 / counted, top5 / counted)


class MetricsFile:
    """metrics.csv: one row for each step that is reported, in order, none twice.

    A row is written before the checkpoint of its step, so a run that goes on from a checkpoint
    finds all rows up to it; rows behind it are dropped, as they will be written again.

    Args:
        path: of the file.
        last_step: the step that the run goes on from; 0 starts a new file.

    Raises:
        RunFailed: what is there cannot be read, or it cannot be written.
    """

    def __init__(self, path: str, last_step: int) -> None:
        kept = [row for row in _rows(path) if int(row[0]) <= last_step] if last_step else []
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(kept)
        write_text(path, text.getvalue())
        self._path = path
        with writing(path):
            self._file = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, row: Mapping[str, float | int]) -> None:
        """Appends a row; columns that it lacks stay empty."""
        with writing(self._path):
            self._writer.writerow(
                [_text(row[column]) if column in row else "" for column in COLUMNS]
            )
            self._file.flush()

    def sync(self) -> None:
        """Makes sure that all rows are on the disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _rows(path: str) -> list[list[str]]:
    """The whole rows of the file, none if there is no file.

    The last one may be torn, where a process was killed. Others are damaged if the machine went
    down, or somebody wrote there; that they are left out is told.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFailed(f"{path} cannot be read: {error.strerror}") from error
    rows = [line.split(",") for line in lines if _ROW.fullmatch(line)]
    if damaged := len(lines[1:-1]) - len(rows):
        print(f"{path}: {damaged} damaged lines are left out", flush=True)
    return rows


def _text(value: float | int) -> str:
    if isinstance(value, (int, np.integer)):
        return str(value)
    return f"{value:.6g}"
