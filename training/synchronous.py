"""The engine of replicas that are in step: one device, several, or those of several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from .engine import StepResults
from .steps import TrainSteps


class Synchronous:
    """An `Engine` whose steps are one compiled function.

    Args:
        train_steps: as `steps.make_train_steps` makes it.
        batches: opens the input at a step.
    """

    def __init__(self, train_steps: TrainSteps, batches: Callable[[int], Iterator[Any]]) -> None:
        self._train_steps = train_steps
        self._open = batches
        self._batches: Iterator[Any] | None = None

    settled = True

    def run(self, first_step: int, count: int, ahead: int = 0) -> StepResults:
        """See `Engine`."""
        if self._batches is None:
            self._batches = self._open(first_step)
        results = self._train_steps(self._batches, tf.constant(count))
        return StepResults(*(column.numpy() for column in results))

    @property
    def traces(self) -> int:
        """How often the steps were traced."""
        return self._train_steps.experimental_get_tracing_count()  # type: ignore[attr-defined]
