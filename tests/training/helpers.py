"""What the tests of training share."""

from __future__ import annotations

import contextlib
import csv
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from training.command_line import parse
from training.settings import Settings, resolve
from training.train_flags import TRAIN_FLAGS


def given(*argv: str) -> dict[str, Any]:
    """The values of all flags of bnzoo-train for `argv`."""
    values, _ = parse(TRAIN_FLAGS, ["bnzoo-train", *argv])
    return values.flag_values_dict()


def settings(*argv: str) -> Settings:
    """The settings of `argv`, by default of the small network on 8x8 digits."""
    return resolve(given("--model=mnist_mlp", "--dataset=digits", "--image_size=8", *argv))


def train_argv(run_dir: Path, *argv: str) -> list[str]:
    """A command that trains the small network on 8x8 digits."""
    return [
        "bnzoo-train",
        "--model=mnist_mlp",
        "--dataset=digits",
        "--image_size=8",
        f"--run_dir={run_dir}",
        *argv,
    ]


def read_metrics(run_dir: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv."""
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def image_folder(root: Path, counts: dict[str, dict[str, int]], size: int = 12) -> Path:
    """Writes root/<split>/<class>/<n>.png: class k has the level 20 + 40 k, plus a little noise."""
    labels = sorted({label for classes in counts.values() for label in classes})
    random = np.random.default_rng(7)
    for split, classes in counts.items():
        for label, count in classes.items():
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                level = 20 + 40 * labels.index(label)
                pixels = random.integers(level, level + 10, (size, size + 3, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


@contextlib.contextmanager
def disk_full_at(size: int) -> Iterator[None]:
    """Lets the system refuse to write a file beyond `size` bytes, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
