"""A cluster of real processes on this machine, of which any can be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from training import local_cluster

ROOT = Path(__file__).parents[2]


class ClusterProcesses:
    """The processes, by their names, such as "worker 1"; ends them all at the end of a `with`.

    Args:
        folder: where the output of each goes.
        argv: the command that all run.
        workers: how many.
        ps: how many; with any there is a chief too.
    """

    def __init__(self, folder: Path, argv: Sequence[str], workers: int, ps: int = 0) -> None:
        self._folder, self._argv = folder, argv
        self._plan = local_cluster.addresses(workers, ps)
        self._tasks = {f"{job} {index}": (job, index) for job, index in self._plan.tasks}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ClusterProcesses:
        self.start(*self._tasks)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        for held in self._plan.held:
            held.close()

    def start(self, *names: str) -> None:
        """Starts processes, for the first time or again."""
        for name in names:
            environment = {
                **os.environ,
                "TF_CONFIG": self._plan.tf_config(*self._tasks[name]),
                "CUDA_VISIBLE_DEVICES": "-1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            }
            with open(self._path(name), "ab") as log:
                self._running[name] = subprocess.Popen(
                    [sys.executable, "-m", *self._argv],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal."""
        self._running[name].send_signal(number)

    def code(self, name: str, seconds: float) -> int:
        """The exit code, once it has ended; negative for a signal."""
        try:
            return self._running[name].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} goes on\n{self.told()}") from None

    def output(self, name: str) -> str:
        """What it has printed so far, in all its lives."""
        return self._path(name).read_text()

    def wait(self, until: Callable[[], bool], what: str, seconds: float) -> None:
        """Waits until something holds."""
        end = time.monotonic() + seconds
        while not until():
            if time.monotonic() > end:
                raise AssertionError(f"{what}: not within {seconds:g} s\n{self.told()}")
            time.sleep(0.02)

    def told(self) -> str:
        """What all have printed, for the message of a test that fails."""
        return "\n".join(f"--- {name}\n{self.output(name)[-3000:]}" for name in self._tasks)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '_')}.log"
