"""A checkpoint holds everything: each variable of model, optimizer and random number generators."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import BatchNormalization
from training.checkpoints import KEPT, Checkpoints


def state(folder: Path) -> tuple[Checkpoints, list[tf.Variable]]:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3),
            BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer.build(model.trainable_variables)
    step = tf.Variable(0, dtype=tf.int64)
    sums = tf.Variable(np.zeros(3))
    variables = [variable.value for variable in (*model.variables, *optimizer.variables)]
    return Checkpoints(str(folder), model, optimizer, step, sums), [*variables, step, sums]


def test_everything_comes_back(tmp_path: Path) -> None:
    checkpoints, variables = state(tmp_path)
    # 4 of Dense, 4 of BN, the dropout's seed, 6 slots, 4 of the optimizer's own, step and sums.
    assert len(variables) >= 4 + 4 + 1 + 6 + 4 + 2
    for number, variable in enumerate(variables, start=1):
        variable.assign(tf.cast(tf.fill(variable.shape, number), variable.dtype))
    variables[-2].assign(70)
    checkpoints.save()
    other, restored = state(tmp_path)
    assert other.restore() == 70
    for expected, found in zip(variables, restored, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_without_a_checkpoint_the_step_is_0(tmp_path: Path) -> None:
    checkpoints, _ = state(tmp_path)
    assert (checkpoints.restore(), checkpoints.newest) == (0, None)


def test_the_newest_few_are_kept_and_named_by_their_step(tmp_path: Path) -> None:
    checkpoints, variables = state(tmp_path)
    for step in range(10, 60, 10):
        variables[-2].assign(step)
        checkpoints.save()
    assert checkpoints.newest == "ckpt-50"
    kept = sorted(path.stem for path in tmp_path.glob("*.index"))
    assert kept == ["ckpt-30", "ckpt-40", "ckpt-50"][-KEPT:]


@pytest.mark.parametrize("index", [0, 4, 7])
def test_a_value_that_is_not_finite_is_found(index: int, tmp_path: Path) -> None:
    checkpoints, variables = state(tmp_path)
    assert checkpoints.all_finite()
    bad = variables[index].numpy()
    bad.flat[-1] = np.nan
    variables[index].assign(bad)
    assert not checkpoints.all_finite()
