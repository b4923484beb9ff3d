"""bnzoo-evaluate: exact counts, and what it says of runs that it cannot evaluate."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

from bnzoo.preprocessing import Preprocessing
from training import evaluate, train

from .helpers import image_folder, train_argv


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    assert train.main(train_argv(path, "--steps=60", "--population_batches=5")) == 0
    return path


def digits_test_set() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    loaded = load_digits()
    chosen = np.random.RandomState(0).permutation(1797)[1437:]
    levels = np.round(loaded.images[chosen] * 255 / 16)
    return np.where(levels > 127.5, 1.0, 0.0)[..., np.newaxis], loaded.target[chosen]


@pytest.mark.parametrize("batch_size", [None, 1, 7, 360, 500])
def test_each_example_counts_once(
    batch_size: int | None, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, labels = digits_test_set()
    probabilities = keras.models.load_model(run / "model.keras").predict(images, verbose=0)
    order = np.argsort(-probabilities, axis=1) == labels[:, np.newaxis]
    capsys.readouterr()
    flags = [] if batch_size is None else [f"--batch_size={batch_size}"]
    assert evaluate.main(["bnzoo-evaluate", str(run), *flags]) == 0
    output = capsys.readouterr().out
    found = re.fullmatch(r"examples (\d+)  top-1 (\S+)  top-5 (\S+)  loss (\S+)\n", output)
    assert found, output
    assert int(found[1]) == 360
    assert found[2] == f"{order[:, 0].sum() / 360:.4f}"
    assert found[3] == f"{order[:, :5].sum() / 360:.4f}"
    loss = -np.log(np.float64(probabilities)[np.arange(360), labels]).mean()
    assert float(found[4]) == pytest.approx(loss, abs=2e-4)


def test_another_split(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["bnzoo-evaluate", str(run), "--eval_split=train"]) == 0
    assert capsys.readouterr().out.startswith("examples 1437  ")


def test_another_data_set_must_have_the_same_classes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = image_folder(tmp_path, {"test": {"a": 1, "b": 1}})
    assert evaluate.main(["bnzoo-evaluate", str(run), f"--dataset=folder:{root}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--dataset must have the 10 classes that the network was trained on" in error


def test_names_of_classes_may_hold_what_divides_lines_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"a\u2028b": 2, "c\fd": 1, "e": 1}
    root = image_folder(tmp_path / "data", {"train": names, "val": names})
    flags = ("--steps=1", "--batch_size=2", "--population_batches=0", f"--dataset=folder:{root}")
    assert train.main(train_argv(tmp_path / "run", *flags)) == 0
    capsys.readouterr()
    assert evaluate.main(["bnzoo-evaluate", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("examples 4  ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("preprocessing.json", None, "preprocessing.json cannot be read: No such file"),
        ("preprocessing.json", b"{}", "preprocessing.json is damaged: `format_version` must be 1"),
        ("labels.txt", b"\xff", "labels.txt is damaged: 'utf-8' codec"),
        ("model.keras", b"PK", "model.keras cannot be loaded: "),
    ],
)
def test_damaged_run_is_one_line(
    name: str,
    content: bytes | None,
    message: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(run, tmp_path / "copy")
    (tmp_path / "copy" / name).unlink()
    if content is not None:
        (tmp_path / "copy" / name).write_bytes(content)
    capsys.readouterr()
    assert evaluate.main(["bnzoo-evaluate", str(tmp_path / "copy")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"bnzoo-evaluate: {tmp_path}/copy/{message}")
    assert error.endswith(" trained it makes it again\n") == (name == "model.keras")
    assert error.count("\n") == 1


def test_preprocessing_of_another_size_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / "preprocessing.json"
    whole = Preprocessing.from_json(path.read_text())
    path.write_text(dataclasses.replace(whole, image_size=(9, 8)).to_json())
    capsys.readouterr()
    assert evaluate.main(["bnzoo-evaluate", str(copy)]) == 1
    assert capsys.readouterr().err == (
        f"bnzoo-evaluate: {copy} is damaged: its model.keras takes images (None, 8, 8, 1), but its "
        "preprocessing.json makes (None, 9, 8, 1)\n"
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, "dataset is missing"),
        ({"batch_size": "x"}, "batch_size is 'x'"),
        ({"eval_split": 3}, "eval_split is 3"),
    ],
)
def test_flags_that_are_damaged_are_one_line(
    flags: dict[str, object],
    told: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = json.loads((run / "config.json").read_text())
    config["flags"] = flags and {**config["flags"], **flags}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert evaluate.main(["bnzoo-evaluate", str(tmp_path)]) == 1
    path = tmp_path / "config.json"
    assert capsys.readouterr().err == f"bnzoo-evaluate: {path} is damaged: its flag {told}\n"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, "one run directory must be given. Received: None"),
        (["a", "b"], 2, "one run directory must be given. Received: a b"),
        (["{empty}"], 2, "is not the folder of a run: it has no config.json"),
        (["{run}", "--batch_size=0"], 2, "--batch_size must be a whole number of at least 1"),
        (["{run}", f"--batch_size={10**20}"], 2, "--batch_size must be a whole number in [1, 2147"),
        (["{run}", "--dataset=?"], 2, "--dataset must be digits, the name of"),
        (["{run}", "--eval_split=dev"], 2, "the split must be one of train, test. Received: dev"),
        (["{unfinished}"], 1, "has no model.keras yet: its training is not finished"),
    ],
)
def test_bad_input(
    argv: list[str],
    code: int,
    message: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "unfinished").mkdir()
    config = json.loads((run / "config.json").read_text())
    (tmp_path / "unfinished" / "config.json").write_text(json.dumps(config))
    places = {"run": run, "empty": tmp_path / "empty", "unfinished": tmp_path / "unfinished"}
    filled = [argument.format(**places) for argument in argv]
    assert evaluate.main(["bnzoo-evaluate", *filled]) == code
    error = capsys.readouterr().err
    assert error.startswith("bnzoo-evaluate: ")
    assert error.count("\n") == 1
    assert message in error
