"""Counting against NumPy, and metrics.csv."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from training.command_line import RunFailed
from training.metrics import COLUMNS, MetricsFile, in_top, make_evaluator


@pytest.mark.parametrize("k", [1, 2, 5])
def test_in_top_against_numpy(k: int) -> None:
    random = np.random.default_rng(k)
    scores = random.integers(0, 4, (200, 7)).astype(np.float32)  # Many are equal.
    labels = random.integers(0, 7, 200)
    # A stable sort keeps equal scores in the order of the classes, as argmax takes the first.
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    expected = (best == labels[:, np.newaxis]).any(axis=1)
    np.testing.assert_array_equal(in_top(tf.constant(scores), tf.constant(labels), k), expected)


def test_collapsed_and_broken_networks_are_not_right() -> None:
    labels = tf.range(6, dtype=tf.int64)
    equal = in_top(tf.ones((6, 6)), labels, 5)
    assert equal.numpy().tolist() == [True] * 5 + [False]
    assert not in_top(tf.fill((6, 6), np.float32(np.nan)), labels, 5).numpy().any()


def batches(scores: np.ndarray, labels: np.ndarray, size: int) -> tf.data.Dataset:
    """Batches of one size; what fills the last up would count as right if it were counted."""
    missing = -len(scores) % size
    mask = np.r_[np.ones(len(scores)), np.zeros(missing)].astype(np.float32)
    filling = np.tile(np.eye(scores.shape[1], dtype=np.float32)[0], (missing, 1))
    columns = (
        np.concatenate([scores, filling]),
        np.r_[labels, np.zeros(missing, np.int64)],
        mask,
    )
    return tf.data.Dataset.from_tensor_slices(columns).batch(size)


@pytest.mark.parametrize("size", [1, 8, 30, 50])
def test_evaluation_is_the_mean_over_all_examples(size: int) -> None:
    random = np.random.default_rng(0)
    scores = random.dirichlet(np.ones(8), 30).astype(np.float32)
    labels = random.integers(0, 8, 30)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Activation("linear")])
    found = make_evaluator(model)(batches(scores, labels, size), 30)
    order = np.argsort(-scores, axis=1)
    hits = order == labels[:, np.newaxis]
    assert found.examples == 30
    assert found.accuracy == pytest.approx(hits[:, :1].sum() / 30, abs=1e-12)
    assert found.top5_accuracy == pytest.approx(hits[:, :5].sum() / 30, abs=1e-12)
    # Keras clips probabilities at 1e-7 and renormalizes in float32.
    expected = -np.log(scores[np.arange(30), labels].astype(np.float64)).mean()
    assert found.loss == pytest.approx(expected, rel=1e-5)


def test_top5_of_fewer_classes_is_everything() -> None:
    scores = np.random.default_rng(0).dirichlet(np.ones(3), 10).astype(np.float32)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Activation("linear")])
    found = make_evaluator(model)(batches(scores, np.arange(10) % 3, 4), 10)
    assert found.top5_accuracy == 1.0


def test_another_number_of_examples_fails() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Activation("softmax")])
    data = batches(np.zeros((10, 3), np.float32), np.zeros(10, np.int64), 4)
    with pytest.raises(RunFailed, match=r"10 examples were evaluated, but the split has 11: "):
        make_evaluator(model)(data, 11)


def write(path: Path, last_step: int, steps: list[int]) -> None:
    file = MetricsFile(str(path), last_step)
    for step in steps:
        file.write({"step": step, "epoch": step / 10, "loss": 1 / 3})
    file.sync()
    file.close()


def test_metrics_file_goes_on_without_a_gap_or_a_repeat(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, 0, [10, 20, 30, 40])
    with open(path, "a") as file:
        file.write("50,5,0.3")  # Torn: the process was killed as it wrote.
    write(path, 20, [30, 40])
    write(path, 40, [50])
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert [line.split(",")[0] for line in lines[1:]] == ["10", "20", "30", "40", "50"]
    assert lines[1] == "10,1,0.333333,,,,,,"


@pytest.mark.parametrize("bad", [b"\xff\xfe", bytes(8), b'"', b"20,"])
def test_a_damaged_row_is_left_out_and_told(
    bad: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.csv"
    write(path, 0, [10, 20, 30])
    assert capsys.readouterr().out == ""
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join((*whole[:2], whole[2].replace(b"0.33", bad), whole[3])))
    write(path, 30, [40])
    assert [line.split(",")[0] for line in path.read_text().splitlines()[1:]] == ["10", "30", "40"]
    assert capsys.readouterr().out == f"{path}: 1 damaged lines are left out\n"


def test_values_that_are_no_numbers_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(str(path), 0)
    figures = (7, 0.25, np.float64("inf"), float("nan"), 1e-12, -1e30, np.float32(-np.inf), 0.0, 1)
    file.write(dict(zip(COLUMNS, figures, strict=True)))
    file.close()
    before = path.read_text()
    write(path, 7, [])
    assert path.read_text() == before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("last_step", [0, 10])
def test_a_folder_in_its_place_is_one_line(last_step: int, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(RunFailed, match=r"metrics\.csv cannot be (read|written): Is a directory"):
        MetricsFile(str(tmp_path / "metrics.csv"), last_step)


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, 0, [10])
    write(path, 0, [5])
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == ["step", "5"]
