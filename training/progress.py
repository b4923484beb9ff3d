"""The progress line of a run.

keras.utils.Progbar cannot show it: it counts the steps of before a restart as done by this process,
so its time left is wrong then, and it redraws even where the output is a file.
"""

from __future__ import annotations

import shutil
import sys
import time

# Seconds from one line to the next where lines cannot be redrawn.
LINE_EVERY = 10.0


class Progress:
    """Shows step, loss, accuracy, learning rate, images a second and the time left.

    On a terminal it is one line that is redrawn; elsewhere a full line now and then.

    Args:
        steps: the last step.
        first_step: how many steps were done before this process.
    """

    def __init__(self, steps: int, first_step: int) -> None:
        self._steps = steps
        self._redraws = sys.stdout.isatty()
        self._drawn = False
        self._last_line = -LINE_EVERY
        self._start_step = first_step
        self._start: float | None = None

    def update(
        self,
        step: int,
        loss: float,
        accuracy: float,
        learning_rate: float,
        images_per_second: float,
    ) -> None:
        """Shows the state after `step`; the figures are those of the last steps."""
        now = time.monotonic()
        if self._start is None:
            # The first call of the compiled steps includes compiling them.
            self._start, self._start_step, left = now, step, "?"
        else:
            seconds = (now - self._start) / (step - self._start_step)
            left = _clock(seconds * (self._steps - step))
        text = (
            f"step {step}/{self._steps}  loss {loss:.4f}  accuracy {accuracy:.4f}  "
            f"rate {learning_rate:.4g}  {images_per_second:.0f} images/s  {left} left"
        )
        if self._redraws:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]:<{width}}", end="", flush=True)
            self._drawn = True
        elif now - self._last_line >= LINE_EVERY or step == self._steps:
            print(text, flush=True)
            self._last_line = now

    def note(self, text: str) -> None:
        """A line of its own, which stays."""
        if self._drawn:
            print()
            self._drawn = False
        print(text, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
