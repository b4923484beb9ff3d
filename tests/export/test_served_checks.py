from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from export.served_checks import PREDICT, wrong_answers, wrong_signatures

LABELS = ("ant", "bee", "crane", "crane")


def signatures() -> dict[str, Any]:
    return {
        "serving_default": {
            "method": PREDICT,
            "inputs": {"images": {"dtype": "float32", "shape": [None, 8, 8, 1]}},
            "outputs": {
                "probabilities": {"dtype": "float32", "shape": [None, 4]},
                "scores": {"dtype": "float32", "shape": [None, 2]},
                "classes": {"dtype": "string", "shape": [None, 2]},
                "features": {"dtype": "float32", "shape": None},
            },
        }
    }


def test_good_signatures() -> None:
    assert list(wrong_signatures(signatures(), LABELS)) == []
    assert list(wrong_signatures(signatures(), None)) == []


def _output(name: str, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda found: found["serving_default"]["outputs"][name].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: found.update(serving_bytes=found.pop("serving_default")),
            "no signature serving_default, has serving_bytes: no export of bnzoo",
        ),
        (
            lambda found: found["serving_default"].update(method=""),
            f"signature serving_default has the method '' instead of {PREDICT}",
        ),
        (
            lambda found: found["serving_default"]["outputs"].pop("scores"),
            "signature serving_default has no output scores, has probabilities, classes, features: "
            "no export of bnzoo",
        ),
        (
            lambda found: found["serving_default"]["inputs"].clear(),
            "signature serving_default has no input",
        ),
        (
            _output("features", dtype="bfloat16"),
            "output features of serving_default is bfloat16, which cannot travel by REST",
        ),
        (
            _output("features", shape=[]),
            "output features of serving_default is float32 []: its first dimension must be the "
            "batch, of any size",
        ),
        (
            lambda found: found["serving_default"]["inputs"]["images"].update(shape=[1, None]),
            "input images of serving_default is float32 [1, any]: its first dimension must be the "
            "batch, of any size",
        ),
        (
            _output("classes", dtype="int64"),
            "output classes of serving_default is int64 [any, 2], not string of rank 2",
        ),
        (
            _output("probabilities", shape=[None, 3]),
            "serving_default has 3 classes, but labels.txt has 4 lines",
        ),
    ],
)
def test_wrong_signatures(change: Callable[[dict[str, Any]], object], message: str) -> None:
    found = signatures()
    change(found)
    assert message in list(wrong_signatures(found, LABELS))


ANSWERS = {
    "probabilities": np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.2, 0.1, 0.0]], np.float32),
    "scores": np.array([[0.4, 0.3], [0.7, 0.2]], np.float32),
    # Two classes have the name crane.
    "classes": np.array([[b"crane", b"crane"], [b"ant", b"bee"]]),
}


def test_good_answers() -> None:
    assert list(wrong_answers(ANSWERS, "a", 2, LABELS)) == []
    assert list(wrong_answers(ANSWERS, "a", 2, None)) == []


@pytest.mark.parametrize(
    ("key", "row", "column", "value", "message"),
    [
        ("probabilities", 1, 2, np.inf, "a gives probabilities that are no numbers for 1 of 2"),
        ("probabilities", 1, 3, 0.5, "a gives probabilities that add up to 1.5 instead of 1"),
        ("probabilities", 1, 3, -0.001, "a gives a probability of -0.001"),
        ("scores", 0, 0, 0.39, "the scores of a are not its highest probabilities, best first"),
        ("classes", 1, 0, b"bee", "the classes of a are not those of its scores in labels.txt"),
        ("classes", 1, 0, b"emu", "the classes of a are not those of its scores in labels.txt"),
    ],
)
def test_wrong_answers(key: str, row: int, column: int, value: Any, message: str) -> None:
    answers = copy.deepcopy(ANSWERS)
    answers[f"{key}"][row, column] = value
    assert next(wrong_answers(answers, "a", 2, LABELS)) == message


def test_probabilities_that_are_independent() -> None:
    answers = {**ANSWERS, "probabilities": ANSWERS["probabilities"] * np.float32(2)}
    answers["scores"] = ANSWERS["scores"] * np.float32(2)
    (problem,) = wrong_answers(answers, "a", 2, LABELS)
    assert problem == "a gives probabilities that add up to 2 instead of 1"
    assert list(wrong_answers(answers, "a", 2, LABELS, "independent")) == []


def test_other_outputs_than_a_classifier_s() -> None:
    found = signatures()
    found["serving_default"]["outputs"] = {"boxes": {"dtype": "float32", "shape": [None, 4]}}
    assert list(wrong_signatures(found, None, ours=True)) == []
    (problem,) = wrong_signatures(found, None)
    assert problem == (
        "signature serving_default has no output probabilities, has boxes: no export of bnzoo"
    )
    assert list(wrong_answers({"boxes": np.ones((2, 4))}, "a", 2, None)) == []


def test_an_output_of_another_batch() -> None:
    assert list(wrong_answers(ANSWERS, "a", 3, LABELS)) == [
        "output probabilities of a has shape (2, 4) for a batch of 3"
    ]
