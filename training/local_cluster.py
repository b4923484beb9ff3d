"""A cluster of processes on this machine: where they listen, what they print, how they end."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

LOOPBACK = "127.0.0.1"
# What a shell adds to the number of the signal that ended a program.
KILLED = 128
# Seconds between two looks at the processes where no output wakes the launcher.
_LOOK_EVERY = 0.1
# A line of more bytes is passed on in pieces.
_LONGEST_LINE = 65536

# prctl(2): the signal that a process gets when the one that started it is gone. Linux alone has it.
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Where each process of a cluster listens.

    Attributes:
        jobs: the addresses of each kind of process, as in TF_CONFIG.
        held: sockets that keep the ports: bound, they are given to no one who asks for any free
            port, and as they do not listen, the process that it is meant for can take it.
    """

    jobs: Mapping[str, Sequence[str]]
    held: Sequence[socket.socket]

    @property
    def tasks(self) -> list[tuple[str, int]]:
        """Kind and number of each process, the leading one first."""
        return [(job, index) for job, found in self.jobs.items() for index in range(len(found))]

    def tf_config(self, job: str, index: int) -> str:
        """TF_CONFIG of one process."""
        return json.dumps({"cluster": self.jobs, "task": {"type": job, "index": index}})


def addresses(workers: int, ps: int) -> Addresses:
    """Free ports on loopback for `workers`, and for `ps` and a chief if `ps` is not 0."""
    counts = {"chief": 1, "worker": workers, "ps": ps} if ps else {"worker": workers}
    held: list[socket.socket] = []
    jobs: dict[str, list[str]] = {}
    for job, count in counts.items():
        for _ in range(count):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((LOOPBACK, 0))
            held.append(one)
            jobs.setdefault(job, []).append(f"{LOOPBACK}:{one.getsockname()[1]}")
    return Addresses(jobs, held)


class Process:
    """One process of the cluster, whose lines come out with its name before them."""

    def __init__(self, job: str, index: int, plan: Addresses, command: Sequence[str]) -> None:
        self.task = (job, index)
        self.name = f"{job} {index}"
        # Whether its output has ended.
        self.silent = False
        self._rest = b""
        parent = os.getpid()

        def end_with_the_launcher() -> None:
            # Between fork and exec. Safe, as the launcher has no threads.
            if hasattr(_LIBC, "prctl"):
                _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # It was gone before.
                os._exit(1)

        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Its lines are to come when they are printed.
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                "TF_CONFIG": plan.tf_config(job, index),
            },
            # A group of its own: Ctrl-C reaches the launcher alone, and what the process starts is
            # ended with it.
            start_new_session=True,
            preexec_fn=end_with_the_launcher,
        )
        assert self._popen.stdout is not None
        self.pipe: IO[bytes] = self._popen.stdout
        os.set_blocking(self.pipe.fileno(), False)

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._popen.poll() is None

    @property
    def killed(self) -> bool:
        """Whether a signal ended it."""
        return (self._popen.poll() or 0) < 0

    @property
    def code(self) -> int:
        """The exit code of a process that has ended; 128 + the signal if one ended it."""
        code = self._popen.wait()
        return KILLED - code if code < 0 else code

    @property
    def ended(self) -> str:
        """How it ended, in words."""
        if self.killed:
            return f"{self.name} was killed by {signal.Signals(self.code - KILLED).name}"
        return f"{self.name} ended with exit code {self.code}"

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, number)

    def read(self) -> list[bytes]:
        """The next lines, as far as they are there."""
        over = not self.runs
        try:
            piece = os.read(self.pipe.fileno(), _LONGEST_LINE)
        except BlockingIOError:
            if not over:
                return []
            # What it started may hold the pipe open, but it itself has nothing more to say.
            piece = b""
        self.silent = not piece
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if self._rest and (self.silent or len(self._rest) >= _LONGEST_LINE):
            lines, self._rest = [*lines, self._rest], b""
        return lines


class Cluster:
    """The processes that run, and what they print.

    Args:
        plan: where they listen.
        command: what each runs.
        grace: seconds from SIGTERM to SIGKILL.
        told: the signals that told the launcher to end; one is added when nobody reads its output.
    """

    def __init__(
        self, plan: Addresses, command: Sequence[str], grace: float, told: list[signal.Signals]
    ) -> None:
        self.tasks = plan.tasks
        self.running: dict[tuple[str, int], Process] = {}
        self._plan = plan
        self._command = command
        self._grace = grace
        self._told = told
        self._selector = selectors.DefaultSelector()
        self._width = max(len(f"{job} {index}") for job, index in plan.tasks)

    def start(self, *tasks: tuple[str, int]) -> None:
        """Starts the processes `tasks`."""
        for task in tasks:
            process = Process(*task, self._plan, self._command)
            self.running[task] = process
            self._selector.register(process.pipe, selectors.EVENT_READ, process)

    def look(self) -> list[Process]:
        """Passes on what was printed, waiting a moment, and returns who has ended since."""
        for key, _ in self._selector.select(_LOOK_EVERY):
            self._print(key.data, key.data.read())
            if key.data.silent:
                self._selector.unregister(key.fileobj)
        ended = [one for one in self.running.values() if not one.runs]
        for process in ended:
            del self.running[process.task]
            # What it started does not outlive it.
            process.signal(signal.SIGKILL)
            if not process.silent:
                self._selector.unregister(process.pipe)
            while not process.silent:
                self._print(process, process.read())
            process.pipe.close()
        return ended

    def end(self) -> None:
        """Ends all that run: SIGTERM, then SIGKILL after the grace time or at one more signal."""
        signals = len(self._told)
        for process in self.running.values():
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._grace
        while self.running and time.monotonic() < deadline and len(self._told) == signals:
            self.look()
        self.kill()

    def kill(self) -> None:
        """Ends all that run, at once."""
        for process in self.running.values():
            process.signal(signal.SIGKILL)
        while self.running:
            self.look()

    def _print(self, process: Process, lines: Sequence[bytes]) -> None:
        prefix = f"{process.name:<{self._width}} | ".encode()
        try:
            sys.stdout.buffer.write(b"".join(prefix + line + b"\n" for line in lines))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            # What is still to come, also from Python's own flush at exit, goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._told.append(signal.SIGPIPE)
