"""How signals travel through 30 layers at initialisation (He et al. 2015, Section 2.2).

`python -m training.experiments.initialization FOLDER` writes `initialization.csv`, a table
`initialization.md` and a plot `initialization.png` into FOLDER. It measures two networks:

- a chain of 30 convolutions 2x2 without pools and with periodic borders, the setting of the
  paper's derivation, where every response has n inputs and every input n^ responses;
- `bnzoo.models.prelu_net_30`, where max pools raise the responses and zeros at borders lower them.
"""

from __future__ import annotations

import csv
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..command_line import BadFlags, Flag, run_command

DEPTH = 30
# By network, the initialisations that differ there: fan_in is fan_out in the chain.
INITIALIZATIONS: Mapping[str, Sequence[str]] = {
    "chain": ("he_backward", "xavier"),
    "prelu_net_30": ("he_backward", "he_forward", "xavier"),
}
SLOPES: Mapping[str, float] = {"relu": 0.0, "prelu": 0.25}

FLAGS = {
    "What is measured": [
        Flag("networks", "integer", "Random networks of each kind that are averaged.", 4),
        Flag("images", "integer", "Images of Gaussian noise through each network.", 2),
        Flag("image_size", "integer", "Side of an image for prelu_net_30, in pixels.", 128),
        Flag("width_multiplier", "float", "Factor of the widths of prelu_net_30.", 0.5),
        Flag("filters", "integer", "Filters of each layer of the chain.", 256),
        Flag("map_size", "integer", "Side of the maps of the chain, in places.", 12),
        Flag("seed", "integer", "Seed of the weights and of the noise.", 0),
    ]
}


class Curve(NamedTuple):
    """Mean squares at initialisation, averaged over random networks.

    Attributes:
        network: "chain" or "prelu_net_30".
        initialization: as of `bnzoo.models.prelu_net_30`.
        activation: "relu" or "prelu", which starts at 0.25.
        forward: of the responses y_l, as multiples of that of the input, from layer 1 on.
        backward: of the gradients of y_l, as multiples of that of the last layer's.
    """

    network: str
    initialization: str
    activation: str
    forward: Sequence[float]
    backward: Sequence[float]


def chain(
    initialization: str, activation: str, filters: int, map_size: int, depth: int = DEPTH
) -> Any:
    """A model from maps [N, map_size, map_size, filters] to the responses of all its layers."""
    import keras

    from bnzoo.initializers import HeNormal
    from bnzoo.layers import PReLU

    slope = SLOPES[activation]
    x = inputs = keras.Input((map_size, map_size, filters))
    responses = []
    for _ in range(depth):
        x = keras.ops.concatenate([x, x[:, :1]], axis=1)
        x = keras.ops.concatenate([x, x[:, :, :1]], axis=2)
        he = HeNormal(1.0 if initialization == "xavier" else slope, "fan_out")
        x = keras.layers.Conv2D(filters, 2, kernel_initializer=he)(x)
        responses.append(x)
        x = PReLU(alpha_initializer=slope)(x)
    return keras.Model(inputs, responses)


def prelu_net(
    initialization: str, activation: str, image_size: int, width_multiplier: float
) -> Any:
    """`prelu_net_30`, as a model from images to the responses of all its layers."""
    import keras

    from bnzoo.models import prelu_net_30

    model = prelu_net_30(
        input_shape=(image_size, image_size, 3),
        classifier_activation=None,
        activation=activation,
        initialization=initialization,
        dropout=0.0,
        # The paper's deviations of the dense layers are for images of -128 to 128.
        fc_stddev=None,
        width_multiplier=width_multiplier,
    )
    kinds = (keras.layers.Conv2D, keras.layers.Dense)
    responses = [layer.output for layer in model.layers if isinstance(layer, kinds)]
    return keras.Model(model.input, responses)


