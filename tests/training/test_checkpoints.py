"""A checkpoint holds everything: each variable of model, optimizer and random number generators."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import BatchNormalization
from training.checkpoints import KEPT, Checkpoints
from training.command_line import RunFailed


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


def test_what_is_saved_outlasts_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[int, int] = {}

    def note(opened: int) -> None:
        status = os.fstat(opened)
        written[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", note)
    saved(tmp_path, 10, 20)
    files = {path.name: path.stat() for path in (*tmp_path.glob("*20*"), tmp_path / "checkpoint")}
    assert set(files) == {"ckpt-20.index", "ckpt-20.data-00000-of-00001", "checkpoint"}
    for status in files.values():
        assert written[status.st_ino] == status.st_size
    assert tmp_path.stat().st_ino in written

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match=r"checkpoint 30 in .* cannot be written: .*No space left"):
        saved(tmp_path, 30)


@pytest.mark.parametrize("index", [0, 4, 7])
def test_a_value_that_is_not_finite_is_found(index: int, tmp_path: Path) -> None:
    checkpoints, variables = state(tmp_path)
    assert checkpoints.all_finite()
    bad = variables[index].numpy()
    bad.flat[-1] = np.nan
    variables[index].assign(bad)
    assert not checkpoints.all_finite()


def saved(folder: Path, *steps: int) -> None:
    checkpoints, variables = state(folder)
    for step in steps:
        for number, variable in enumerate(variables[:-2]):
            variable.assign(tf.cast(tf.fill(variable.shape, step + number), variable.dtype))
        variables[-2].assign(step)
        checkpoints.save()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, change_a_byte, Path.unlink])
@pytest.mark.parametrize("part", ["index", "data-00000-of-00001"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    damage: Callable[[Path], None],
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved(tmp_path, 10, 20, 30)
    damage(tmp_path / f"ckpt-30.{part}")
    checkpoints, variables = state(tmp_path)
    assert checkpoints.restore() == 20
    assert checkpoints.newest == "ckpt-20"
    for number, variable in enumerate(variables[:-2]):
        assert (variable.numpy() == np.asarray(20 + number, variable.dtype.as_numpy_dtype)).all()
    lines = capsys.readouterr().out.splitlines()
    if damage is Path.unlink and part == "index":
        assert lines == []  # Without its index it is none, as where a process was killed in saving.
    else:
        assert len(lines) == 1
        assert lines[0].startswith(f"the checkpoint {tmp_path}/ckpt-30 is damaged: ")
    # The run goes on, and what it saves is the newest.
    variables[-2].assign(30)
    checkpoints.save()
    assert state(tmp_path)[0].restore() == 30


def empty(path: Path) -> None:
    path.write_bytes(b"")


def overwrite(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize("damage", [cut, empty, overwrite, Path.unlink])
def test_a_damaged_list_of_checkpoints_hides_none(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    saved(tmp_path, 10, 200)
    damage(tmp_path / "checkpoint")
    assert state(tmp_path)[0].restore() == 200


@pytest.mark.parametrize("length", [0, 50])
def test_killed_in_the_first_save_a_run_begins_anew(
    length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 10)
    index = tmp_path / "ckpt-10.index"
    index.write_bytes(index.read_bytes()[:length])
    # One that was finished once is not given up without a word.
    with pytest.raises(RunFailed, match=r"ckpt-10 cannot be restored: .*--overwrite begins the"):
        state(tmp_path)[0].restore()
    (tmp_path / "checkpoint").unlink()
    checkpoints, variables = state(tmp_path)
    before = [variable.numpy() for variable in variables]
    assert (checkpoints.restore(), checkpoints.newest) == (0, None)
    for expected, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected)
    assert capsys.readouterr().out == (
        f"the first checkpoint {tmp_path}/ckpt-10 was not finished: the run begins anew\n"
    )
    # The next one takes its place.
    variables[-2].assign(10)
    checkpoints.save()
    assert state(tmp_path)[0].restore() == 10


def test_a_machine_that_went_down_twice_in_a_first_save_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind SIGTERM a run saves at whatever step it has come to."""
    saved(tmp_path, 5, 10)
    for path in (*tmp_path.glob("*.index"), tmp_path / "checkpoint"):
        path.write_bytes(b"")
    # If one was finished, the run is not given up without a word.
    (tmp_path / "aside").mkdir()
    saved(tmp_path / "aside", 5)
    whole = (tmp_path / "aside" / "ckpt-5.index").read_bytes()
    (tmp_path / "ckpt-5.index").write_bytes(whole)
    cut(tmp_path / "ckpt-5.data-00000-of-00001")
    with pytest.raises(RunFailed, match=r"ckpt-5 cannot be restored: .*--overwrite begins the"):
        state(tmp_path)[0].restore()
    (tmp_path / "ckpt-5.index").write_bytes(b"")
    capsys.readouterr()
    checkpoints, variables = state(tmp_path)
    assert (checkpoints.restore(), checkpoints.newest) == (0, None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"the checkpoint {tmp_path}/ckpt-10 is damaged: ")
    assert lines[1] == (
        f"the first checkpoint {tmp_path}/ckpt-5 was not finished: the run begins anew"
    )
    variables[-2].assign(7)
    checkpoints.save()
    assert state(tmp_path)[0].restore() == 7


