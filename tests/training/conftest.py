"""Fixtures of the tests of training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .launcher import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    one = Launcher(tmp_path)
    yield one
    for process in one.started:
        process.kill()
        process.communicate()
