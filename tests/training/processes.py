"""Real processes on this machine, for tests: each strategy needs processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from training import local_cluster

REPOSITORY = Path(__file__).parents[2]


def free_addresses(count: int) -> tuple[str, ...]:
    """Addresses on loopback that nothing listens on."""
    plan = local_cluster.addresses(count, 0)
    for held in plan.held:
        held.close()
    return tuple(plan.jobs["worker"])


def tf_configs(workers: int) -> list[str]:
    """TF_CONFIG of each of `workers` processes."""
    plan = local_cluster.Addresses({"worker": free_addresses(workers)}, ())
    return [plan.tf_config(*task) for task in plan.tasks]


class Program:
    """A Python program in a process of its own, with its output in a file.

    Args:
        log: the file.
        arguments: of the interpreter.
        environment: what is set besides the environment of the tests.
        mode: of the file: "a" for a program that was there before.
    """

    def __init__(
        self,
        log: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        mode: str = "w",
    ) -> None:
        self.log = log
        self.environment = environment or {}
        with open(log, mode) as file:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **self.environment},
            )

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()

    def lines(self, beginning: str) -> list[str]:
        """The lines that begin so."""
        return [line for line in self.text.splitlines() if line.startswith(beginning)]

    def wait(self, seconds: float = 240) -> int:
        """Its exit code; the test fails if it does not end in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not end within {seconds} s:\n{self.text}") from None

    def until(self, condition: Callable[[], bool], seconds: float = 240) -> None:
        """Waits until `condition` holds while the program runs."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.02)


def cluster(folder: Path, arguments: Sequence[str], workers: int = 2) -> list[Program]:
    """Starts `workers` programs that find each other by TF_CONFIG."""
    return [
        Program(folder / f"worker_{index}.log", arguments, {"TF_CONFIG": config})
        for index, config in enumerate(tf_configs(workers))
    ]


def kill(programs: Sequence[Program]) -> None:
    """Ends what still runs."""
    for program in programs:
        program.process.kill()
        program.process.wait()


class ClusterProcesses:
    """A cluster of which any process, by its name, such as "worker 1", can be killed and started
    again; ends them all at the end of a `with`.

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
        self._running: dict[str, Program] = {}

    def __enter__(self) -> ClusterProcesses:
        self.start(*self._tasks)
        return self

    def __exit__(self, *_: object) -> None:
        kill(list(self._running.values()))
        for held in self._plan.held:
            held.close()

    def start(self, *names: str) -> None:
        """Starts processes, for the first time or again."""
        for name in names:
            environment = {
                "TF_CONFIG": self._plan.tf_config(*self._tasks[name]),
                "TF_CPP_MIN_LOG_LEVEL": "3",
            }
            arguments = ["-m", *self._argv]
            self._running[name] = Program(self._path(name), arguments, environment, mode="a")

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal."""
        self._running[name].process.send_signal(number)

    def code(self, name: str, seconds: float) -> int:
        """The exit code, once it has ended; negative for a signal."""
        try:
            return self._running[name].process.wait(seconds)
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
