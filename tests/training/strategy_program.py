"""Trains a small network under a strategy, and leaves its variables in a file: a program for tests.

Usage: strategy_program.py OUTPUT STEPS flags of bnzoo-train
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

from bnzoo.layers import BatchNormalization
from tests.training.helpers import given, settings
from training import data, strategies
from training.placement import placement
from training.running import Run
from training.settings import Settings
from training.stopping import StopRequest
from training.strategies import Devices, synchronize

MODEL = ("--model=mnist_mlp", "--dataset=digits", "--image_size=8")


def network(chosen: Settings, devices: Devices) -> keras.Model:
    """A convolution and a dense layer, each with BN of uneven gamma, and a head."""
    keras.utils.set_random_seed(chosen.seed)
    spread = keras.initializers.RandomUniform(0.5, 1.5, seed=1)
    with devices.strategy.scope():
        image = x = keras.Input((8, 8, 1))
        x = keras.layers.Conv2D(4, 3, use_bias=False)(x)
        x = BatchNormalization(gamma_initializer=spread, momentum=0.9)(x)
        x = keras.layers.Flatten()(keras.layers.ReLU()(x))
        x = keras.layers.Dense(12)(x)
        x = BatchNormalization(gamma_initializer=spread, momentum=0.9)(x)
        x = keras.layers.Dense(10, activation="softmax")(keras.layers.ReLU()(x))
        model = keras.Model(image, x)
    if devices.replicas > 1 and chosen.synchronized_batch_norm:
        synchronize(model)
    return model


def main() -> None:
    output, steps, *argv = sys.argv[1:]
    chosen = settings(*argv)
    devices = strategies.open_devices(chosen, placement(given(*MODEL, *argv)), output)
    inputs = data.open_inputs(chosen)
    run = Run(chosen, inputs, network(chosen, devices), output + "_run", devices, StopRequest())
    initial = [variable.numpy() for variable in run.model.variables]
    first = run.engine.run(0, 1)
    more = run.engine.run(1, int(steps) - 1)
    values = [variable.numpy() for variable in (*run.model.variables, *run.optimizer.variables)]
    result = run.evaluate()
    columns = [np.concatenate(pair) for pair in zip(first, more, strict=True)]
    np.savez(
        f"{output}_{devices.process}.npz",
        *values,
        **{f"initial_{number}": value for number, value in enumerate(initial)},
        **{f"column_{number}": column for number, column in enumerate(columns)},
        evaluation=[result.examples, result.loss, result.accuracy, result.top5_accuracy],
        step=run.step.numpy(),
        traces=run.engine.traces,
    )


if __name__ == "__main__":
    main()
