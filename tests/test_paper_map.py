"""docs/paper_map.md leads to what there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "paper_map.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| place")
]


def test_every_row_has_code_or_refers_to_another_and_a_test() -> None:
    assert len(ROWS) >= 20
    for place, _, code, test in ROWS:
        assert re.findall(r"`\w+/[\w/]+\.py`", code) or code == "as Algorithm 1", place
        assert "::" in test, place


def test_the_code_is_there() -> None:
    for place, _, code, _ in ROWS:
        for path in re.findall(r"`([\w/]+\.py)`", code):
            assert (ROOT / path).is_file(), f"{place}: {path}"


def test_the_tests_are_there() -> None:
    for place, _, _, tests in ROWS:
        for path, function in re.findall(r"`([\w/]+\.py)::(\w+)`", tests):
            text = (ROOT / "tests" / path).read_text(encoding="utf-8")
            assert f"\ndef {function}(" in text, f"{place}: {path}::{function}"
