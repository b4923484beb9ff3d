"""The run directory: what may be written into it, and how."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from importlib import metadata
from pathlib import Path

import pytest
import tensorflow as tf

from training import run_directory
from training.command_line import BadFlags, RunFailed
from training.run_directory import (
    check_run_dir,
    clear,
    locked,
    read_config,
    write_config,
    write_text,
)

from .helpers import settings


def test_config_has_every_flag_the_versions_and_the_seed(tmp_path: Path) -> None:
    chosen = settings("--seed=5", "--model_args=epsilon=0.01")
    write_config(str(tmp_path), chosen, {"train_examples": 7})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == read_config(str(tmp_path))
    assert config["seed"] == config["flags"]["seed"] == 5
    assert config["flags"]["model_args"] == {"epsilon": 0.01}
    assert config["data"] == {"train_examples": 7}
    assert config["versions"]["tensorflow"] == metadata.version("tensorflow")
    assert set(config["versions"]) > {"python", "bnzoo", "keras", "numpy"}
    check_run_dir(str(tmp_path), chosen, overwrite=False)


def test_another_configuration_is_refused_naming_the_flags(tmp_path: Path) -> None:
    write_config(str(tmp_path), settings("--seed=5", "--steps=10"), {})
    other = settings("--seed=6", "--steps=9")
    with pytest.raises(BadFlags) as caught:
        check_run_dir(str(tmp_path), other, overwrite=False)
    assert str(caught.value) == (
        f"--run_dir={tmp_path} holds a run with other flags: --seed (there 5, now 6), --steps "
        "(there 10, now 9). Give another --run_dir, the same flags, or --overwrite"
    )
    check_run_dir(str(tmp_path), other, overwrite=True)


def test_a_run_may_be_made_longer_and_watched_in_another_way(tmp_path: Path) -> None:
    write_config(str(tmp_path), settings("--steps=10", "--bn_percentiles=last"), {})
    check_run_dir(str(tmp_path), settings("--steps=20", "--profile_steps=3,5"), overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_folders_are_never_touched(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(BadFlags, match=r"must be new, empty or the folder of a run\. .* config"):
        check_run_dir(str(tmp_path), settings(), overwrite)
    with pytest.raises(BadFlags, match=r"--run_dir must be a folder\. Received: .*, a file"):
        check_run_dir(str(tmp_path / "thesis.tex"), settings(), overwrite)


def test_a_folder_that_is_not_ours_to_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(RunFailed) as caught:
        check_run_dir(str(tmp_path), settings(), overwrite=False)
    assert str(caught.value) == f"{tmp_path} cannot be read: Permission denied"


def test_new_and_empty_folders_are_fit(tmp_path: Path) -> None:
    check_run_dir(str(tmp_path / "new"), settings(), overwrite=False)
    check_run_dir(str(tmp_path), settings(), overwrite=False)
    # A process that was killed as it wrote its first file.
    (tmp_path / ".partial.config.json").write_text("{")
    check_run_dir(str(tmp_path), settings(), overwrite=False)


def test_clear_deletes_the_run_alone(tmp_path: Path) -> None:
    write_config(str(tmp_path), settings(), {})
    for name in ("model.keras", "preprocessing.json", "labels.txt", "metrics.csv", "notes.txt"):
        (tmp_path / name).write_text("x")
    for name in ("checkpoints", "tensorboard", "examples"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    clear(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_one_process_at_a_time_trains_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(str(tmp_path)):
        with pytest.raises(RunFailed) as caught, locked(str(tmp_path)):
            pass
        assert str(caught.value).startswith(f"another process trains in {tmp_path}: wait until ")
        assert os.listdir(tmp_path) == []
    opened = set(os.listdir("/dev/fd"))
    with pytest.raises(KeyboardInterrupt), locked(str(tmp_path)):
        raise KeyboardInterrupt
    assert set(os.listdir("/dev/fd")) == opened

    def unknown(*_: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # What NFS says of a folder.

    monkeypatch.setattr(fcntl, "flock", unknown)
    with locked(str(tmp_path)), locked(str(tmp_path)):
        pass


def test_what_cannot_be_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the run would go on from checkpoints that were to be deleted."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run, elsewhere):
        folder.mkdir()
    write_config(str(run), settings(), {})
    (elsewhere / "ckpt-1.index").write_text("x")
    (run / "checkpoints").symlink_to(elsewhere)
    clear(str(run))
    assert list(run.iterdir()) == []
    assert (elsewhere / "ckpt-1.index").exists()

    (run / "checkpoints").mkdir()
    write_config(str(run), settings(), {})

    def refuse(path: str, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(RunFailed) as caught:
        clear(str(run))
    assert str(caught.value) == (
        f"{run}/checkpoints cannot be deleted: Permission denied. Delete {run} yourself, or give "
        "another folder"
    )
    assert (run / "config.json").exists()


def test_a_file_is_never_half_written(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    write_text(str(path), "old")

    def killed(partial: str) -> None:
        Path(partial).write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_directory.write_aside(str(path), killed)
    assert path.read_text() == "old"
    write_text(str(path), "new")
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["labels.txt"]


def test_config_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadFlags, match=r"is not the folder of a run: it has no config\.json"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunFailed, match=r"config\.json is damaged: "):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"format_version": 99}')
    with pytest.raises(RunFailed, match="is of format 99; this version reads 1"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(RunFailed, match="is of format None; this version reads 1"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"format_version": 1, "data": {}}')
    with pytest.raises(RunFailed, match=r"config\.json is damaged: it lacks flags"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"format_version": 1, "flags": [], "data": {}}')
    with pytest.raises(RunFailed, match=r"config\.json is damaged: it lacks flags"):
        check_run_dir(str(tmp_path), settings(), overwrite=False)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RunFailed, match=r"config\.json is damaged: 'utf-8' codec"):
        read_config(str(tmp_path))


@pytest.mark.parametrize("name", ["lr=[0.1]", "a*", "what?", "back\\slash"])
def test_names_that_are_patterns_are_refused(name: str, tmp_path: Path) -> None:
    run_dir = f"{tmp_path}/{name}"
    with pytest.raises(BadFlags, match=r"must not have any of .* would not find its checkpoints"):
        check_run_dir(run_dir, settings(), overwrite=False)
    if name.strip("*?") != name:
        return  # These find the run's own checkpoints, but may find another's.
    with pytest.raises(tf.errors.OpError):
        tf.train.Checkpoint(a=tf.Variable(1)).read(tf.train.Checkpoint().write(f"{run_dir}/ckpt"))
