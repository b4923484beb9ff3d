"""What every benchmark needs: interleaved medians, peak memory, and the machine's name."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf


def interleaved_medians(
    steps: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 3
) -> dict[str, float]:
    """Median seconds of each step.

    Each round runs every step once, in turn: what else happens on the machine then falls
    on all of them alike. The order is reversed every other round, so that none is always
    the one that finds the caches as its neighbour left them.

    Args:
        steps: A function without arguments for each name; it returns when it is done.
        rounds: Rounds that count.
        warm_up: Rounds before those, which trace, compile and fill caches.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(warm_up + rounds):
        for name in list(steps)[:: 1 if index % 2 else -1]:
            start = time.perf_counter()
            steps[name]()
            if index >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def copy_bandwidth(megabytes: int = 256) -> float:
    """Bytes a second read plus written when copying, with all cores: what memory allows."""
    source = tf.random.uniform([megabytes, 1 << 18])
    add = tf.function(lambda x: x + 1.0)
    median = interleaved_medians({"copy": lambda: add(source)}, rounds=7)["copy"]
    return 2 * megabytes * (1 << 20) / median


def peak_memory(module: str, *arguments: str) -> int:
    """The peak resident memory, in bytes, of `python -m module arguments`.

    A process of its own for each: the peak of a process cannot be taken back.
    """
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"`python -m {module} {' '.join(arguments)}` failed, status {status}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine() -> str:
    """One line for the results: processor, cores, versions."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":")[1].strip() for line in file if "model name" in line)
    except OSError:
        pass  # Not Linux: the platform's own name it is.
    return (
        f"{name}, {len(os.sched_getaffinity(0))} cores; Python {platform.python_version()}, "
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, NumPy {np.__version__}"
    )
