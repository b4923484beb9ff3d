"""What a run of training leaves behind and an export needs: network, preprocessing, labels."""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from bnzoo.class_names import class_names

# Importing the models registers the layers that the network is made of.
from bnzoo.models import without_auxiliary
from bnzoo.preprocessing import Preprocessing
from bnzoo.trained_steps import saved_step

from .errors import ExportFailed

# Copied into the SavedModel's assets, so that a model in service can be traced to its run.
ASSETS = ("labels.txt", "preprocessing.json", "config.json")
_SYNTHETIC_EXAMPLES = 8
# What Keras says of a layer, or a function, that it does not know.
_UNKNOWN = re.compile(r"(?:Could not locate (?:class|function)|Unknown \w+:) '([^']+)'")


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        network: the trained network, nothing folded, without auxiliary heads; from images
            [N, height, width, channels] to class probabilities [N, classes].
        preprocessing: what is done to an image before the network sees it.
        labels: the name of each class.
        assets: those of `ASSETS` that the run has.
    """

    network: keras.Model
    preprocessing: Preprocessing
    labels: tuple[str, ...]
    assets: tuple[Path, ...]


def read_run(folder: Path) -> Run:
    """Reads a run directory, and prints a line if it was told to train on and has not ended that.

    Raises:
        ExportFailed: a file is missing or cannot be read, or the files do not fit each other.
    """
    for name in ("model.keras", "preprocessing.json", "labels.txt"):
        if not (folder / name).is_file():
            raise ExportFailed(f"no {name} in {folder}: give the folder of a finished bnzoo-train")
    network = read_network(folder / "model.keras", folder)
    try:
        preprocessing = Preprocessing.from_json((folder / "preprocessing.json").read_text())
        labels = class_names((folder / "labels.txt").read_text(encoding="utf-8"))
        if not isinstance(network, keras.Sequential) and isinstance(network.output, dict):
            network = without_auxiliary(network)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ExportFailed(f"cannot read {folder}: {_first_line(error)}") from error
    _check_fit(network, preprocessing, labels)
    _tell_unfinished(folder)
    assets = tuple(folder / name for name in ASSETS if (folder / name).is_file())
    return Run(network, preprocessing, labels, assets)


def _tell_unfinished(folder: Path) -> None:
    try:
        steps = json.loads((folder / "config.json").read_text(encoding="utf-8"))["flags"]["steps"]
    except (OSError, ValueError, TypeError, KeyError):
        return
    step = saved_step(folder / "model.keras")
    if step is not None and step != steps:
        print(
            f"{folder} is not finished: model.keras is the network of step {step}, and {steps} are "
            "to be done"
        )


def read_network(file: Path, told: Path | None = None) -> keras.Model:
    """A network that Keras saved, not compiled.

    Args:
        file: what `model.save` wrote.
        told: what messages say cannot be read. Default: `file`.

    Raises:
        ExportFailed: it is none.
    """
    if file.suffix == ".keras" and not zipfile.is_zipfile(file):
        # Keras says of such a file that it was not found.
        raise ExportFailed(f"cannot read {told or file}: {file.name} is no archive, or cut short")
    try:
        network = keras.models.load_model(file, compile=False)
    except (ValueError, TypeError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise ExportFailed(f"cannot read {told or file}: {_first_line(error)}") from error
    if not getattr(network, "inputs", None):
        raise ExportFailed(
            f"the network in {told or file} has no inputs of its own: it must be a functional or "
            "Sequential model that was built before it was saved"
        )
    if type(network) is keras.Sequential:
        # One that was not called does not know its `input` and `output`.
        return keras.Model(network.inputs[0], network.outputs[0], name=network.name)
    return network


def _check_fit(network: keras.Model, preprocessing: Preprocessing, labels: tuple[str, ...]) -> None:
    images = (None, *preprocessing.image_size, preprocessing.channels)
    for what, shape, expected in (
        ("input", network.input_shape, images),
        ("output", network.output_shape, (None, len(labels))),
    ):
        if not fits(shape, expected):
            raise ExportFailed(
                f"the network's {what} has shape {shape}, but preprocessing.json and labels.txt "
                f"need {expected}"
            )


def fits(shape: Sequence[int | None], expected: Sequence[int | None]) -> bool:
    """Whether a network whose input or output has `shape` can have `expected`; None is any size."""
    return len(shape) == len(expected) and all(
        has in (None, wanted) for has, wanted in zip(shape, expected, strict=True)
    )


def read_examples(folder: Path) -> dict[str, bytes]:
    """The encoded images of `folder` by name, in order; none if there is no such folder.

    Hidden files are left out: they are those that a desktop puts into every folder.
    """
    if not folder.is_dir():
        return {}
    paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def synthetic_examples(preprocessing: Preprocessing) -> list[bytes]:
    """PNG images of seeded noise, of the size that the network sees."""
    shape = (_SYNTHETIC_EXAMPLES, *preprocessing.image_size, preprocessing.channels)
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return [tf.io.encode_png(image).numpy() for image in noise]


def _first_line(error: Exception) -> str:
    unknown = _UNKNOWN.search(str(error))
    if unknown:
        return (
            f"it has a {unknown[1]}, which neither Keras nor bnzoo knows: decorate it with "
            "keras.saving.register_keras_serializable, import it, and call "
            "export.saved_model.main in Python"
        )
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
