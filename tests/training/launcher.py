"""bnzoo-launch with a small script in place of training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Each process writes its own id into the folder FOUND, so that the tests can tell who is left.
PRELUDE = """
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}_{task['index']}"
found = os.environ["FOUND"]
with open(os.path.join(found, f"{name}.{os.getpid()}"), "w"):
    pass

def ready():
    with open(os.path.join(found, "..", f"ready_{name}"), "w"):
        pass

def until(holds):
    deadline = time.monotonic() + 50
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def wait_for(*names):
    until(lambda: all(os.path.exists(os.path.join(found, "..", f"ready_{one}")) for one in names))
"""


class Launcher:
    """Runs bnzoo-launch on a script; `pids` are those of the processes that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found = folder / "found"
        self.found.mkdir()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str, *flags: str) -> subprocess.Popen[str]:
        path = self.folder / "script.py"
        path.write_text(PRELUDE + script)
        process = subprocess.Popen(
            [sys.executable, "-m", "training.launch", *flags, "--", sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FOUND": str(self.found)},
            # Where the tests run in the background of a shell, Ctrl-C is ignored, and by all that
            # they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def run(self, script: str, *flags: str) -> tuple[int, list[str], str]:
        """The exit code, the lines of stdout and stderr."""
        process = self.start(script, *flags)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.splitlines(), err

    def pids(self, name: str = "") -> list[int]:
        return [int(path.suffix[1:]) for path in self.found.iterdir() if path.name.startswith(name)]

    def wait_for(self, count: int) -> None:
        self.until(lambda: len(self.pids()) == count)

    def until(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def left(self) -> list[int]:
        return [pid for pid in self.pids() if alive(pid)]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but that nobody has waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
