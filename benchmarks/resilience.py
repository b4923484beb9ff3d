"""One run, killed by SIGKILL at random times and started again each time, beside an unbroken one.

    python -m benchmarks.resilience                            # one_device, 20 kills
    python -m benchmarks.resilience --strategy=multi_worker    # 2 workers by bnzoo-launch, 20 kills

Trains mnist_mlp on digits, with momentum, Polyak averages and a checkpoint each 20 steps, twice
from one seed. Each start of the second run is killed after a random time behind its first
checkpoint, and each fourth one while it starts. Of a cluster one process is killed each time, one
worker or the other or the launcher itself, and the rest has to end by itself. At the end
model.keras, all tensors of the last checkpoint (weights, moving statistics, momentum, averages) and
metrics.csv are compared bit for bit. Prints a table in Markdown; exits with 1 if anything differs.
"""

from __future__ import annotations

import csv
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import bnzoo.layers  # noqa: F401  (Keras finds them by name in model.keras.)

from .timing import machine

FLAGS = flags.FLAGS
flags.DEFINE_enum("strategy", "one_device", ["one_device", "multi_worker"], "How to train.")
flags.DEFINE_integer("kills", 20, "How often the run is killed.")
flags.DEFINE_integer("steps", 8000, "Steps of the run.")
flags.DEFINE_integer("seed", 0, "Of the times of the kills and of whom they hit.")
flags.DEFINE_string("folder", None, "Where the two runs go. Default: a new one.")

CHECKPOINT_EVERY = 20
# Each of this number is killed before it has trained as far as a checkpoint.
STARTING_EACH = 4
# Seconds that all that is left of a cluster may take to end by itself.
GRACE = 60.0


def command(run_dir: pathlib.Path) -> list[str]:
    """What a shell would be told to train in `run_dir`."""
    train = [
        *(sys.executable, "-m", "training.train"),
        *("--model=mnist_mlp", "--dataset=digits", f"--run_dir={run_dir}"),
        *(f"--strategy={FLAGS.strategy}", f"--steps={FLAGS.steps}", "--momentum=0.9"),
        *(f"--checkpoint_every={CHECKPOINT_EVERY}", "--polyak=0.99", "--log_every=30"),
        "--evaluate_every=200",
    ]
    if FLAGS.strategy == "one_device":
        return train
    return [sys.executable, "-m", "training.launch", "--workers=2", "--", *train]


def start(run_dir: pathlib.Path, log: pathlib.Path) -> subprocess.Popen[bytes]:
    with open(log, "wb") as file:
        return subprocess.Popen(command(run_dir), stdout=file, stderr=subprocess.STDOUT)


def newest(run_dir: pathlib.Path) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    found = (run_dir / "checkpoints").glob("ckpt-*.index")
    return max((int(path.stem.rpartition("-")[2]) for path in found), default=0)


