"""keras.applications models before and after `bnzoo.surgery`, side by side in one run.

    python -m benchmarks.surgery --what=training    # a step: as built, converted, without BN
    python -m benchmarks.surgery --what=inference   # latency, as built and after folding
    python -m benchmarks.surgery --what=folding     # what folds: docs/results/folding.md

Each prints a table in Markdown. Weights are random, and so are the statistics of all
Batch Normalization layers.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

from bnzoo.surgery import convert_batch_norm, fold_batch_norm

from .timing import interleaved_medians, machine

FLAGS = flags.FLAGS
flags.DEFINE_enum("what", "training", ["training", "inference", "folding"], "What to measure.")
flags.DEFINE_list("models", None, "Functions of keras.applications; all of the table if not given.")
flags.DEFINE_integer("rounds", 15, "Measured rounds for each model.")
flags.DEFINE_integer("batch_size", 16, "Images in a training step.")
flags.DEFINE_integer("image_size", 160, "Height and width of the images, in pixels.")

TIMED = ["ResNet50", "MobileNetV2", "DenseNet121", "EfficientNetB0"]
FOLDED = [
    *["ResNet50", "ResNet50V2", "InceptionV3", "MobileNet", "MobileNetV2", "DenseNet121"],
    *["EfficientNetB0", "EfficientNetV2B0", "InceptionResNetV2", "MobileNetV3Large"],
    *["MobileNetV3Small", "NASNetMobile", "ResNet101V2", "Xception"],
]


def build(name: str) -> keras.Model:
    """The model with random statistics, negative gammas among them, and logits as its output."""
    keras.utils.set_random_seed(0)
    shape = (FLAGS.image_size, FLAGS.image_size, 3)
    make = getattr(keras.applications, name)
    model = make(weights=None, input_shape=shape, classes=1000, classifier_activation=None)
    randomize_statistics(model)
    return model


def randomize_statistics(model: keras.Model) -> None:
    """Gives all Batch Normalization layers statistics, gammas and betas of every kind."""
    rng = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            channels = layer.moving_mean.shape
            layer.moving_mean.assign(rng.normal(0, 0.3, channels))
            layer.moving_variance.assign(rng.uniform(0.5, 2, channels))
            if layer.gamma is not None:
                signs = rng.choice([-1, 1], channels, p=[0.2, 0.8])
                layer.gamma.assign(rng.uniform(0.5, 1.5, channels) * signs)
            if layer.beta is not None:
                layer.beta.assign(rng.normal(0, 0.3, channels))


def images(batch: int) -> tf.Tensor:
    """Random images in [0, 255]."""
    shape = (batch, FLAGS.image_size, FLAGS.image_size, 3)
    return tf.constant(np.random.default_rng(1).uniform(0, 255, shape), tf.float32)


def _training_step(model: keras.Model) -> Callable[[], object]:
    optimizer = keras.optimizers.SGD(1e-4, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, labels = images(FLAGS.batch_size), tf.range(FLAGS.batch_size)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(labels, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)
        return value

    return lambda: step().numpy()


class _Nothing(keras.layers.Layer):
    """Stands in the place of a BN, with its arguments."""

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        return inputs


def _without_batch_norm(model: keras.Model) -> keras.Model:
    """The model with nothing in the place of its BN: no layer can be faster than none."""

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        if isinstance(layer, keras.layers.BatchNormalization):
            return _Nothing(name=layer.name)
        return type(layer).from_config(layer.get_config())

    return keras.models.clone_model(model, clone_function=clone)


def _inference_step(model: keras.Model) -> Callable[[], object]:
    x = images(1)
    step = tf.function(lambda: model(x, training=False))
    return lambda: step().numpy()


def time_training(name: str) -> str:
    """A row of the table of training steps."""
    model = build(name)
    seconds = interleaved_medians(
        {
            "keras": _training_step(model),
            "bnzoo": _training_step(convert_batch_norm(model)),
            "none": _training_step(_without_batch_norm(model)),
        },
        FLAGS.rounds,
    )
    before, after, floor = seconds["keras"], seconds["bnzoo"], seconds["none"]
    return (
        f"| {name} | {before * 1e3:.0f} | {after * 1e3:.0f} | {floor * 1e3:.0f} "
        f"| {before / after:.2f} | {before / floor:.2f} |"
    )


def time_inference(name: str) -> str:
    """A row of the table of latencies."""
    model = build(name)
    folded, report = fold_batch_norm(model, return_report=True)
    seconds = interleaved_medians(
        {"built": _inference_step(model), "folded": _inference_step(folded)}, FLAGS.rounds
    )
    before, after = seconds["built"], seconds["folded"]
    return (
        f"| {name} | {before * 1e3:.1f} | {after * 1e3:.1f} | {before / after:.2f} "
        f"| {report.before.operations} | {report.after.operations} |"
    )


def fold(name: str) -> str:
    """A row of the table of what folds."""
    model = build(name)
    folded, report = fold_batch_norm(model, return_report=True)
    x = images(4)
    before, after = model(x, training=False).numpy(), folded(x, training=False).numpy()
    error = np.abs(before - after).max() / np.abs(before).max()
    counts = [report.count(outcome) for outcome in ("folded", "affine", "kept")]
    sizes = [report.before, report.after]
    return (
        f"| {name} | {len(report.batch_norms)} | {' | '.join(map(str, counts))} "
        f"| {sizes[0].parameters:,} | {sizes[1].parameters:,} "
        f"| {sizes[0].operations} | {sizes[1].operations} | {error:.0e} |"
    )


TABLES: dict[str, tuple[list[str], Callable[[str], str], list[str]]] = {
    "training": (
        TIMED,
        time_training,
        ["as built (ms)", "converted (ms)", "without BN (ms)", "times faster", "at most"],
    ),
    "inference": (
        TIMED,
        time_inference,
        ["as built (ms)", "folded (ms)", "times faster", "calls", "calls after"],
    ),
    "folding": (
        FOLDED,
        fold,
        ["BN", "folded", "affine", "kept", "parameters", "after", "calls", "after", "error"],
    ),
}


def main(argv: list[str]) -> None:
    """Prints one table."""
    if len(argv) > 1:
        raise app.UsageError(f"takes flags only. Received: {argv[1:]}")
    names, row, columns = TABLES[FLAGS.what]
    print(f"{machine()}; {FLAGS.image_size}x{FLAGS.image_size} images\n")
    print(f"| model | {' | '.join(columns)} |")
    print("|---|" + "---:|" * len(columns), flush=True)
    for name in FLAGS.models or names:
        keras.backend.clear_session()
        print(row(name), flush=True)


if __name__ == "__main__":
    app.run(main)
