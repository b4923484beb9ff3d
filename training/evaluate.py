"""bnzoo-evaluate: the accuracy of a trained network, each example counted exactly once."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Sequence
from types import UnionType
from typing import Any

from absl import flags

from bnzoo.trained_steps import saved_step

from . import run_directory
from .command_line import BadFlags, Flag, FlagGroups, RunFailed, run_command
from .settings import check_dataset_name
from .train_flags import DATA_FLAGS

PROGRAM = "bnzoo-evaluate"
USAGE = """bnzoo-evaluate RUN [flags]

Evaluates the network of the run directory RUN, by default on the data it was evaluated on while it
was trained. For example:
  bnzoo-evaluate runs/digits --batch_size=100"""

FLAGS: FlagGroups = {
    "Data": (
        *DATA_FLAGS,
        Flag("batch_size", "integer", "Examples in a batch. Default: the training's."),
    )
}

# Of a run's flags, those that an evaluation starts from, and their types.
_NEEDED: dict[str, type | UnionType] = {
    "dataset": str,
    "data_dir": str | None,
    "eval_split": str | None,
    "batch_size": int,
}


def run() -> None:
    """The command bnzoo-evaluate."""
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv`, as sys.argv, and returns its exit code."""
    return run_command(PROGRAM, USAGE, FLAGS, _command, argv)


def _command(values: flags.FlagValues, arguments: list[str]) -> None:
    problems: list[str] = []
    if len(arguments) != 1:
        problems.append(f"one run directory must be given. Received: {' '.join(arguments) or None}")
    if values.batch_size is not None and values.batch_size < 1:
        problems.append(
            "--batch_size must be a whole number of at least 1. "
            f"Received: --batch_size={values.batch_size}"
        )
    check_dataset_name(values.dataset, problems)
    if problems:
        raise BadFlags(*problems)
    run_dir = arguments[0]
    trained_with = _trained_with(run_dir)
    if not os.path.exists(os.path.join(run_dir, run_directory.MODEL)):
        raise RunFailed(f"{run_dir} has no {run_directory.MODEL} yet: its training is not finished")
    step = saved_step(os.path.join(run_dir, run_directory.MODEL))
    steps = trained_with.get("steps")
    if step is not None and step != steps:
        print(
            f"{run_dir} is not finished: {run_directory.MODEL} is the network of step {step}, and "
            f"{steps} are to be done",
            flush=True,
        )
    same_data = values.dataset in (None, trained_with["dataset"])
    evaluate(
        run_dir,
        dataset=values.dataset or trained_with["dataset"],
        data_dir=values.data_dir or trained_with["data_dir"],
        eval_split=values.eval_split or (trained_with["eval_split"] if same_data else None),
        batch_size=values.batch_size or trained_with["batch_size"],
    )


def _trained_with(run_dir: str) -> dict[str, Any]:
    """The flags of the run, of which those that are needed here are what they have to be."""
    trained_with = run_directory.read_config(run_dir)["flags"]
    for name, kind in _NEEDED.items():
        if not isinstance(value := trained_with.get(name, NotImplemented), kind):
            found = "is missing" if value is NotImplemented else f"is {value!r}"
            raise RunFailed(
                f"{os.path.join(run_dir, run_directory.CONFIG)} is damaged: its flag {name} {found}"
            )
    return trained_with


def evaluate(
    run_dir: str, dataset: str, data_dir: str | None, eval_split: str | None, batch_size: int
) -> None:
    """Evaluates the run in `run_dir` and prints the result; None for a split: the held-out one."""
    # Imported here, as TensorFlow takes seconds and mistakes in the flags are told without it.
    import keras

    # Registers bnzoo's layers with Keras.
    from bnzoo.class_names import class_names
    from bnzoo.preprocessing import Preprocessing

    from . import data
    from .failures import explained, first_line
    from .metrics import make_evaluator

    try:
        preprocessing = Preprocessing.from_json(
            run_directory.read_text(run_dir, run_directory.PREPROCESSING)
        )
    except ValueError as error:
        path = os.path.join(run_dir, run_directory.PREPROCESSING)
        raise RunFailed(f"{path} is damaged: {error}") from error
    labels = class_names(run_directory.read_text(run_dir, run_directory.LABELS))
    source = data.open_source(dataset, data_dir)
    if source.labels != labels:
        raise BadFlags(
            f"--dataset must have the {len(labels)} classes that the network was trained on, in "
            f"their order. Received: --dataset={dataset}, with {len(source.labels)} classes"
        )
    split = source.open_split(eval_split or source.held_out())
    path = os.path.join(run_dir, run_directory.MODEL)
    try:
        model = keras.models.load_model(path)
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise RunFailed(
            f"{path} cannot be loaded: {first_line(error).rstrip('.')}. If it is damaged, the "
            "command that trained it makes it again"
        ) from error
    images = (None, *preprocessing.image_size, preprocessing.channels)
    shape = tuple(model.input_shape)
    if len(shape) != len(images) or any(
        has not in (None, given) for has, given in zip(shape, images, strict=True)
    ):
        raise RunFailed(
            f"{run_dir} is damaged: its {run_directory.MODEL} takes images {shape}, but its "
            f"{run_directory.PREPROCESSING} makes {images}"
        )
    batches = data.evaluation_batches(split, preprocessing, batch_size)
    with explained(split, preprocessing):
        result = make_evaluator(model)(batches, split.examples)
    print(
        f"examples {result.examples}  top-1 {result.accuracy:.4f}  "
        f"top-5 {result.top5_accuracy:.4f}  loss {result.loss:.4f}"
    )


if __name__ == "__main__":
    run()
