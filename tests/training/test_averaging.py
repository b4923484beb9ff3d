"""The moving averages of the weights against NumPy, on one device and on two."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from training import averaging
from training.averaging import WeightAverages


def test_example() -> None:
    assert doctest.testmod(averaging).attempted == 5
    assert doctest.testmod(averaging).failed == 0


def test_averages_against_numpy() -> None:
    random = np.random.default_rng(5)
    weights = [keras.Variable(random.normal(size=shape)) for shape in ((3, 2), (4,))]
    averages = WeightAverages(weights, 0.8)
    expected = [np.float64(weight.numpy()) for weight in weights]
    step = tf.Variable(0, dtype=tf.int64)
    update = tf.function(lambda: averages.update(step.assign_add(1)))
    decays = []
    for number in range(1, 61):
        for place, weight in enumerate(weights):
            weight.assign(random.normal(size=weight.shape))
            decays.append(min(0.8, (1 + number) / (10 + number)))
            expected[place] = decays[-1] * expected[place] + (1 - decays[-1]) * np.float64(
                weight.numpy()
            )
        update()
        for average, one in zip(averages.variables, expected, strict=True):
            np.testing.assert_allclose(average, one, rtol=1e-5, atol=1e-6)
    assert decays[0] == 2 / 11
    assert decays[-1] == 0.8
    raw = [weight.numpy() for weight in weights]
    averages.put_in()
    for weight, before, one in zip(weights, raw, expected, strict=True):
        np.testing.assert_allclose(weight.numpy(), one, rtol=1e-5, atol=1e-6)
        assert np.abs(weight.numpy() - before).max() > 0.1


# Two devices need a process of their own: they have to be made before TensorFlow has begun.
ON_TWO = """
import keras, numpy as np, sys, tensorflow as tf
from training.averaging import WeightAverages
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
found = []
for strategy in (tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), tf.distribute.get_strategy()):
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        weight = keras.Variable(np.arange(1.0, 5.0))
        averages = WeightAverages([weight], 0.9)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([weight])
        step = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def one():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight.value ** 2) / replicas
        optimizer.apply(tape.gradient(loss, [weight.value]), [weight])
        averages.update(step.assign_add(1))

    @tf.function
    def several(count):
        for _ in tf.range(count):
            strategy.run(one)

    several(tf.constant(3))
    saved = tf.train.Checkpoint(averages=averages.variables).save(f"{sys.argv[1]}/{replicas}")
    several(tf.constant(4))
    found.append(averages.variables[0].numpy())
    locals_ = strategy.experimental_local_results(averages.variables[0])
    assert len(locals_) == replicas and all((one.numpy() == found[-1]).all() for one in locals_)
    # What one strategy saved another goes on from.
    tf.train.Checkpoint(averages=averages.variables).restore(
        tf.train.latest_checkpoint(sys.argv[1])
    ).assert_consumed()
    restored = averages.variables[0].numpy()
    averages.put_in()
    assert (weight.numpy() == restored).all() and (restored != found[-1]).all()
np.testing.assert_allclose(*found, rtol=1e-6)
print("done")
"""


def test_two_replicas_keep_the_averages_of_one(tmp_path: Path) -> None:
    script = tmp_path / "on_two.py"  # AutoGraph reads the source.
    script.write_text(ON_TWO)
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert result.stdout.endswith("done\n"), result.stderr
