"""The text of a report."""

from __future__ import annotations

from bnzoo.surgery import BatchNormFate, FoldReport, Size

REPORT = FoldReport(
    (
        BatchNormFate("bn1", "folded", ("conv1",)),
        BatchNormFate("inner/bn2", "folded", ("a", "b")),
        BatchNormFate("bn3", "affine", reason="backward: this; forward: that"),
        BatchNormFate("bn4", "kept", reason="it is called with training=True"),
    ),
    Size(4, 12345, 10),
    Size(1, 12000, 8),
)


def test_summary_is_one_line() -> None:
    assert REPORT.summary == (
        "4 BatchNormalization: 2 folded, 1 affine, 1 kept; "
        "parameters 12,345 -> 12,000, operations 10 -> 8"
    )


def test_counts() -> None:
    assert [REPORT.count(outcome) for outcome in ("folded", "affine", "kept")] == [2, 1, 1]


def test_a_line_for_each_layer() -> None:
    assert str(REPORT).splitlines()[1:] == [
        "bn1: folded into conv1",
        "inner/bn2: folded into a, b",
        "bn3: affine, backward: this; forward: that",
        "bn4: kept, it is called with training=True",
    ]


def test_of_a_model_without_any() -> None:
    size = Size(0, 5, 1)
    text = "no BatchNormalization: the model is returned as it is"
    assert str(FoldReport((), size, size)) == text
