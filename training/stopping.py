"""SIGTERM: a run that is told to stop saves its state and ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Notes SIGTERM while it is entered, so that the run can stop where its state can be saved.

    Cluster managers send it some time before they kill: Kubernetes 30 seconds, Slurm as long as
    its KillWait.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True

    def __enter__(self) -> StopRequest:
        # Python's handlers belong to the main thread; elsewhere there is nothing to be done.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            # What C++ had set, Python does not know.
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
