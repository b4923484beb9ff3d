"""A training step of BN-Inception, side by side with its peers, in one run.

    python -m benchmarks.training                 # bnzoo, Keras' BN, torch, no BN; bfloat16
    python -m benchmarks.training --what=memory   # peak memory, each in a process of its own
    python -m benchmarks.training --what=loop     # the training loop over the bare step

The peers: the same network and loop with keras.layers.BatchNormalization; without batch
normalization, with biases; and the same network in torch with channels last, in bfloat16
by its autocast. Before torch is timed, its network is checked to be the same: logits,
gradients and moving statistics in float64. A step is a forward and a backward pass and
SGD with momentum, on random images that are in memory.

The training loop is bnzoo-train's engine of one device, one step a call, fed by tf.data from
memory: over the bare step it has the iterator, the step counter, the learning rate, top-1,
the norm of the gradients and what Python does around a call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

from bnzoo.models import bn_inception
from bnzoo.models.inception_table import TABLES
from bnzoo.surgery import convert_batch_norm
from training.steps import make_train_steps
from training.synchronous import Synchronous

from .timing import interleaved_medians, machine, peak_memory

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 7, "Measured rounds.")
flags.DEFINE_integer("batch_size", 32, "Images in a step.")
flags.DEFINE_integer("image_size", 224, "Height and width of the images, a multiple of 32.")
flags.DEFINE_enum("stem", "separable", ["separable", "conv"], "First convolution.")
flags.DEFINE_list("variants", None, "Rows of the table to measure, by number; all if not given.")
flags.DEFINE_enum("what", "times", ["times", "memory", "loop"], "What to measure.")
flags.DEFINE_string("only", None, "NUMBER of a row to run alone (used by --what=memory).")

CLASSES = 1000
LEARNING_RATE = 1e-4
MOMENTUM = 0.9
# Of a run for its peak memory: more of them do not raise it.
STEPS_FOR_MEMORY = 3

Step = Callable[[], object]


class Variant(NamedTuple):
    """One row of the table."""

    label: str
    norm: str
    """Whose batch normalization: "bnzoo", "keras", "torch", or "none"."""
    precision: str

    @property
    def policy(self) -> str:
        return "float32" if self.precision == "float32" else f"mixed_{self.precision}"


VARIANTS = (
    Variant("bnzoo", "bnzoo", "float32"),
    Variant("Keras' BN", "keras", "float32"),
    Variant("torch, channels last", "torch", "float32"),
    Variant("without BN", "none", "float32"),
    Variant("bnzoo", "bnzoo", "bfloat16"),
    Variant("Keras' BN", "keras", "bfloat16"),
    Variant("torch, channels last, autocast", "torch", "bfloat16"),
    Variant("without BN", "none", "bfloat16"),
)


class Bound(NamedTuple):
    """A figure that is asked for: the ratio of two rows."""

    above: int
    below: int
    at_least: float


BOUNDS = (
    Bound(1, 0, 1.1),
    Bound(2, 0, 1.3),
    Bound(3, 0, 1 / 1.05),
    Bound(5, 4, 1.3),
    Bound(6, 4, 1.0),
)


def data() -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels, the same for all."""
    rng = np.random.default_rng(0)
    shape = (FLAGS.batch_size, FLAGS.image_size, FLAGS.image_size, 3)
    images = rng.standard_normal(shape, dtype=np.float32)
    return images, rng.integers(0, CLASSES, FLAGS.batch_size)


def build(variant: Variant, activation: str | None = None) -> keras.Model:
    """The Keras network of a variant, with logits as its output unless told otherwise."""
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(variant.policy)
    try:
        model = bn_inception(
            input_shape=(FLAGS.image_size, FLAGS.image_size, 3),
            classes=CLASSES,
            classifier_activation=activation,
            stem=FLAGS.stem,
            batch_norm=None if variant.norm == "none" else "channel",
        )
        return convert_batch_norm(model, to="keras") if variant.norm == "keras" else model
    finally:
        keras.config.set_dtype_policy(before)


def keras_step(variant: Variant) -> Step:
    """A compiled training step."""
    model = build(variant)
    optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images, labels = map(tf.constant, data())

    def train(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)
        return value

    step = tf.function(train).get_concrete_function(images, labels)
    return lambda: step(images, labels).numpy()


