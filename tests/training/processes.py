"""Real processes on this machine, for tests: each strategy needs processes of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def tf_configs(workers: int) -> list[str]:
    """TF_CONFIG of each of `workers` processes."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(workers)]
    return [
        json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
        for index in range(workers)
    ]


class Program:
    """A Python program in a process of its own, with its output in a file.

    Args:
        log: the file.
        arguments: of the interpreter.
        environment: what is set besides the environment of the tests.
    """

    def __init__(
        self, log: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self.environment = environment or {}
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **self.environment},
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
