"""The paper's point on a laptop: Inception with and without BN on scikit-learn's digits.

`python -m training.experiments.digits_demo FOLDER` runs `bnzoo-train` twice, as Section 4.2.2 has
it in large: the Inception network at the best learning rate found for it, and BN-Inception by the
recipe BN-x5, at five times that rate. It prints what came of it and leaves in FOLDER the two run
directories; `better`, a link to the one with the higher held-out accuracy; both curves in
`curves.png`; and in `held_out.npz` the held-out images with what the better network says of them.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .. import data, run_directory, train
from ..command_line import parse
from ..data import Inputs
from ..settings import resolve
from ..train_flags import TRAIN_FLAGS

EPOCHS = 7
# Steps of 32 that hold the 1,437 training images once.
EPOCH = 45

# Without BN: the best of RATES_TRIED, by held-out accuracy after as many steps. With BN: five times
# that, which is what the name BN-x5 says; it is not tuned.
RATES_TRIED = (0.0015, 0.003, 0.01, 0.03)
RATES: Mapping[str, float] = {"inception": 0.003, "bn_x5": 0.015}
ARGUMENTS: Mapping[str, str] = {
    "inception": "width_multiplier=0.25",
    # The moving statistics must follow within these few steps.
    "bn_x5": "width_multiplier=0.25,momentum=0.9",
}


class Curve(NamedTuple):
    """The held-out accuracy of one run.

    Attributes:
        recipe: the recipe.
        steps: the steps at which it was evaluated.
        accuracy: the fraction of held-out images that were classified right, at each of them.
        seconds: what the whole of `bnzoo-train` took.
    """

    recipe: str
    steps: Sequence[int]
    accuracy: Sequence[float]
    seconds: float

    @property
    def best(self) -> float:
        """The highest accuracy."""
        return max(self.accuracy)

    def steps_to(self, accuracy: float) -> int | None:
        """The first step at which `accuracy` was reached; None if it never was."""
        reached = (
            step for step, here in zip(self.steps, self.accuracy, strict=True) if here >= accuracy
        )
        return next(reached, None)


def command(recipe: str, folder: str, epochs: int = EPOCHS) -> list[str]:
    """The arguments of `bnzoo-train` for one of the two networks."""
    return [
        f"--recipe={recipe}",
        "--dataset=digits",
        f"--model_args={ARGUMENTS[recipe]}",
        f"--learning_rate={RATES[recipe]}",
        f"--steps={epochs * EPOCH}",
        f"--run_dir={os.path.join(folder, recipe)}",
    ]


def read_curve(recipe: str, run_dir: str, seconds: float) -> Curve:
    """The evaluations in the metrics.csv of a run."""
    with open(os.path.join(run_dir, run_directory.METRICS), newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["eval_accuracy"]]
    return Curve(
        recipe,
        [int(row["step"]) for row in rows],
        [float(row["eval_accuracy"]) for row in rows],
        seconds,
    )


def table(curves: Sequence[Curve]) -> str:
    """One row a run, the first being the baseline, as a Markdown table."""
    baseline = curves[0].best
    rows = [
        ["recipe", "rate", "best held-out accuracy", f"steps to {baseline:.2%}", "seconds"],
        ["---", "---:", "---:", "---:", "---:"],
    ]
    for curve in curves:
        steps = curve.steps_to(baseline)
        rows.append(
            [
                curve.recipe,
                f"{RATES[curve.recipe]}",
                f"{curve.best:.2%}",
                "not reached" if steps is None else f"{steps}",
                f"{curve.seconds:.0f}",
            ]
        )
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(curves: Sequence[Curve], path: str) -> None:
    """Draws held-out accuracy over steps into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(
        xlabel="step of 32 images",
        ylabel="held-out accuracy",
        ylim=(0, 1),
        title="Handwritten digits",
    )
    for curve in curves:
        label = f"{curve.recipe}, learning rate {RATES[curve.recipe]}"
        axes.plot(curve.steps, curve.accuracy, marker="o", label=label)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def write_held_out(run_dir: str, inputs: Inputs, path: str) -> None:
    """Writes the held-out images, their labels and the network's probabilities."""
    import keras

    split = inputs.evaluation
    decoded = [split.read(raw, inputs.preprocessing) for raw in split.ordered()]
    images = np.stack([image for image, _ in decoded])
    model = keras.models.load_model(os.path.join(run_dir, run_directory.MODEL))
    np.savez(
        path,
        images=images,
        labels=np.array([label for _, label in decoded]),
        probabilities=model.predict(inputs.preprocessing(images), verbose=0),
    )


def run(folder: str, epochs: int = EPOCHS) -> int:
    """Trains both networks in `folder` and compares them.

    Returns:
        0, or the exit code of the training that failed.
    """
    curves = []
    for recipe in RATES:
        arguments = command(recipe, folder, epochs)
        print(f"$ bnzoo-train {' '.join(arguments)}", flush=True)
        start = time.perf_counter()
        failed = train.main(["bnzoo-train", *arguments])
        if failed:
            return failed
        curves.append(read_curve(recipe, os.path.join(folder, recipe), time.perf_counter() - start))
    better = max(curves, key=lambda curve: curve.best).recipe
    os.symlink(better, os.path.join(folder, "better"))
    values, _ = parse(TRAIN_FLAGS, ["bnzoo-train", *command(better, folder, epochs)])
    inputs = data.open_inputs(resolve(values.flag_values_dict()))
    write_held_out(os.path.join(folder, better), inputs, os.path.join(folder, "held_out.npz"))
    draw(curves, os.path.join(folder, "curves.png"))
    print(f"\n{table(curves)}\n\nBoth curves: {os.path.join(folder, 'curves.png')}\n", flush=True)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m training.experiments.digits_demo FOLDER")
    sys.exit(run(sys.argv[1]))
