"""Held-out images that a run keeps, so that what is exported from it can be checked on them."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import tensorflow as tf

from .data import Inputs
from .run_directory import write_aside

EXAMPLES = "examples"
COUNT = 16


def write_examples(run_dir: str, inputs: Inputs) -> None:
    """Writes the first held-out images as decoded, 00-<class>.png and so on, into `run_dir`."""
    folder = os.path.join(run_dir, EXAMPLES)
    os.makedirs(folder, exist_ok=True)
    split = inputs.evaluation
    for position, example in enumerate(split.ordered().take(COUNT)):
        image, label = split.read(example, inputs.preprocessing)
        contents = tf.io.encode_png(image)
        name = f"{position:02d}-{int(label)}.png"
        write_aside(os.path.join(folder, name), functools.partial(_write, contents=contents))


def _write(path: str, contents: tf.Tensor) -> None:
    Path(path).write_bytes(contents.numpy())