def mean_squares(model: Any, images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each layer's responses to noise of variance 1, and of their gradients for such noise."""
    import tensorflow as tf

    inputs = tf.random.stateless_normal([images, *model.input.shape[1:]], [seed, 0])
    with tf.GradientTape() as tape:
        responses = model(inputs)
    upstream = tf.random.stateless_normal(responses[-1].shape, [seed, 1])
    gradients = tape.gradient(responses[-1], responses, output_gradients=upstream)
    forward, backward = (
        np.array([float(tf.reduce_mean(tf.square(tensor))) for tensor in tensors])
        for tensors in (responses, gradients)
    )
    return forward, backward


def measure(
    networks: int,
    images: int,
    image_size: int,
    width_multiplier: float,
    filters: int,
    map_size: int,
    seed: int,
) -> list[Curve]:
    """All curves; the arguments are the flags."""
    import keras

    curves = []
    for network, initializations in INITIALIZATIONS.items():
        for initialization in initializations:
            for activation in SLOPES:
                keras.utils.set_random_seed(seed)
                results = []
                for index in range(networks):
                    if network == "chain":
                        model = chain(initialization, activation, filters, map_size)
                    else:
                        model = prelu_net(initialization, activation, image_size, width_multiplier)
                    results.append(mean_squares(model, images, seed + index))
                forward, backward = np.mean(results, axis=0)
                curves.append(
                    Curve(network, initialization, activation, forward.tolist(), backward.tolist())
                )
    return curves


def table(curves: Sequence[Curve]) -> str:
    """One row a curve, as a Markdown table."""
    rows = [
        "| network | initialization | activation | y_1 | y_30 | least | most | gradient of y_1 |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for curve in curves:
        values = [
            curve.forward[0],
            curve.forward[-1],
            min(curve.forward),
            max(curve.forward),
            curve.backward[0],
        ]
        cells = [*curve[:3], *(f"{value:.2g}" for value in values)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def report(curves: Sequence[Curve], command: str, seconds: float) -> str:
    """The Markdown page of a run."""
    import keras
    import tensorflow as tf

    return f"""# Signals through 30 layers at initialisation

He et al. 2015, Section 2.2: with n Var[w] (1 + a^2) / 2 = 1 the mean square of the responses, or of
the gradients, neither grows nor vanishes; without the factor of the rectifier ("xavier") it halves
in each layer, and 30 layers leave 2^-30.

Columns: the mean square of the responses of the first and last layer, and the least and most
of all layers, as multiples of the input's; the mean square of the gradients of the first layer's
responses, as a multiple of the last layer's.

{table(curves)}

The chain has 30 convolutions 2x2 with periodic borders and no pools, the setting of the derivation.
(An input that is no rectifier's output counts twice, so that y_1 is about 2 with ReLU.) In
prelu_net_30 max pools raise the responses, zeros at borders lower them, and the forward and the
backward form differ by the ratio of the widths of the ends, as the paper says; its three dense
layers follow the same rule here.

![Mean squares by layer](initialization.png)

`{command}`: {seconds:.0f} s of processor time
({platform.machine()}, {os.cpu_count()} cores), Keras {keras.__version__},
TensorFlow {tf.__version__}.
"""


def draw(curves: Sequence[Curve], path: str) -> None:
    """Draws responses and gradients by layer, for each network, into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = {"he_backward": "C0", "he_forward": "C2", "xavier": "C3"}
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    for row, network in zip(grid, INITIALIZATIONS, strict=True):
        for axes, direction in zip(row, ("forward", "backward"), strict=True):
            for curve in curves:
                if curve.network != network:
                    continue
                values = curve.forward if direction == "forward" else curve.backward
                axes.plot(
                    range(1, len(values) + 1),
                    values,
                    colours[curve.initialization],
                    linestyle="-" if curve.activation == "relu" else "--",
                    label=f"{curve.initialization}, {curve.activation}",
                )
            what = "responses" if direction == "forward" else "gradients"
            axes.set(title=f"{network}: {what}", yscale="log")
            axes.grid(alpha=0.3)
        row[0].set_ylabel("mean square, relative")
        row[0].legend(fontsize="small")
    for axes in grid[-1]:
        axes.set_xlabel("layer")
    figure.savefig(path, dpi=110)


def write(curves: Sequence[Curve], folder: str, command: str, seconds: float) -> None:
    """Writes the three files aside and moves them into `folder`."""
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        with open(os.path.join(aside, "initialization.csv"), "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(
                ["network", "initialization", "activation", "layer", *Curve._fields[3:]]
            )
            for curve in curves:
                values = zip(curve.forward, curve.backward, strict=True)
                for layer, (forward, backward) in enumerate(values, start=1):
                    row = [*curve[:3], layer, f"{forward:.6g}", f"{backward:.6g}"]
                    writer.writerow(row)
        with open(os.path.join(aside, "initialization.md"), "w") as file:
            file.write(report(curves, command, seconds))
        draw(curves, os.path.join(aside, "initialization.png"))
        for name in sorted(os.listdir(aside)):
            os.replace(os.path.join(aside, name), os.path.join(folder, name))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    argv = sys.argv if argv is None else argv
    given = " ".join(["python -m training.experiments.initialization", *argv[1:]])

    def command(values: object, arguments: Sequence[str]) -> None:
        if len(arguments) != 1:
            raise BadFlags(f"give one folder to write to. Received: {list(arguments)}")
        settings = {flag.name: getattr(values, flag.name) for flag in FLAGS["What is measured"]}
        for name, value in settings.items():
            if name != "seed" and value <= 0:
                raise BadFlags(f"--{name} must be more than 0. Received: --{name}={value}")
        if settings["image_size"] < 17:
            raise BadFlags(
                f"--image_size must be at least 17. Received: --image_size={settings['image_size']}"
            )
        start = time.process_time()
        curves = measure(**settings)
        write(curves, arguments[0], given, time.process_time() - start)
        print(table(curves))

    usage = "python -m training.experiments.initialization FOLDER [flags]"
    return run_command("initialization", usage, FLAGS, command, argv)


if __name__ == "__main__":
    sys.exit(main())
