"""labels.txt and its like: what divides names and what is part of one."""

from __future__ import annotations

import pytest

from bnzoo.class_names import class_names


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("a",),
        ("a", "b"),
        ("", "b", ""),
        ("page\fbreak", "line\u2028separator", "next\x85line", "file\x1cseparator", "tab\v", "d"),
    ],
)
def test_names_are_what_line_feeds_divide(names: tuple[str, ...]) -> None:
    assert class_names("".join(f"{name}\n" for name in names)) == names
    if names and names[-1]:
        assert class_names("\n".join(names)) == names
