"""Classifies held-out digits with nothing but TensorFlow and an exported model.

`python export/classify.py SAVED_MODEL HELD_OUT.npz`, run by its path: a process in which importing
bnzoo or Keras fails, as both are missing where a model is served. HELD_OUT.npz has `images`, uint8
[N, 8, 8, 1], their `labels` and the `probabilities` that the unfolded network gave.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

SHOWN = 5
LARGEST_DIFFERENCE = 1e-4
_ABSENT = ("bnzoo", "keras", "tf_keras")
_SHADES = " .:-=+*#%@"


def picture(image: np.ndarray) -> list[str]:
    """The lines of a grey image, two characters a pixel, the darker the brighter."""
    levels = image[..., 0].astype(int) * len(_SHADES) // 256
    return ["".join(_SHADES[level] * 2 for level in row) for row in levels]


def side_by_side(blocks: Sequence[Sequence[str]], gap: str = "   ") -> str:
    """Blocks of lines, each as many, next to each other."""
    widths = [max(len(line) for line in block) for block in blocks]
    return "\n".join(
        gap.join(f"{line:<{width}}" for line, width in zip(lines, widths, strict=True)).rstrip()
        for lines in zip(*blocks, strict=True)
    )


def main(saved_model: str, held_out: str) -> int:
    """Prints a few digits with what the model says of them, and how far it is from the unfolded.

    Returns:
        0, or 1 if that is more than `LARGEST_DIFFERENCE`.
    """
    import tensorflow as tf

    held = np.load(held_out)
    model = tf.saved_model.load(saved_model)
    served = model.signatures["serving_uint8"](images=tf.constant(held["images"]))
    answers, scores = served["classes"].numpy()[:, 0], served["scores"].numpy()[:, 0]
    right = np.array([int(answer) for answer in answers]) == held["labels"]
    shown = [
        [*picture(image), f"{answer.decode()} at {score:.1%}, is {label}"]
        for image, answer, score, label in zip(
            held["images"][:SHOWN], answers, scores, held["labels"], strict=False
        )
    ]
    difference = np.abs(served["probabilities"].numpy() - held["probabilities"]).max()
    print(side_by_side(shown))
    print(f"\n{saved_model}, without bnzoo and Keras: {right.sum()} of {len(right)} digits right")
    print(f"largest difference of a probability to the unfolded model: {difference:.1e}")
    return int(not difference <= LARGEST_DIFFERENCE)


if __name__ == "__main__":
    # What Python finds as None in this table it refuses to import.
    sys.modules.update(dict.fromkeys(_ABSENT))  # type: ignore[arg-type]
    sys.exit(main(*sys.argv[1:]))
