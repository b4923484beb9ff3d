"""The other processes of a synchronous run: the loss of one ends all, in time and with its name."""

from __future__ import annotations

import os
import sys
import threading

from .cluster import Task
from .command_line import EXIT_FAILED, RunFailed
from .task_server import answers

LOOK_EVERY = 2.0
# A process that does not answer this many times in a row is lost.
LOOKS = 3
# Seconds that this process has then to end by itself, when TensorFlow has seen it too.
GRACE = 10.0


class Peers:
    """Looks in the background whether all other processes are there.

    A collective operation waits without end for a process that is gone if TensorFlow does not see
    that it is. Whoever waits in one cannot end itself, so this does, with one line.

    Args:
        task: this process among those of the cluster.
        program: the name before the message.
    """

    def __init__(self, task: Task, program: str) -> None:
        self._others = task.others
        self._program = program
        self._lost: str | None = None
        self._found = threading.Event()
        self._over = threading.Event()
        threading.Thread(target=self._look, name="peers", daemon=True).start()

    def _look(self) -> None:
        silent = dict.fromkeys(self._others, 0)
        while not self._over.wait(LOOK_EVERY):
            for name, address in self._others.items():
                silent[name] = 0 if answers(address) else silent[name] + 1
                if silent[name] >= LOOKS and not self._over.is_set():
                    self._lost = name
                    self._found.set()
                    if not self._over.wait(GRACE):
                        print(f"{self._program}: {self.error()}", file=sys.stderr, flush=True)
                        os._exit(EXIT_FAILED)
                    return

    def lost(self) -> bool:
        """Whether another process is gone, after an error that may come of it.

        Waits as long as it takes to see.
        """
        return self._found.wait(LOOK_EVERY * (LOOKS + 2))

    def error(self) -> RunFailed:
        """The line about the process that is gone."""
        return RunFailed(
            f"{self._lost} at {self._others[self._lost or '']} is gone; what it printed says why. "
            "Started again, all processes go on from the last checkpoint"
        )

    def stop(self) -> None:
        """Ends the looking: from here on the others may go."""
        self._over.set()
