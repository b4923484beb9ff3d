"""Folded random graphs compute what they computed before."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import keras
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bnzoo.surgery import fold_batch_norm

from .models import batch_norms, example, randomize, run
from .random_graphs import KINDS, VARIANCES, Step, build

# Thousands, with new random graphs at each run: BNZOO_RANDOM_GRAPHS=5000 pytest ...
GRAPHS = int(os.environ.get("BNZOO_RANDOM_GRAPHS", "250"))
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 1 << 16)),
    min_size=3,
    max_size=12,
)
# Relative to the largest value of an output. 1e-5 is for rounding in float32; in
# float64, where rounding is 1e-16, a fault that is as small as that would show too.
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}
# One that came up: its own rounding is 3e-6 of its last output, folded it is 1.6e-5.
MAGNIFIES = [
    ("relayout", 5, 6363),
    ("norm", 0, 0),
    ("merge", 0, 0),
    ("norm", 3, 329),
    ("norm", 0, 0),
    ("add operation", 3, 0),
    ("norm after", 0, 1388),
    ("nest", 2, 55726),
    ("dense", 0, 1116),
]


@settings(
    max_examples=GRAPHS,
    deadline=None,
    derandomize="BNZOO_RANDOM_GRAPHS" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@hypothesis.example(MAGNIFIES, 85, "float32")
@given(STEPS, st.integers(0, 99), st.sampled_from(["float32", "float64"]))
def test_computes_the_same(steps: list[Step], seed: int, dtype: str) -> None:
    model = randomize(build(steps, dtype), seed, VARIANCES)
    if not batch_norms(model):
        return
    inputs = example(model, batch=2)
    before = run(model, inputs)
    folded, report = fold_batch_norm(model, return_report=True)
    assert batch_norms(folded) == []
    assert len(report.batch_norms) == len(batch_norms(model))
    assert all(fate.reason for fate in report.batch_norms if fate.outcome != "folded")
    tolerance = TOLERANCE[dtype]
    difference = _difference(before, run(folded, inputs))
    if dtype == "float32" and difference > tolerance:
        # A graph in which large values cancel magnifies all rounding, its own before it was folded
        # and that of the folded weights. In float64 it still has to be right.
        tolerance = max(tolerance, 10 * _own_rounding(steps, seed, before, inputs))
    assert difference <= tolerance


def _difference(expected: list[np.ndarray], got: list[np.ndarray]) -> float:
    """The largest, relative to the largest value of that output."""
    differences = [
        np.abs(b.astype("float64") - a).max() / max(float(np.abs(a).max()), 1e-300)
        for a, b in zip(expected, got, strict=True)
    ]
    return float(np.max(differences))  # NaN if one of them is, unlike max().


def _own_rounding(steps: list[Step], seed: int, before: list[np.ndarray], inputs: Any) -> float:
    """How far a graph in float32 is from itself in float64, which is folded rightly."""
    model = randomize(build(steps, "float64"), seed, VARIANCES)
    for variable in model.variables:
        variable.assign(np.float32(variable))
    wide = keras.tree.map_structure(lambda x: x.astype("float64"), inputs)
    exact = run(model, wide)
    assert _difference(exact, run(fold_batch_norm(model), wide)) <= TOLERANCE["float64"]
    return _difference(exact, before)