def test_what_was_being_written_is_removed(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    before = {path.name for path in tmp_path.iterdir()}
    (tmp_path / "ckpt-20_temp").mkdir()
    (tmp_path / "ckpt-20_temp" / "part-00000-of-00001.data-00000-of-00001").write_bytes(b"x")
    (tmp_path / "checkpoint.tmp0a1b2c").write_text("model_")
    assert state(tmp_path)[0].restore() == 10
    assert {path.name for path in tmp_path.iterdir()} == before


def test_what_a_killed_process_left_out_of_the_list_goes_in_its_turn(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10)
    listed = (tmp_path / "checkpoint").read_bytes()
    saved(tmp_path, 15)
    (tmp_path / "checkpoint").write_bytes(listed)  # Killed between the index and the list.
    (tmp_path / "ckpt-3.data-00000-of-00001").write_bytes(b"x")  # As it removed this one.
    (tmp_path / "ckpt-90.index").write_bytes(b"x")  # Damaged, and passed over for 15.
    (tmp_path / "ckpt-1.mine").write_text("x")
    steps = []
    checkpoints, variables = state(tmp_path)
    assert checkpoints.restore() == 15
    for step in (20, 30, 40, 95):
        variables[-2].assign(step)
        checkpoints.save()
        for kind in ("index", "data*"):
            numbers = [int(path.stem.split("-")[1]) for path in tmp_path.glob(f"ckpt-*.{kind}")]
            steps.append(sorted(numbers))
    # TensorFlow has 5, 10 and 20 in its list first.
    assert steps[0] == [5, 10, 15, 20, 90]
    assert steps[2::2] == [[10, 15, 20, 30, 90], [20, 30, 40, 90], [30, 40, 90, 95]]
    assert [[step for step in index if step != 90] for index in steps[0::2]] == steps[1::2]
    assert (tmp_path / "ckpt-1.mine").exists()
    assert state(tmp_path)[0].restore() == 95

    # Without a list, the newest are kept.
    (tmp_path / "checkpoint").unlink()
    saved(tmp_path, 100)
    numbers = [int(path.stem.split("-")[1]) for path in tmp_path.glob("ckpt-*.index")]
    assert sorted(numbers) == [90, 95, 100]


def test_a_first_checkpoint_without_its_data_is_not_given_up(tmp_path: Path) -> None:
    """The index is whole, so the data was."""
    saved(tmp_path, 10)
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "ckpt-10.data-00000-of-00001").unlink()
    with pytest.raises(RunFailed, match=r"ckpt-10 cannot be restored: .*--overwrite begins the"):
        state(tmp_path)[0].restore()


def test_checkpoints_of_another_network_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    variable = tf.Variable(0, dtype=tf.int64)
    optimizer = keras.optimizers.SGD()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer.build(model.trainable_variables)
    other = Checkpoints(str(tmp_path), model, optimizer, variable, tf.Variable(np.zeros(3)))
    with pytest.raises(RunFailed, match=r"ckpt-10 cannot be restored: .*--overwrite begins the"):
        other.restore()
