"""The command bnzoo-train from end to end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from bnzoo.preprocessing import Preprocessing
from training import train
from training.settings import resolve

from .helpers import given, image_folder, read_metrics, settings, train_argv

# With the folder of a run as its argument: what a process that trains there does.
HOLDS_THE_LOCK = """
import sys, time
from training.run_directory import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_run_directory_has_what_the_contract_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = train_argv(tmp_path / "run", "--steps=150", "--population_batches=5")
    assert train.main(argv) == 0
    run = tmp_path / "run"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "config.json",
        "examples",
        "labels.txt",
        "metrics.csv",
        "model.keras",
        "preprocessing.json",
        "tensorboard",
    ]
    assert (run / "labels.txt").read_text() == "".join(f"{digit}\n" for digit in range(10))
    preprocessing = Preprocessing.from_json((run / "preprocessing.json").read_text())
    assert (preprocessing.image_size, preprocessing.binarize_threshold) == ((8, 8), 127.5)
    assert json.loads((run / "config.json").read_text())["flags"]["steps"] == 150
    model = keras.models.load_model(run / "model.keras")
    assert (model.input_shape, model.output_shape) == ((None, 8, 8, 1), (None, 10))
    # 1437 / 60 = 23.95 steps an epoch: evaluations each 24 steps by default.
    evaluated = [int(row["step"]) for row in read_metrics(run) if row["eval_loss"]]
    assert evaluated == [24, 48, 72, 96, 120, 144, 150]
    assert float(read_metrics(run)[-1]["eval_accuracy"]) > 0.6  # Chance is 0.1.
    capsys.readouterr()

    # The same command again has nothing to do; --overwrite has.
    assert train.main(argv) == 0
    assert capsys.readouterr().out == f"{run} is finished: --overwrite trains it anew\n"
    assert train.main([*argv, "--overwrite", "--steps=2"]) == 0
    assert [row["step"] for row in read_metrics(run)] == ["2"]


def test_bad_flags_build_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "train", None)
    assert train.main(train_argv(tmp_path / "run", "--learning_rate=-1", "--recipe=no")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert train.main([*train_argv(tmp_path / "run"), "stray"]) == 2
    assert "there are no arguments besides flags. Received: stray" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_run_of_another_configuration_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(train_argv(tmp_path, "--steps=2")) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    capsys.readouterr()
    argv = train_argv(tmp_path, "--steps=2", "--seed=1", "--model_args=epsilon=0.01")
    assert train.main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--model_args (there {}, now {'epsilon': 0.01}), --seed (there 0, now 1)" in error
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_folder_in_which_another_process_trains_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = train_argv(tmp_path, "--steps=2", "--population_batches=1")
    assert train.main(argv) == 0
    (tmp_path / "model.keras").unlink()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, tmp_path], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == b"held\n"
        for more in ([], ["--overwrite"]):
            assert train.main([*argv, *more]) == 1
            error = capsys.readouterr().err
            assert error.startswith(f"bnzoo-train: another process trains in {tmp_path}: wait ")
            assert error.count("\n") == 1
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        other.kill()
    assert train.main(argv) == 0


def test_data_that_changed_under_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = image_folder(tmp_path / "data", {"train": {"a": 4, "b": 4}, "test": {"a": 3, "b": 2}})
    argv = train_argv(tmp_path / "run", f"--dataset=folder:{root}", "--batch_size=4", "--steps=3")
    assert train.main(argv) == 0
    (tmp_path / "run" / "model.keras").unlink()
    labels = (tmp_path / "run" / "labels.txt").read_text()
    for split in ("train", "test"):
        (root / split / "a").rename(root / split / "z")
    assert train.main(argv) == 2
    assert capsys.readouterr().err == (
        f"bnzoo-train: --run_dir={tmp_path}/run holds a run on other classes: class 0 was 'a', now "
        "it is 'b'. Give another --run_dir, or --overwrite\n"
    )
    assert (tmp_path / "run" / "labels.txt").read_text() == labels
    for split in ("train", "test"):
        (root / split / "z").rename(root / split / "a")
    (root / "train" / "a" / "0.png").unlink()
    assert train.main(argv) == 2
    assert "holds a run on other data: {'train_examples': 8, " in capsys.readouterr().err