def children(pid: int) -> list[int]:
    """The processes that `pid` started, the workers of a launcher."""
    return [
        int(child)
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_one(process: subprocess.Popen[bytes], dice: random.Random) -> str:
    """Kills one of the processes; returns its name when all others have ended by themselves."""
    workers = children(process.pid) if FLAGS.strategy == "multi_worker" else []
    targets = {"the process": process.pid}
    if FLAGS.strategy == "multi_worker":
        targets = {"launcher": process.pid}
        targets.update((f"worker {number}", pid) for number, pid in enumerate(workers))
    name = dice.choice(list(targets))
    os.kill(targets[name], signal.SIGKILL)
    process.wait(GRACE)
    deadline = time.monotonic() + GRACE
    while any(alive(pid) for pid in workers):
        if time.monotonic() > deadline:
            raise SystemExit(f"{name} was killed: {[pid for pid in workers if alive(pid)]} remain")
        time.sleep(0.05)
    return name


def unbroken(folder: pathlib.Path) -> tuple[float, float]:
    """Trains without a kill; returns the seconds to the first checkpoint and those behind it."""
    begun = time.monotonic()
    process = start(folder / "whole", folder / "whole.log")
    while not newest(folder / "whole") and process.poll() is None:
        time.sleep(0.05)
    first = time.monotonic()
    if process.wait():
        raise SystemExit((folder / "whole.log").read_text())
    return first - begun, time.monotonic() - first


def killed(folder: pathlib.Path, startup: float, training: float) -> Iterator[list[object]]:
    """Trains with kills; gives a row for each: whom, when, from and to which checkpoint."""
    dice = random.Random(FLAGS.seed)
    run_dir, log = folder / "killed", folder / "killed.log"
    for number in range(1, FLAGS.kills + 1):
        before = newest(run_dir)
        process = start(run_dir, log)
        starting = number % STARTING_EACH == 0
        while not starting and process.poll() is None and newest(run_dir) == before:
            time.sleep(0.02)
        # All kills together take up to four fifths of the run, on average.
        seconds = dice.uniform(0, startup if starting else 2 * 0.8 * training / FLAGS.kills)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            victim = kill_one(process, dice)
        else:
            raise SystemExit(f"ended with {code} before kill {number}:\n{log.read_text()}")
        when = f"{seconds:.2f} s after the {'start' if starting else 'first checkpoint'}"
        yield [number, victim, when, before, newest(run_dir)]
    if start(run_dir, log).wait():
        raise SystemExit(log.read_text())


def largest_difference(one: np.ndarray, two: np.ndarray) -> float:
    """0 only where both are the same bit for bit."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return math.inf
    if one.tobytes() == two.tobytes():
        return 0.0
    return float(np.max(np.abs(one.astype(np.float64) - two.astype(np.float64)))) or math.ulp(0.0)


def differences(folder: pathlib.Path) -> Iterator[tuple[str, int, float]]:
    """What was compared, how many arrays it has, and the largest difference."""
    whole, other = folder / "whole", folder / "killed"
    weights = [keras.models.load_model(run / "model.keras").get_weights() for run in (whole, other)]
    pairs = zip(*weights, strict=True)
    yield (
        "weights of model.keras",
        len(weights[0]),
        max(largest_difference(*pair) for pair in pairs),
    )
    checkpoints = [
        tf.train.load_checkpoint(str(run / "checkpoints" / f"ckpt-{FLAGS.steps}"))
        for run in (whole, other)
    ]
    names = [
        name
        for name, kind in checkpoints[0].get_variable_to_dtype_map().items()
        if kind != tf.string and not name.startswith(("_CHECK", "save_counter"))
    ]
    worst = max(
        largest_difference(*(np.asarray(one.get_tensor(name)) for one in checkpoints))
        for name in names
    )
    yield "tensors of the last checkpoint", len(names), worst
    rows = []
    for run in (whole, other):
        with open(run / "metrics.csv") as file:
            # How fast it was is another thing.
            rows.append([{**row, "images_per_second": ""} for row in csv.DictReader(file)])
    yield "rows of metrics.csv", len(rows[0]), 0.0 if rows[0] == rows[1] else math.inf


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"there are no arguments besides flags. Received: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    folder = pathlib.Path(FLAGS.folder or tempfile.mkdtemp(prefix="resilience_"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise app.UsageError(f"--folder must be new or empty. Received: --folder={folder}")
    print(machine(), flush=True)
    startup, training = unbroken(folder)
    print(
        f"{FLAGS.strategy}, {FLAGS.steps} steps unbroken: {startup:.0f} s to the first checkpoint, "
        f"then {training:.0f} s\n\n| kill | of | when | checkpoint before | after |\n"
        "|---:|---|---|---:|---:|",
        flush=True,
    )
    for row in killed(folder, startup, training):
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    print("\n| compared | | largest difference |\n|---|---:|---:|")
    found = list(differences(folder))
    for what, count, worst in found:
        print(f"| {what} | {count} | {worst:g} |")
    if any(worst for _, _, worst in found):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
