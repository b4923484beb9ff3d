"""Whether a SavedModel computes what the trained network computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing

from .errors import ExportFailed

# What folding may change by rounding alone, as `Comparison.largest`, by the type that the network
# computes in: about ten of its rounding units, as the errors of many layers add up; for float32 a
# thousand, which is still below anything that matters.
ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}


def allowed_difference(network: keras.Model) -> float:
    """The `ROUNDING` of the least precise layer."""
    return max(ROUNDING.get(layer.compute_dtype, 0.0) for layer in network.layers)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far the served probabilities are from those of the trained network.

    Attributes:
        examples: how many images were compared, each through every signature.
        largest: largest difference of a probability, as a fraction of the largest probability
            that the trained network gives for that image. A fraction, since with 1000 classes
            and little training all probabilities are near 0.001, and so are all differences.
        agreement: fraction of the images with the same most probable class.
    """

    examples: int
    largest: float
    agreement: float


def compare(
    folder: Path, network: keras.Model, preprocessing: Preprocessing, examples: Sequence[bytes]
) -> dict[str, Comparison]:
    """Loads the SavedModel in `folder` and runs `examples` through each of its signatures.

    Args:
        folder: a SavedModel that `signatures.save_signatures` wrote.
        network: the network before anything was folded.
        preprocessing: that of the network.
        examples: encoded images, at least one.

    Returns:
        The comparison of each signature, by its name.

    Raises:
        ExportFailed: an example is no image.
    """
    served = tf.saved_model.load(str(folder)).signatures
    try:
        decoded = [preprocessing.decode(contents) for contents in examples]
    except tf.errors.InvalidArgumentError as error:
        raise ExportFailed(f"an example is no image: {error.message.splitlines()[0]}") from error
    inputs = tf.stack([preprocessing(image) for image in decoded])
    expected = tf.cast(network(inputs, training=False), tf.float32).numpy()
    answers = {
        "serving_default": served["serving_default"](images=inputs)["probabilities"],
        # Decoded images may differ in size, so each is a batch of its own.
        "serving_uint8": tf.concat(
            [served["serving_uint8"](images=image[None])["probabilities"] for image in decoded], 0
        ),
        "serving_bytes": served["serving_bytes"](image_bytes=tf.constant(list(examples)))[
            "probabilities"
        ],
    }
    return {name: _compared(answer.numpy(), expected) for name, answer in answers.items()}


def _compared(answer: np.ndarray, expected: np.ndarray) -> Comparison:
    scale = expected.max(axis=-1, keepdims=True)
    return Comparison(
        examples=len(expected),
        largest=float(np.max(np.abs(answer - expected) / scale)),
        agreement=float(np.mean(answer.argmax(-1) == expected.argmax(-1))),
    )
