"""The run directory: what training leaves for evaluation and export, and what it is called."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from bnzoo.trained_steps import saved_step

from .command_line import BadFlags, RunFailed
from .settings import Settings

MODEL = "model.keras"
PREPROCESSING = "preprocessing.json"
LABELS = "labels.txt"
CONFIG = "config.json"
METRICS = "metrics.csv"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
EXAMPLES = "examples"

FORMAT_VERSION = 1
PARTIAL = ".partial."
# TensorFlow takes the name of a checkpoint for a pattern.
_OF_PATTERNS = frozenset("*?[]\\")


def cannot_write(path: str, why: str) -> RunFailed:
    """The one line about a file or folder that cannot be written."""
    return RunFailed(
        f"{path} cannot be written: {why}. What was saved before is kept; once there is room and "
        "permission to write, the same command goes on from there"
    )


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns an error of the system while `path` is written into a RunFailed of one line."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error.strerror or str(error)) from error


def write_aside(path: str, write: Callable[[str], None]) -> None:
    """Lets `write` write a file beside `path`, then gives it its name: `path` is never half.

    Raises:
        RunFailed: it cannot be written; then nothing of it is left.
    """
    folder, name = os.path.split(path)
    partial = os.path.join(folder, PARTIAL + name)
    with writing(path):
        try:
            write(partial)
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            # On a full disk it would keep the next attempt from its room.
            with contextlib.suppress(OSError):
                os.remove(partial)
            raise


def write_text(path: str, text: str) -> None:
    """Writes a text file aside, then gives it its name."""

    def write(partial: str) -> None:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)

    write_aside(path, write)


def check_run_dir(run_dir: str, settings: Settings, overwrite: bool) -> None:
    """Raises BadFlags if `run_dir` holds another run, or something else, that must not be touched.

    Args:
        run_dir: the folder of the run.
        settings: those of the run that is to be in it.
        overwrite: whether a run that is there may be deleted.

    Raises:
        RunFailed: what is there cannot be read.
    """
    if found := sorted(_OF_PATTERNS & set(run_dir)):
        raise BadFlags(
            f"--run_dir must not have any of {' '.join(sorted(_OF_PATTERNS))} in it, as TensorFlow "
            f"would not find its checkpoints again. Received: --run_dir={run_dir}, which has "
            f"{' '.join(found)}"
        )
    if not os.path.lexists(run_dir):
        return
    if not os.path.isdir(run_dir):
        raise BadFlags(f"--run_dir must be a folder. Received: --run_dir={run_dir}, a file")
    try:
        names = os.listdir(run_dir)
    except OSError as error:
        raise RunFailed(f"{run_dir} cannot be read: {error.strerror}") from error
    if CONFIG not in names:
        if any(not name.startswith(PARTIAL) for name in names):
            raise BadFlags(
                f"--run_dir must be new, empty or the folder of a run. "
                f"Received: --run_dir={run_dir}, which has no {CONFIG}"
            )
        return
    if overwrite:
        return
    differences = settings.conflicts(read_config(run_dir)["flags"])
    if differences:
        raise BadFlags(
            f"--run_dir={run_dir} holds a run with other flags: {', '.join(differences)}. "
            "Give another --run_dir, the same flags, or --overwrite"
        )


def is_finished(run_dir: str, settings: Settings) -> bool:
    """Whether the run in `run_dir` has done all steps of `settings`.

    One whose network is damaged has not: it is made again from the last checkpoint.

    A run that was finished and then told to do more steps keeps its network until it has another.
    """
    model, config = (os.path.join(run_dir, name) for name in (MODEL, CONFIG))
    if not os.path.exists(model):
        return False
    step = saved_step(model)
    if step is None:
        # Of a version that did not write it: the configuration is the newer of the two then.
        done = (
            read_config(run_dir)["flags"].get("steps") == settings.steps
            and os.stat(model).st_mtime_ns >= os.stat(config).st_mtime_ns
        )
    else:
        done = step == settings.steps
    return done and _is_whole(model)


def _is_whole(model: str) -> bool:
    """Whether the file of a network, a zip archive, can be read to its end."""
    try:
        with zipfile.ZipFile(model) as archive:
            return archive.testzip() is None
    except Exception:
        # What zipfile raises of damaged files has no common class.
        return False


def make(run_dir: str) -> None:
    """Makes the folder of a run, and those it lies in."""
    with writing(run_dir):
        os.makedirs(run_dir, exist_ok=True)


@contextlib.contextmanager
def locked(run_dir: str) -> Iterator[None]:
    """Keeps other processes from training in the folder `run_dir` until the block ends.

    The lock is the open folder's, so it leaves no file; the system gives it back when the process
    ends, however it ends. Where the file system knows no locks of folders, as NFS, there is none.

    Raises:
        RunFailed: another process trains there.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = os.open(run_dir, os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFailed(
                f"another process trains in {run_dir}: wait until it has ended, or end it; then "
                "the same command goes on from its last checkpoint. Or give another --run_dir"
            ) from error
        except OSError:
            pass
        yield


def clear(run_dir: str) -> None:
    """Deletes the run in `run_dir`, and nothing else that lies there.

    Raises:
        RunFailed: something of it cannot be deleted.
    """
    # The configuration goes last: without it, what remains would not be known as a run.
    files = (MODEL, PREPROCESSING, LABELS, METRICS, CONFIG)
    for name in (CHECKPOINTS, TENSORBOARD, EXAMPLES, *files):
        path = os.path.join(run_dir, name)
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.remove(path)
        except OSError as error:
            raise RunFailed(
                f"{path} cannot be deleted: {error.strerror}. Delete {run_dir} yourself, or give "
                "another folder"
            ) from error


def versions() -> dict[str, str]:
    """The versions of what computes."""
    names = ("bnzoo", "tensorflow", "keras", "numpy", "tensorflow-datasets")
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }


def write_config(run_dir: str, settings: Settings, data: Mapping[str, Any]) -> None:
    """Writes config.json: every flag, the versions, and what the data set was found to have."""
    config = {
        "format_version": FORMAT_VERSION,
        "flags": dataclasses.asdict(settings),
        "seed": settings.seed,
        "data": dict(data),
        "versions": versions(),
    }
    write_text(os.path.join(run_dir, CONFIG), json.dumps(config, indent=2) + "\n")


def read_config(run_dir: str) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        BadFlags: `run_dir` is not the folder of a run.
        RunFailed: the file is damaged, or of another version.
    """
    path = os.path.join(run_dir, CONFIG)
    if not os.path.exists(path):
        raise BadFlags(f"{run_dir} is not the folder of a run: it has no {CONFIG}")
    try:
        config = json.loads(read_text(run_dir, CONFIG))
    except json.JSONDecodeError as error:
        raise RunFailed(f"{path} is damaged: {error}") from error
    version = config.get("format_version") if isinstance(config, dict) else None
    if version != FORMAT_VERSION:
        raise RunFailed(f"{path} is of format {version}; this version reads {FORMAT_VERSION}")
    missing = [name for name in ("data", "flags") if not isinstance(config.get(name), dict)]
    if missing:
        raise RunFailed(f"{path} is damaged: it lacks {', '.join(missing)}")
    return config


def read_text(run_dir: str, name: str) -> str:
    """The content of one of the run's text files.

    Raises:
        RunFailed: it is not there, or cannot be read.
    """
    path = os.path.join(run_dir, name)
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise RunFailed(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunFailed(f"{path} is damaged: {error}") from error
