"""Held-out images that a run keeps, so that what is exported from it can be checked on them."""

from __future__ import annotations

import os
import shutil

import tensorflow as tf

from .data import Inputs
from .failures import explained
from .run_directory import EXAMPLES, PARTIAL, writing
from .sources import Split

COUNT = 16


def write_examples(run_dir: str, inputs: Inputs) -> None:
    """Writes held-out images as decoded, 00-<class>.png and so on, into `run_dir`/examples.

    The folder is complete or not there; if it is there, it is left as it is.

    Raises:
        RunFailed: an image is damaged, or they cannot be written.
    """
    folder = os.path.join(run_dir, EXAMPLES)
    if os.path.isdir(folder):
        return
    partial = os.path.join(run_dir, PARTIAL + EXAMPLES)
    split = inputs.evaluation
    with explained(split, inputs.preprocessing), writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial)
        try:
            for position, example in enumerate(_some(split)):
                image, label = split.read(example, inputs.preprocessing)
                name = f"{position:02d}-{int(label)}.png"
                with open(os.path.join(partial, name), "wb") as file:
                    # PNG keeps the pixels that evaluation sees.
                    file.write(tf.io.encode_png(image).numpy())
                    file.flush()
                    os.fsync(file.fileno())
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _some(split: Split) -> tf.data.Dataset:
    """The raw examples to keep."""
    examples = split.ordered()
    if examples.element_spec.dtype.is_integer:
        # Positions: in a folder's order one class follows the other, so they come from all over.
        # Records of files, which TFDS has shuffled, would all be read on the way to the last.
        examples = examples.shard(max(1, split.examples // COUNT), 0)
    return examples.take(COUNT)
