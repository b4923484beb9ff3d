"""Where an export lies: OUT/<version>/, the layout that TensorFlow Serving polls."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from .errors import ExportFailed

NEXT = "next"
# TensorFlow Serving reads a folder's name as an int64; we write neither signs nor leading zeros.
_VERSION = re.compile(r"0|[1-9][0-9]{0,17}")


def is_version(text: str) -> bool:
    """Whether `text` is a version as a folder's name: a whole number of up to 18 digits."""
    return _VERSION.fullmatch(text) is not None


def choose_version(out: Path, asked: str | None) -> int:
    """The version to write: 1 in a new place, and where there are others what is asked for.

    Args:
        out: the model's folder, whose children are the versions.
        asked: None, "next" or a version.

    Raises:
        ExportFailed: `out` is no folder, holds a version and none is asked for, or holds the
            one that is asked for.
    """
    if out.exists() and not out.is_dir():
        raise ExportFailed(f"{out} is no folder")
    taken = sorted(_versions(out))
    if asked is None:
        if taken:
            raise ExportFailed(
                f"{out} holds version {taken[-1]} already: ask for a new one with "
                f"--version=next or --version={taken[-1] + 1}"
            )
        return 1
    if asked == NEXT:
        return taken[-1] + 1 if taken else 1
    if int(asked) in taken:
        raise ExportFailed(
            f"{out / asked} exists already: ask for a new version with --version=next"
        )
    return int(asked)


@contextlib.contextmanager
def written_aside(out: Path, version: int) -> Iterator[Path]:
    """A folder to write to that becomes OUT/<version> when the block ends without an error.

    A server that polls `out` takes only children whose name is a number. So it sees a version
    when the folder is renamed, which is one step, and never half of it.
    """
    out.mkdir(parents=True, exist_ok=True)
    aside = out / f".{version}.writing-{os.getpid()}"
    aside.mkdir()
    try:
        yield aside
        aside.rename(out / str(version))
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _versions(out: Path) -> Iterator[int]:
    if out.is_dir():
        yield from (int(entry.name) for entry in os.scandir(out) if entry.name.isdecimal())
