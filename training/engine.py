"""What the loop asks of whatever does its steps: one device, replicas, or parameter servers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np


class StepResults(NamedTuple):
    """One value for each step, in the order in which they are counted.

    Attributes:
        losses: mean cross-entropy of the top over the global batch, in nats.
        accuracies: fraction of right answers.
        rates: learning rate.
        gradient_norms: L2 norm of all gradients together, as they are applied but for clipping.
    """

    losses: np.ndarray
    accuracies: np.ndarray
    rates: np.ndarray
    gradient_norms: np.ndarray


class Engine(Protocol):
    """Does training steps. Its variables are those of the model, the optimizer and the step.

    Whatever a step changes it changes in those, so that a checkpoint of them is all that there is
    to save: an engine keeps nothing else from one call of `run` to the next but its input, which
    is a function of the seed and the number of the step.
    """

    @property
    def settled(self) -> bool:
        """Whether the variables are those of the last step that `run` has returned."""
        ...

    def run(self, first_step: int, count: int, ahead: int = 0) -> StepResults:
        """Does the steps behind `first_step`, `count` of them, and waits for them.

        Args:
            first_step: where the last call ended or, in the first call, where the run goes on.
            count: how many.
            ahead: how many steps behind these may be under way at the end, for an engine that can
                have any. With 0 none is: what was under way before is waited for and returned
                too, even where it is more than `count`, and the engine is settled.

        Raises:
            tf.errors.OpError: something in it failed; the loop turns it into one line.
            RunFailed: what an engine can tell better itself.
        """
        ...
