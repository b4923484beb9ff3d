"""Where an export lies: OUT/<version>/, the layout that TensorFlow Serving polls."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from .errors import ExportFailed

NEXT = "next"
# TensorFlow Serving reads a folder's name as an int64; we write neither signs nor leading zeros.
_VERSION = re.compile(r"0|[1-9][0-9]{0,17}")
_WRITING = re.compile(r"\.[0-9]+\.writing-.+")


def is_version(text: str) -> bool:
    """Whether `text` is a version as a folder's name: a whole number of up to 18 digits."""
    return _VERSION.fullmatch(text) is not None


def served_as(name: str) -> int | None:
    """The version that TensorFlow Serving takes a folder of that name for, if it takes it."""
    # Beyond an int64 a name is none.
    number = int(name) if name.isascii() and name.isdecimal() else None
    return None if number is None or number >= 2**63 else number


def choose_version(out: Path, asked: str | None) -> int:
    """The version to write: the one that is asked for, or one above the highest.

    Args:
        out: the model's folder, whose children are the versions.
        asked: None or "next" for one above the highest, 1 in a new place; or a version.

    Raises:
        ExportFailed: `out` is no folder, holds the version that is asked for, or holds one that
            has no next.
    """
    if out.exists() and not out.is_dir():
        raise ExportFailed(f"{out} is no folder")
    taken = sorted(_versions(out))
    if asked is None or asked == NEXT:
        number = taken[-1] + 1 if taken else 1
        if not is_version(str(number)):
            raise ExportFailed(f"{out / str(taken[-1])} leaves no number for a next version")
        return number
    if int(asked) in taken:
        raise ExportFailed(
            f"{out / asked} exists already: ask for a new version with --version=next, the default"
        )
    return int(asked)


@dataclasses.dataclass
class Aside:
    """An export that is being written.

    Attributes:
        folder: where to write it.
        version: the number that it gets, and once it is published, has.
    """

    folder: Path
    version: int


@contextlib.contextmanager
def written_aside(out: Path, asked: str | None) -> Iterator[Aside]:
    """A folder to write to that becomes OUT/<version> when the block ends without an error.

    A server that polls `out` takes only children whose name is a number. So it sees a version
    when the folder is renamed, which is one step, and never half of it. All is on the disk before.
    What writers left that were killed is removed; others that are still writing are left alone.

    Args:
        out: the model's folder.
        asked: see `choose_version`. If another export takes a version that was not asked for by
            its number, this one gets the next.

    Raises:
        ExportFailed: see `choose_version`.
    """
    version = choose_version(out, asked)
    out.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out)
    folder, lock = _new_folder(out, version)
    aside = Aside(folder, version)
    try:
        yield aside
        _write_through(folder)
        while True:
            try:
                folder.rename(out / str(aside.version))
                break
            except OSError:
                if not (out / str(aside.version)).exists():
                    raise
                aside.version = choose_version(out, asked)
        _sync(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _new_folder(out: Path, version: int) -> tuple[Path, int]:
    """A folder beside the versions, and the open file whose lock says that its writer lives."""
    while True:
        # Processes in containers may have one number all.
        folder = out / f".{version}.writing-{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # Before it could be locked, another export took it for a leftover.
        # Where locks are not to be had, nobody else can have one either, and removes nothing.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        # The same, between the two.
        if folder.exists():
            return folder, lock
        os.close(lock)


def _remove_leftovers(out: Path) -> None:
    for entry in list(os.scandir(out)):
        if _WRITING.fullmatch(entry.name) is None or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):
            lock = os.open(entry.path, os.O_RDONLY)
            try:
                # The system gives a lock back when its process ends, however it ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(lock)


def _write_through(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _versions(out: Path) -> Iterator[int]:
    if out.is_dir():
        numbers = [served_as(entry.name) for entry in os.scandir(out)]
        yield from (number for number in numbers if number is not None)
