"""bnzoo-convert-weights: published weights as a run directory, for evaluation and export."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from absl import flags

from bnzoo.class_names import class_names

from . import run_directory
from .command_line import BadFlags, Flag, FlagGroups, RunFailed, run_command
from .settings import Settings

if TYPE_CHECKING:
    from bnzoo.pretrained import Checkpoint

PROGRAM = "bnzoo-convert-weights"
USAGE = """bnzoo-convert-weights SOURCE PATH RUN [flags]

Makes the run directory RUN of published weights of BN-Inception: the network, what is done to its
images, its labels. SOURCE is slim (a TF-slim checkpoint, or the released tar.gz), torch (the state
dict of PyTorch's bn_inception), mxnet (params of Inception-BN) or onnx (inception_v2). For example:
  bnzoo-convert-weights torch bn_inception.pth runs/torch
  bnzoo-export runs/torch models/torch"""

FLAGS: FlagGroups = {
    "Run": (
        Flag("overwrite", "boolean", "Delete the run that is in RUN first.", False),
        Flag(
            "labels",
            "string",
            "Text file of the classes' names, one a line, without a background. Default: the "
            "WordNet identifiers of ILSVRC2012 for slim and torch; it must be given where only "
            "the file that came with the weights tells.",
        ),
        Flag(
            "background",
            "boolean",
            "Keep class 0 of slim's 1,001, which stands for no class. Without it, "
            "bnzoo-evaluate takes the run for ILSVRC2012's 1,000 classes.",
            True,
        ),
    )
}
BACKGROUND = "background"
# The data set that the weights were trained on, as TFDS calls it, and what to evaluate them on:
# its test split has no labels.
_DATASET, _EVAL_SPLIT = "imagenet2012", "validation"
_BATCH_SIZE = 32
_IMAGENET_CLASSES = 1000


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What config.json keeps: where the weights are from, and what bnzoo-evaluate starts from."""

    source: str
    path: str
    labels: str | None
    background: bool
    model: str = "bn_inception"
    dataset: str = _DATASET
    data_dir: str | None = None
    eval_split: str = _EVAL_SPLIT
    batch_size: int = _BATCH_SIZE
    seed: int | None = None


def run() -> None:
    """The command bnzoo-convert-weights."""
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv`, as sys.argv, and returns its exit code."""
    return run_command(PROGRAM, USAGE, FLAGS, _command, argv)


def _command(values: flags.FlagValues, arguments: list[str]) -> None:
    if len(arguments) != 3:
        raise BadFlags(
            f"SOURCE, PATH and RUN must be given. Received: {' '.join(arguments) or None}"
        )
    source, path, run_dir = arguments
    _check_run_dir(run_dir, values.overwrite)
    labels = None if values.labels is None else _read_labels(values.labels)
    convert(Conversion(source, path, values.labels, values.background), labels, run_dir)


def _check_run_dir(run_dir: str, overwrite: bool) -> None:
    """Raises BadFlags if there is something in `run_dir` that must not be touched."""
    is_run = os.path.exists(os.path.join(run_dir, run_directory.CONFIG))
    is_empty = os.path.isdir(run_dir) and not os.listdir(run_dir)
    if os.path.lexists(run_dir) and not is_empty and not (is_run and overwrite):
        remedy = "give another, or --overwrite" if is_run else "it is no run either"
        raise BadFlags(f"RUN must be a new or an empty folder: {remedy}. Received: {run_dir}")


def _read_labels(path: str) -> tuple[str, ...]:
    try:
        with open(path, encoding="utf-8") as file:
            return class_names(file.read())
    except (OSError, UnicodeDecodeError) as error:
        problem = f"--labels must be a text file. Received: --labels={path}: {error}"
        raise BadFlags(problem) from error


def convert(conversion: Conversion, labels: Sequence[str] | None, run_dir: str) -> None:
    """Reads published weights and writes a run directory of them, and prints what it did.

    Args:
        conversion: where they are from.
        labels: the names of the classes without a background; None is those of ILSVRC2012.
        run_dir: the folder of the run; made if it is not there. A run in it is deleted, once the
            weights have been read.

    Raises:
        BadFlags: an unknown source, or labels that are missing or too few or many.
        RunFailed: the weights cannot be read, or do not fit the network.
    """
    # Imported here, as TensorFlow takes seconds and mistakes in the flags are told without it.
    from bnzoo import pretrained

    if conversion.source not in pretrained.SOURCES:
        raise BadFlags(
            f"SOURCE must be one of {', '.join(pretrained.SOURCES)}. Received: {conversion.source}"
        )
    try:
        checkpoint = pretrained.read_checkpoint(conversion.path, conversion.source)
        names = _labels(checkpoint, labels, conversion.background)
        model = checkpoint.build(classes=len(names))
    except (ValueError, ImportError) as error:
        raise RunFailed(str(error)) from error
    run_directory.clear(run_dir)
    run_directory.make(run_dir)
    # All that it needs of settings are their fields, the seed among them.
    run_directory.write_config(
        run_dir, cast(Settings, conversion), {"form": checkpoint.form_name, "classes": len(names)}
    )
    run_directory.write_text(
        os.path.join(run_dir, run_directory.PREPROCESSING),
        checkpoint.form.preprocessing.to_json() + "\n",
    )
    run_directory.write_text(
        os.path.join(run_dir, run_directory.LABELS), "".join(f"{name}\n" for name in names)
    )
    run_directory.write_aside(os.path.join(run_dir, run_directory.MODEL), model.save)
    print(
        f"{run_dir}: {conversion.model} in the form {checkpoint.form_name}, "
        f"{model.count_params()} parameters, {len(names)} classes, from {conversion.path}"
    )


def _labels(checkpoint: Checkpoint, given: Sequence[str] | None, background: bool) -> list[str]:
    """The name of each class of the network that is written."""
    form, classes = checkpoint.form, checkpoint.classes
    if classes is None:
        raise RunFailed(f"{checkpoint.path} has no classifier of {checkpoint.source}")
    has_background = form.background and classes == form.arguments["classes"]
    named = classes - has_background
    if given is None:
        if not form.sorted_synsets or named != _IMAGENET_CLASSES:
            raise BadFlags(
                f"--labels must be given: only what came with the weights tells the names of the "
                f"{named} classes of {checkpoint.source}. Received: no --labels"
            )
        given = _synsets()
    if len(given) != named:
        raise BadFlags(f"--labels must have {named} lines, one a class. Received: {len(given)}")
    return [*([BACKGROUND] if has_background and background else []), *given]


def _synsets() -> list[str]:
    """ILSVRC2012's identifiers in their order, which TFDS has without the data."""
    import tensorflow_datasets as tfds

    return tfds.builder(_DATASET).info.features["label"].names


if __name__ == "__main__":
    run()
