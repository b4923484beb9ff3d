"""One batch normalization layer, side by side with its peers, in one run.

    python -m benchmarks.layers                 # times, all shapes, float32 and bfloat16
    python -m benchmarks.layers --memory        # peak memory, each in a process of its own

The peers: keras.layers.BatchNormalization; TensorFlow's FusedBatchNormV3 op alone, with
moving statistics left out (the floor for a TensorFlow layer); torch's BatchNorm with
channels last. Training is a forward and a backward pass for the gradients of the input,
gamma and beta, and the update of the moving statistics.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from absl import app, flags

import bnzoo

from .timing import copy_bandwidth, interleaved_medians, machine, peak_memory

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 30, "Measured rounds for each shape.")
flags.DEFINE_bool("memory", False, "Measure peak memory instead of times.")
flags.DEFINE_string("only", None, "IMPLEMENTATION:SHAPE:DTYPE to run alone (used by --memory).")

SHAPES = {
    "112x112x64": (32, 112, 112, 64),
    "28x28x192": (32, 28, 28, 192),
    "7x7x1024": (32, 7, 7, 1024),
    "dense 1024": (32, 1024),
}
DTYPES = ("float32", "bfloat16")
EPSILON = 1e-3

Step = Callable[[], object]


def layer_step(layer: keras.layers.Layer, x: tf.Tensor, dy: tf.Tensor, training: bool) -> Step:
    """A compiled training or inference step of a Keras layer."""
    layer.build(x.shape)

    @tf.function
    def train(x: tf.Tensor, dy: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return [y, *tape.gradient(y, [x, *layer.trainable_variables], dy)]

    @tf.function
    def infer(x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        return layer(x, training=False)

    step = train if training else infer
    return lambda: step(x, dy)


def raw_step(x: tf.Tensor, dy: tf.Tensor, training: bool) -> Step:
    """The op alone."""
    channels = x.shape[-1]
    shape = x.shape if x.shape.rank == 4 else (x.shape[0], 1, 1, channels)
    x, dy = tf.reshape(x, shape), tf.reshape(dy, shape)
    gamma, beta = tf.Variable(tf.ones(channels)), tf.Variable(tf.zeros(channels))
    mean, variance = tf.Variable(tf.zeros(channels)), tf.Variable(tf.ones(channels))

    def forward(x: tf.Tensor) -> tf.Tensor:
        statistics = ([], []) if training else (mean, variance)
        return tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=gamma,
            offset=beta,
            mean=statistics[0],
            variance=statistics[1],
            epsilon=EPSILON,
            is_training=training,
        ).y

    @tf.function
    def train(x: tf.Tensor, dy: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = forward(x)
        return [y, *tape.gradient(y, [x, gamma, beta], dy)]

    infer = tf.function(lambda x, dy: forward(x))
    step = train if training else infer
    return lambda: step(x, dy)


def torch_step(shape: Sequence[int], dtype: str, training: bool) -> Step:
    """Torch's layer on channels-last data; its parameters are float32 too."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rank_two = len(shape) == 2
    layer = (torch.nn.BatchNorm1d if rank_two else torch.nn.BatchNorm2d)(shape[-1], eps=EPSILON)
    layer.train(training)
    x = torch.randn(shape, dtype=getattr(torch, dtype))
    dy = torch.randn(shape, dtype=getattr(torch, dtype))
    if not rank_two:
        x, dy = x.permute(0, 3, 1, 2), dy.permute(0, 3, 1, 2)  # Channels last in memory.
    x.requires_grad_(training)

    def train() -> object:
        return torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], dy)

    def infer() -> object:
        with torch.no_grad():
            return layer(x)

    return train if training else infer


def make_step(implementation: str, shape: Sequence[int], dtype: str, training: bool) -> Step:
    """The step of one implementation, on data of its own."""
    if implementation == "torch":
        return torch_step(shape, dtype, training)
    x, dy = (tf.cast(tf.random.normal(shape, seed=seed), dtype) for seed in (1, 2))
    if implementation == "raw op":
        return raw_step(x, dy, training)
    module = {"bnzoo": bnzoo.layers, "keras": keras.layers}[implementation]
    policy = dtype if dtype == "float32" else f"mixed_{dtype}"
    layer = module.BatchNormalization(epsilon=EPSILON, dtype=policy)
    return layer_step(layer, x, dy, training)


def implementations() -> list[str]:
    """Those that are installed."""
    have_torch = importlib.util.find_spec("torch") is not None
    return ["bnzoo", "keras", "raw op"] + ["torch"] * have_torch


def report_times() -> None:
    """A table of medians and ratios, as Markdown."""
    names = implementations()
    bandwidth = copy_bandwidth()
    print(f"{machine()}\ncopy bandwidth {bandwidth / 1e9:.1f} GB/s; {FLAGS.rounds} rounds\n")
    print("| mode | dtype | shape | " + " | ".join(f"{name} ms" for name in names), end="")
    print(" | keras / bnzoo | bnzoo / raw op | bnzoo / floor |")
    print("|---" * (len(names) + 6) + "|")
    for training in (True, False):
        # Forward: x read for the statistics and again to normalize, y written. Backward: x
        # and dy read for the sums and again for dx, dx written. Inference: x read, y written.
        passes = 8 if training else 2
        for dtype in DTYPES:
            for label, shape in SHAPES.items():
                steps = {name: make_step(name, shape, dtype, training) for name in names}
                medians = interleaved_medians(steps, FLAGS.rounds, warm_up=5)
                size = tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size
                ratios = (
                    medians["keras"] / medians["bnzoo"],
                    medians["bnzoo"] / medians["raw op"],
                    medians["bnzoo"] / (passes * size / bandwidth),
                )
                print(f"| {'training' if training else 'inference'} | {dtype} | {label} | ", end="")
                print(" | ".join(f"{medians[name] * 1e3:.2f}" for name in names), end=" | ")
                print(" | ".join(f"{ratio:.2f}" for ratio in ratios), "|", flush=True)


def report_memory() -> None:
    """A table of peaks above an idle process that has imported the same."""
    print(
        f"{machine()}\n\n| dtype | shape | bnzoo MB | keras MB | raw op MB |\n|---|---|---|---|---|"
    )
    idle = peak_memory(__spec__.name, "--only=none")
    for dtype in DTYPES:
        for label in SHAPES:
            peaks = [
                peak_memory(__spec__.name, f"--only={name}:{label}:{dtype}") - idle
                for name in ("bnzoo", "keras", "raw op")
            ]
            row = " | ".join(f"{peak / 2**20:.0f}" for peak in peaks)
            print(f"| {dtype} | {label} | {row} |", flush=True)


def main(argv: Sequence[str]) -> None:
    """Prints what the flags ask for."""
    if FLAGS.only == "none":
        tf.zeros([])
    elif FLAGS.only:
        implementation, label, dtype = FLAGS.only.split(":")
        step = make_step(implementation, SHAPES[label], dtype, training=True)
        for _ in range(5):
            step()
    elif FLAGS.memory:
        report_memory()
    else:
        report_times()


if __name__ == "__main__":
    app.run(main)
