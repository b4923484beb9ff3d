"""The progress line."""

from __future__ import annotations

import re

import pytest

from training import progress
from training.progress import Progress


class Clock:
    """A clock that the test turns."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    turned = Clock()
    monkeypatch.setattr(progress, "time", turned)
    return turned


def test_lines_in_a_file_are_sparse_and_complete(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Progress(1000, first_step=400)
    for step in range(401, 1001):
        clock.now += 0.1
        shown.update(step, 0.5, 0.75, 0.0015, 320.4)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7  # One in 10 of 60 seconds, the first and the last.
    assert lines[0] == (
        "step 401/1000  loss 0.5000  accuracy 0.7500  rate 0.0015  320 images/s  ? left"
    )
    # 100 steps take 10 s; the steps of before the restart do not count as done in no time.
    assert lines[1].startswith("step 501/1000 ")
    assert lines[1].endswith(" 0:00:50 left")
    assert lines[-1].endswith(" 0:00:00 left")


def test_terminal_line_is_redrawn_and_fits(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    shown = Progress(50_000, first_step=0)
    for step in (1, 2):
        clock.now += 4000.0
        shown.update(step, 0.5, 0.75, 0.1, 10.0)
    shown.note("held-out accuracy 0.5")
    output = capsys.readouterr().out
    assert output.count("\r") == 2
    drawn, note = output.split("\n")[:2]
    assert note == "held-out accuracy 0.5"
    assert all(len(line) <= 59 for line in drawn.split("\r"))


def test_hours() -> None:
    assert progress._clock(3 * 3600 + 62.4) == "3:01:02"
    assert re.fullmatch(r"\d+:\d\d:\d\d", progress._clock(0.2))
