"""Whether a trained network gives the same answers in bfloat16.

    python -m benchmarks.serving_precision RUN [RUN ...]

Runs what `bnzoo-export` writes for each run directory, weights as constants, on all images that
the run held out, in float32 and in bfloat16, and prints a table in Markdown.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from absl import app, flags

from bnzoo.surgery import fold_batch_norm
from export.forms import PRECISIONS, build_form
from export.run_directory import read_run
from training import data

from .timing import machine

FLAGS = flags.FLAGS
flags.DEFINE_string("data_dir", None, "Folder of TFDS data sets. Default: that of the training.")


def compare(folder: str) -> str:
    """The row of a run."""
    run = read_run(Path(folder))
    folded = fold_batch_norm(run.network)
    forms = {name: build_form(folded, "constants", name) for name in PRECISIONS}
    trained_with = json.loads((Path(folder) / "config.json").read_text())["flags"]
    source = data.open_source(trained_with["dataset"], FLAGS.data_dir or trained_with["data_dir"])
    split = source.open_split(trained_with["eval_split"] or source.held_out())
    answers: dict[str, list[np.ndarray]] = {name: [] for name in PRECISIONS}
    labels = []
    # What fills the last batch up is cut off again.
    for images, batch_labels, mask in data.evaluation_batches(split, run.preprocessing, 40):
        real = mask.numpy() > 0
        labels.append(batch_labels.numpy()[real])
        for name, form in forms.items():
            answers[name].append(form(images=images).numpy()[real])
    true = np.concatenate(labels)
    wide, narrow = (np.concatenate(answers[name]) for name in PRECISIONS)
    classes = wide.argmax(1), narrow.argmax(1)
    return (
        f"| {trained_with['dataset']} | {len(true)} | {(classes[0] == true).mean():.2%} "
        f"| {(classes[1] == true).mean():.2%} | {(classes[0] == classes[1]).mean():.2%} "
        f"| {np.abs(wide - narrow).max():.3f} | {np.abs(wide - narrow).mean():.0e} |"
    )


def main(argv: list[str]) -> None:
    """Prints the table."""
    if len(argv) < 2:
        raise app.UsageError("takes run directories of bnzoo-train. Received: none", exitcode=2)
    columns = ["data set", "images", "top-1 float32", "top-1 bfloat16", "same answer"]
    columns += ["largest difference", "mean"]
    print(f"{machine()}\n\n| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
    for folder in argv[1:]:
        print(compare(folder), flush=True)


if __name__ == "__main__":
    app.run(main)