def torch_step(variant: Variant) -> Step:
    """Torch's training step; its weights are float32 also under autocast."""
    import torch

    from .torch_inception import TorchInception

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = TorchInception(TABLES["paper"], FLAGS.stem, CLASSES)
    model = model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    images, labels = map(torch.from_numpy, data())
    images = images.permute(0, 3, 1, 2)  # Channels last in memory.
    autocast = variant.precision != "float32"

    def train() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(images)
        value = torch.nn.functional.cross_entropy(logits.float(), labels)
        value.backward()
        optimizer.step()
        return value.item()

    return train


def make_step(variant: Variant) -> Step:
    """The step of one variant."""
    return torch_step(variant) if variant.norm == "torch" else keras_step(variant)


def chosen() -> list[int]:
    """The numbers of the rows to measure."""
    return [int(number) for number in FLAGS.variants or range(len(VARIANTS))]


def report_times() -> None:
    """A table of medians, and the ratios that are asked for, as Markdown."""
    numbers = chosen()
    if any(VARIANTS[number].norm == "torch" for number in numbers):
        import torch

        from .torch_inception import check

        print(f"torch {torch.__version__}: the same network to {check(FLAGS.stem):.0e}")
    medians = interleaved_medians(
        {str(number): make_step(VARIANTS[number]) for number in numbers}, FLAGS.rounds, warm_up=2
    )
    milliseconds = {int(number): 1e3 * median for number, median in medians.items()}
    print(f"{machine()}; stem {FLAGS.stem}, {FLAGS.rounds} rounds\n")
    print("| | network | precision | step (ms) | images/s |\n|---:|---|---|---:|---:|")
    for number in numbers:
        row, ms = VARIANTS[number], milliseconds[number]
        speed = 1e3 * FLAGS.batch_size / ms
        print(f"| {number} | {row.label} | {row.precision} | {ms:.0f} | {speed:.1f} |")
    print("\n| ratio | of | asked: at least | seen |\n|---|---|---:|---:|")
    for above, below, at_least in BOUNDS:
        if above in milliseconds and below in milliseconds:
            names = f"{VARIANTS[above].label} / {VARIANTS[below].label}"
            ratio = milliseconds[above] / milliseconds[below]
            print(f"| {names} | {VARIANTS[above].precision} | {at_least:.2f} | {ratio:.2f} |")


def report_memory() -> None:
    """A table of peak resident memory."""
    print(f"{machine()}; stem {FLAGS.stem}\n")
    print("| | network | precision | peak memory (MB) |\n|---:|---|---|---:|")
    for number in chosen():
        row = VARIANTS[number]
        arguments = [f"--{key}={FLAGS[key].value}" for key in ("batch_size", "image_size", "stem")]
        peak = peak_memory(__spec__.name, f"--only={number}", *arguments)
        print(f"| {number} | {row.label} | {row.precision} | {peak / 2**20:.0f} |", flush=True)


def loop_step(variant: Variant) -> Step:
    """A step by the engine of the training loop."""
    model = build(variant, "softmax")  # The loop has Keras take the loss from its logits.
    optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
    optimizer.build(model.trainable_variables)
    counter = tf.Variable(0, dtype=tf.int64, trainable=False)
    train_steps = make_train_steps(model, optimizer, counter, FLAGS.batch_size, weight_decay=0.0)
    batches = tf.data.Dataset.from_tensors(data()).repeat()
    engine = Synchronous(train_steps, lambda first_step: iter(batches))
    return lambda: engine.run(0, 1)


def report_loop() -> None:
    """Medians of the bare step and of the loop's."""
    variant = VARIANTS[0]
    medians = interleaved_medians(
        {"bare": keras_step(variant), "loop": loop_step(variant)}, FLAGS.rounds, warm_up=2
    )
    bare, loop = 1e3 * medians["bare"], 1e3 * medians["loop"]
    print(f"{machine()}; stem {FLAGS.stem}, {FLAGS.rounds} rounds\n")
    print("| bare step (ms) | loop's step (ms) | overhead |\n|---:|---:|---:|")
    print(f"| {bare:.0f} | {loop:.0f} | {100 * (loop / bare - 1):.1f}% |")


def main(argv: Sequence[str]) -> None:
    """Prints what the flags ask for."""
    if len(argv) > 1:
        raise app.UsageError(f"takes flags only. Received: {argv[1:]}")
    if FLAGS.only:
        step = make_step(VARIANTS[int(FLAGS.only)])
        for _ in range(STEPS_FOR_MEMORY):
            step()
    else:
        {"times": report_times, "memory": report_memory, "loop": report_loop}[FLAGS.what]()


if __name__ == "__main__":
    app.run(main)
