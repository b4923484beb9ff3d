"""What a run tells while it trains: the progress line, metrics.csv, and files for TensorBoard."""

from __future__ import annotations

import os

import numpy as np

from . import run_directory
from .engine import StepResults
from .metrics import Evaluation, MetricsFile
from .progress import Progress
from .watch import Watch


class Report:
    """Sums up the steps since the last row of metrics.csv, and writes the rows.

    Of several processes that train together all sum up, as the sums belong to the checkpoints, and
    the chief alone shows and writes.

    Args:
        run_dir: an existing folder.
        steps: the last step.
        batch_size: images of a step.
        epoch: steps in an epoch.
        first_step: the step that the run goes on from.
        sums: of before: loss, accuracy, and over how many steps.
        speaks: whether this process is the one that shows and writes.
        watch: writes for TensorBoard, in that process.
    """

    def __init__(
        self,
        run_dir: str,
        steps: int,
        batch_size: int,
        epoch: float,
        first_step: int,
        sums: np.ndarray,
        speaks: bool,
        watch: Watch | None = None,
    ) -> None:
        self.sums = sums
        self._watch = watch
        self._norms: list[np.ndarray] = []
        self._batch_size = batch_size
        self._epoch = epoch
        self._images, self._seconds, self._speed, self._rate = 0, 0.0, 0.0, 0.0
        self._progress = Progress(steps, first_step) if speaks else None
        self._metrics = (
            MetricsFile(os.path.join(run_dir, run_directory.METRICS), first_step)
            if speaks
            else None
        )

    def before(self, step: int) -> None:
        """Called before the steps behind `step` are done."""
        if self._watch:
            self._watch.before(step)

    def steps(self, step: int, results: StepResults, seconds: float, compiled: bool) -> None:
        """Takes in the steps up to `step`; `compiled`: their time is that of steps alone."""
        count = len(results.losses)
        self.sums += (
            results.losses.sum(dtype=np.float64),
            results.accuracies.sum(dtype=np.float64),
            count,
        )
        self._speed = count * self._batch_size / seconds
        self._rate = results.rates[-1]
        if compiled:
            self._images += count * self._batch_size
            self._seconds += seconds
        if self._watch:
            self._norms.append(results.gradient_norms)
            self._watch.after(step)
        if self._progress:
            self._progress.update(
                step, results.losses.mean(), results.accuracies.mean(), self._rate, self._speed
            )

    def row(self, step: int, evaluation: Evaluation | None) -> None:
        """Writes the row of `step`, and begins the next one."""
        row: dict[str, float | int] = {
            "step": step,
            "epoch": step / self._epoch,
            "loss": self.sums[0] / self.sums[2],
            "accuracy": self.sums[1] / self.sums[2],
            "learning_rate": self._rate,
            "images_per_second": self._images / self._seconds if self._seconds else self._speed,
        }
        if evaluation:
            row |= {
                "eval_loss": evaluation.loss,
                "eval_accuracy": evaluation.accuracy,
                "eval_top5_accuracy": evaluation.top5_accuracy,
            }
        if self._progress and evaluation:
            self._progress.note(f"step {step}: held-out accuracy {evaluation.accuracy:.4f}")
        if self._metrics:
            self._metrics.write(row)
        if self._watch:
            self._watch.row(
                step, {**row, "gradient_norm": float(np.concatenate(self._norms).mean())}
            )
            self._norms = []
        self.sums, self._images, self._seconds = np.zeros(3), 0, 0.0

    def sync(self) -> None:
        """Makes sure that all rows are on the disk."""
        if self._metrics:
            self._metrics.sync()
        if self._watch:
            self._watch.sync()

    def close(self) -> None:
        """Ends the file."""
        if self._metrics:
            self._metrics.close()
        if self._watch:
            self._watch.close()
