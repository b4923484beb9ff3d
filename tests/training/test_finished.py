"""The same command again where a run is finished, or only looks as if it were."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

from bnzoo.trained_steps import saved_step
from training import evaluate, progress, train
from training.run_directory import is_finished

from .helpers import read_metrics, settings, train_argv

FLAGS = ("--steps=6", "--batch_size=50", "--checkpoint_every=4", "--population_batches=2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    assert train.main(train_argv(run, *FLAGS)) == 0
    return run


def test_a_malformed_tf_config_is_told_all_the_same(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for strategy in ("multi_worker", "parameter_server"):
        argv = train_argv(finished, *FLAGS, f"--strategy={strategy}")
        monkeypatch.setenv("TF_CONFIG", '{"cluster":\n{"worker": ["http://h:2222"]}, "task": {}}')
        assert train.main(argv) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("bnzoo-train: TF_CONFIG must be like ")
        assert (
            ': worker 0 must be given as host:port, with a port in [1, 65535], not as "http://h'
            in (captured.err)
        )
        assert captured.err.count("\n") == 1


def test_kubernetes_is_not_asked_for_a_run_that_is_finished(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pods of the other processes may be gone by then."""
    argv = train_argv(finished, *FLAGS, "--strategy=multi_worker", "--cluster=kubernetes")
    assert train.main(argv) == 0
    assert capsys.readouterr().out == f"{finished} is finished: --overwrite trains it anew\n"


@pytest.mark.parametrize("how", ["emptied", "truncated", "overwritten"])
def test_a_damaged_network_is_made_again(
    how: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = finished / "model.keras"
    whole = path.read_bytes()
    expected = keras.models.load_model(path).get_weights()
    rows = read_metrics(finished)
    middle = len(whole) // 2
    path.write_bytes(
        {
            "emptied": b"",
            "truncated": whole[:middle],
            "overwritten": whole[:middle] + bytes(100) + whole[middle + 100 :],
        }[how]
    )
    assert train.main(train_argv(finished, *FLAGS)) == 0
    output = capsys.readouterr().out
    assert "continuing at step 6\n" in output
    assert f"{finished}: held-out accuracy " in output
    for old, new in zip(expected, keras.models.load_model(path).get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    assert read_metrics(finished) == rows
    assert train.main(train_argv(finished, *FLAGS)) == 0
    assert capsys.readouterr().out == f"{finished} is finished: --overwrite trains it anew\n"


def test_a_run_that_was_made_longer_is_not_finished_whatever_clocks_say(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    longer = train_argv(run, *FLAGS, "--steps=12")
    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "update", interrupt)
        assert train.main(longer) == 130
    assert saved_step(run / "model.keras") == 6
    make_newer(run / "model.keras")
    capsys.readouterr()
    assert evaluate.main(["bnzoo-evaluate", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"{run} is not finished: model.keras is the network of step 6, and 12 are to be done"
    )
    assert len(lines) == 2
    assert train.main(longer) == 0
    assert "continuing at step 6\n" in capsys.readouterr().out
    assert saved_step(run / "model.keras") == 12
    make_newer(run / "config.json")
    assert train.main(longer) == 0
    assert capsys.readouterr().out == f"{run} is finished: --overwrite trains it anew\n"
    assert evaluate.main(["bnzoo-evaluate", str(run)]) == 0
    assert capsys.readouterr().out.startswith("examples 360  ")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def make_newer(path: Path) -> None:
    for other in path.parent.iterdir():
        hours = 2 if other == path else 1
        os.utime(other, (1e9 + 3600 * hours,) * 2)


def test_of_a_network_without_its_step_the_times_of_files_tell(
    finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    with (
        zipfile.ZipFile(finished / "model.keras") as old,
        zipfile.ZipFile(run / "model.keras", "w") as new,
    ):
        for entry in old.infolist():
            if entry.filename != "training.json":
                new.writestr(entry, old.read(entry))
    assert saved_step(run / "model.keras") is None
    chosen = settings(*FLAGS)
    make_newer(run / "model.keras")
    assert is_finished(str(run), chosen)
    assert not is_finished(str(run), settings(*FLAGS, "--steps=7"))
    make_newer(run / "config.json")
    assert not is_finished(str(run), chosen)
