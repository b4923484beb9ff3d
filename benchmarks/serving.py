"""Exported networks on a CPU, beside what else can serve them, in one run.

    python -m benchmarks.serving                                      # bn_inception, all runtimes
    python -m benchmarks.serving --networks=MobileNetV2,ResNet50 --runtimes=bnzoo

Prints a table in Markdown. Networks have random weights and random statistics in every Batch
Normalization. All runtimes have the same number of threads, take the same images from NumPy and
give NumPy arrays back. They take turns; a turn is one call that does not count, as the caches
are the neighbour's, and a few that do. A runtime that is not installed is left out, and named.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import bnzoo

from .runtimes import ANY_BATCH, BASELINE, RUNTIMES, Network, Run
from .surgery import randomize_statistics
from .timing import machine

FLAGS = flags.FLAGS
flags.DEFINE_list("networks", ["bn_inception"], "Functions of bnzoo.models or keras.applications.")
flags.DEFINE_list("runtimes", None, "Beginnings of the names of rows. Default: all.")
flags.DEFINE_list("batch_sizes", ["1", "8", "32"], "Images in a request.")
flags.DEFINE_float("seconds", 50, "For how long each batch size is measured.")
flags.DEFINE_integer("threads", None, "Threads of each runtime. Default: the cores there are.")

WARM_UP_TURNS = 2
PAUSE = 0.02  # Seconds: threads of some runtimes spin for a while when their work is done.
IMAGE_SIZE = 224


def build(name: str) -> keras.Model:
    """The network at 224x224, with random statistics."""
    keras.utils.set_random_seed(0)
    shape = (IMAGE_SIZE, IMAGE_SIZE, 3)
    library = bnzoo.models if hasattr(bnzoo.models, name) else keras.applications
    model = getattr(library, name)(weights=None, input_shape=shape, classes=1000)
    randomize_statistics(model)
    return model


def chosen_runtimes() -> list[str]:
    """The rows to measure; says on stderr which are not installed."""
    wanted = tuple(FLAGS.runtimes or [""])
    found = []
    for name, (_, modules) in RUNTIMES.items():
        if not name.startswith(wanted) and name != BASELINE:
            continue
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            extra = "pip install 'bnzoo[serving_peers]'"
            print(f"{name}: left out, no {', '.join(missing)} ({extra})", file=sys.stderr)
        else:
            found.append(name)
    return found


def measure(runs: Mapping[str, Run], images: np.ndarray, seconds: float) -> dict[str, np.ndarray]:
    """Seconds of each call that counts, by runtime, in turns until the time is up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    calls = max(1, 8 // len(images))
    end, turn = None, 0
    while end is None or time.perf_counter() < end:
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            time.sleep(PAUSE)
            runs[name](images)
            for _ in range(calls):
                start = time.perf_counter()
                runs[name](images)
                if turn >= WARM_UP_TURNS:
                    taken[name].append(time.perf_counter() - start)
        turn += 1
        if turn == WARM_UP_TURNS:
            end = time.perf_counter() + seconds
    return {name: np.array(values) for name, values in taken.items()}


def latencies(name: str, runtimes: Sequence[str]) -> Iterator[str]:
    """The rows of one network."""
    network = Network(build(name), FLAGS.threads)
    made: dict[str, Run] = {}
    for batch in map(int, FLAGS.batch_sizes):
        images = np.random.default_rng(1).normal(size=(batch, IMAGE_SIZE, IMAGE_SIZE, 3))
        images = images.astype(np.float32)
        for runtime in runtimes:
            if runtime not in made or runtime not in ANY_BATCH:
                made[runtime] = RUNTIMES[runtime][0](network, batch)
        outputs = {runtime: run(images) for runtime, run in made.items()}
        taken = measure(made, images, FLAGS.seconds)
        baseline = np.median(taken[BASELINE])
        for runtime, values in taken.items():
            median, late = np.median(values), np.quantile(values, 0.95)
            # As a fraction of the largest: with 1000 classes and no training all are small.
            error = np.abs(outputs[runtime] - outputs[BASELINE]).max() / outputs[BASELINE].max()
            yield (
                f"| {name} | {batch} | {runtime} | {median * 1e3:.1f} | {late * 1e3:.1f} "
                f"| {batch / median:.1f} | {baseline / median:.2f} | {error:.0e} | {len(values)} |"
            )


def report_latencies() -> None:
    """The table of all networks."""
    runtimes = chosen_runtimes()
    columns = ["network", "batch", "runtime", "median ms", "p95 ms", "images/s"]
    columns += ["times faster", "difference", "calls"]
    print(f"{machine()}; {FLAGS.threads} threads; {IMAGE_SIZE}x{IMAGE_SIZE} images\n")
    print(f"| {' | '.join(columns)} |\n|---|---:|---|" + "---:|" * (len(columns) - 3), flush=True)
    for name in FLAGS.networks:
        keras.backend.clear_session()
        for row in latencies(name, runtimes):
            print(row, flush=True)


def main(argv: list[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"takes flags only. Received: {argv[1:]}", exitcode=2)
    for name in FLAGS.networks:
        if not any(hasattr(library, name) for library in (bnzoo.models, keras.applications)):
            raise app.UsageError(
                "--networks must be functions of bnzoo.models or keras.applications. "
                f"Received: {name}",
                exitcode=2,
            )
    if not all(batch.isdecimal() and int(batch) for batch in FLAGS.batch_sizes):
        raise app.UsageError(
            "--batch_sizes must be whole numbers of at least 1. "
            f"Received: {','.join(FLAGS.batch_sizes)}",
            exitcode=2,
        )
    logging.set_verbosity(logging.ERROR)  # TensorFlow tells of each SavedModel that it writes.
    FLAGS.threads = FLAGS.threads or len(os.sched_getaffinity(0))
    tf.config.threading.set_intra_op_parallelism_threads(FLAGS.threads)
    report_latencies()


if __name__ == "__main__":
    app.run(main)