def test_one_class_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = image_folder(tmp_path / "data", {"train": {"a": 4}, "test": {"a": 2}})
    argv = train_argv(tmp_path / "run", f"--dataset=folder:{root}", "--steps=1")
    assert train.main(argv) == 1
    assert capsys.readouterr().err == (
        f"bnzoo-train: folder:{root} has one class, a: there is nothing to learn from fewer than "
        "two\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["14", "a"])  # One of each kind: the others only have more layers.
def test_rectifier_networks_train_by_their_recipe(name: str, tmp_path: Path) -> None:
    argv = [
        "bnzoo-train",
        f"--model=prelu_net_{name}",
        "--model_args=width_multiplier=0.02",
        "--dataset=digits",
        "--image_size=64",
        "--batch_size=4",
        "--steps=2",
        f"--run_dir={tmp_path}",
    ]
    assert train.main(argv) == 0
    assert read_metrics(tmp_path)[-1]["learning_rate"] == "0.01"
    preprocessing = Preprocessing.from_json((tmp_path / "preprocessing.json").read_text())
    assert (preprocessing.mean, preprocessing.scale) == ((114.8,), (1.0,))


def test_missing_data_is_one_line_and_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = train_argv(tmp_path / "run", f"--dataset=folder:{tmp_path}/absent")
    assert train.main(argv) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"there is no folder {tmp_path}/absent" in error
    assert not (tmp_path / "run").exists()


def test_default_names() -> None:
    assert train.default_name(settings()) == "mnist_bn_digits"
    chosen = resolve(given("--recipe=bn_x5", "--dataset=folder:/data/my images"))
    assert train.default_name(chosen) == "bn_x5_folder__data_my_images"


def test_killed_run_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    """SIGKILL, twice, at whatever step the process has come to."""
    flags = ("--steps=1200", "--checkpoint_every=40", "--log_every=30", "--momentum=0.9")
    assert train.main(train_argv(tmp_path / "whole", *flags)) == 0
    command = [sys.executable, "-m", "training.train", *train_argv(tmp_path / "killed", *flags)[1:]]
    checkpoints = tmp_path / "killed" / "checkpoints"
    for wanted in (1, 6):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            numbers = [int(path.stem.split("-")[1]) for path in checkpoints.glob("ckpt-*.index")]
            if max(numbers, default=0) >= 40 * wanted:
                break
            time.sleep(0.01)
        assert process.poll() is None, "it ended by itself"
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (tmp_path / "killed" / "model.keras").exists()
    assert train.main(train_argv(tmp_path / "killed", *flags)) == 0
    whole, killed = (
        keras.models.load_model(tmp_path / run / "model.keras").get_weights()
        for run in ("whole", "killed")
    )
    for expected, found in zip(whole, killed, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    steps = [int(row["step"]) for row in read_metrics(tmp_path / "killed")]
    # Rows each 30 steps and, an epoch being 23.95 steps, each 24.
    assert steps == [step for step in range(1, 1201) if step % 30 == 0 or step % 24 == 0]


@pytest.mark.data
def test_mnist_learns(tmp_path: Path, data_folder: str) -> None:
    argv = [
        "bnzoo-train",
        "--model=mnist_mlp",
        "--dataset=mnist",
        f"--data_dir={data_folder}/tensorflow_datasets",
        "--train_split=train[:6000]",
        "--eval_split=test[:1000]",
        f"--run_dir={tmp_path}",
        "--steps=400",
    ]
    assert train.main(argv) == 0
    # An oracle's bound: a nearest-class-mean classifier reaches about 0.8 on MNIST.
    assert float(read_metrics(tmp_path)[-1]["eval_accuracy"]) > 0.8
