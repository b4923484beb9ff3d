"""What is exported: one run, an ensemble of several, or a Keras file."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from bnzoo.class_names import class_names
from bnzoo.models import Ensemble
from bnzoo.preprocessing import Preprocessing

from . import provenance
from .errors import ExportFailed
from .limits import Limit
from .run_directory import Run, fits, read_examples, read_network, read_run, synthetic_examples
from .settings import MAX_MEGAPIXELS
from .verify import Examples

EXAMPLES = "examples"


@dataclasses.dataclass(frozen=True)
class Source:
    """What is exported.

    Attributes:
        name: of the network, for messages.
        network: as trained, nothing folded.
        preprocessing: what is done to an image before the network sees it, if that is known.
        labels: the name of each class, if they are known.
        assets: files for the SavedModel, by the names that they have in every export.
        examples_dir: the folder where training leaves images to compare on.
        provenance: what each network in it tells of itself.
    """

    name: str
    network: keras.Model
    preprocessing: Preprocessing | None
    labels: tuple[str, ...] | None
    assets: Mapping[str, Path]
    examples_dir: Path | None
    provenance: Sequence[Mapping[str, Any]]


def of_runs(folders: Sequence[Path]) -> Source:
    """One run, or the ensemble of several: the mean of their probabilities.

    Raises:
        ExportFailed: a run cannot be read, or they do not fit each other.
    """
    runs = [read_run(folder) for folder in folders]
    first = runs[0]
    for folder, run in zip(folders[1:], runs[1:], strict=True):
        for what, ours, theirs in (
            ("preprocessing.json", first.preprocessing, run.preprocessing),
            ("labels.txt", first.labels, run.labels),
        ):
            if ours != theirs:
                raise ExportFailed(
                    f"{folders[0]} and {folder} have different {what}: the members of an ensemble "
                    "must see the same images and know the same classes"
                )
    return Source(
        name=" and ".join(map(str, folders)),
        network=first.network if len(runs) == 1 else _ensemble(runs),
        preprocessing=first.preprocessing,
        labels=first.labels,
        # Of an ensemble, config.json would be that of one member.
        assets={
            path.name: path for path in first.assets if len(runs) == 1 or path.name != "config.json"
        },
        examples_dir=folders[0] / EXAMPLES,
        provenance=[provenance.of_run(folder) for folder in folders],
    )


def _ensemble(runs: Sequence[Run]) -> keras.Model:
    try:
        return Ensemble([run.network for run in runs])
    except ValueError as error:
        raise ExportFailed(
            f"these runs make no ensemble: {' '.join(str(error).split())}"
        ) from error


def of_keras_file(
    file: Path, preprocessing_file: Path | None = None, labels_file: Path | None = None
) -> Source:
    """Any Keras model.

    Args:
        file: what `model.save` wrote, .keras or .h5.
        preprocessing_file: the JSON of a `Preprocessing`; without it there is no signature for
            images.
        labels_file: one class a line.

    Raises:
        ExportFailed: a file cannot be read, or the files do not fit each other.
    """
    if not file.is_file():
        raise ExportFailed(f"no file {file}")
    network = read_network(file)
    assets, preprocessing, labels = {}, None, None
    try:
        if preprocessing_file is not None:
            text = preprocessing_file.read_text(encoding="utf-8")
            preprocessing = Preprocessing.from_json(text)
            assets["preprocessing.json"] = preprocessing_file
        if labels_file is not None:
            # Editors may put a mark of the byte order before the first.
            labels = class_names(labels_file.read_text(encoding="utf-8-sig"))
            assets["labels.txt"] = labels_file
    except (ValueError, TypeError) as error:
        wrong = preprocessing_file if preprocessing is None and preprocessing_file else labels_file
        raise ExportFailed(f"cannot read {wrong}: {' '.join(str(error).split())}") from error
    if preprocessing is not None:
        expected = (None, *preprocessing.image_size, preprocessing.channels)
        shape = tuple(network.inputs[0].shape)
        if len(network.inputs) > 1 or not fits(shape, expected):
            raise ExportFailed(
                f"the network's input has shape {shape}, but {preprocessing_file} needs {expected}"
            )
        if isinstance(network.input, dict):  # The signatures for images call it by no other name.
            network = keras.Model(network.inputs[0], network.output, name=network.name)
    return Source(
        name=str(file),
        network=network,
        preprocessing=preprocessing,
        labels=labels,
        assets=assets,
        examples_dir=None,
        provenance=[{"keras_model": file.name}],
    )


def named_assets(source: Source, scratch: Path) -> list[Path]:
    """Copies of the source's assets, by their names in an export."""
    for name, path in source.assets.items():
        # Who reads the labels is to have those that are served: without such a mark.
        (scratch / name).write_bytes(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    return [scratch / name for name in source.assets]


def examples_of(source: Source, asked: Path | None, max_megapixels: float) -> Examples:
    """Images to compare on: those of `asked`, of the run, or noise.

    Raises:
        ExportFailed: there are none in `asked`, one is no image, or one has more than
            `max_megapixels`.
    """
    if source.preprocessing is None:
        return Examples.of_noise(source.network)
    examples = _images_of(source, source.preprocessing, asked)
    _check_sizes(examples, source.preprocessing, max_megapixels)
    return examples


def _images_of(source: Source, preprocessing: Preprocessing, asked: Path | None) -> Examples:
    folder = asked or source.examples_dir
    encoded = read_examples(folder) if folder is not None else {}
    if asked is not None and not encoded:
        raise ExportFailed(f"no images in {asked}")
    if not encoded:
        noise = synthetic_examples(preprocessing)
        return Examples.of_images(noise, preprocessing, "images of noise")
    return Examples.of_images(
        list(encoded.values()), preprocessing, f"images of {folder}", list(encoded)
    )


def _check_sizes(examples: Examples, preprocessing: Preprocessing, max_megapixels: float) -> None:
    limit = Limit.of(preprocessing, MAX_MEGAPIXELS)
    for image in examples.decoded:
        height, width = image.shape[:2]
        told = f"one of the {examples.origin} has {height}x{width} pixels, which serving_bytes"
        if height * width > max_megapixels * 1e6:
            raise ExportFailed(
                f"{told} would refuse by --max_megapixels={max_megapixels:g}: export with a higher "
                "one, or give other --examples"
            )
        if limit.too_long(tf.constant([height, width], tf.int64)):
            raise ExportFailed(f"{told} refuses as {limit.narrow()}: give other --examples")
