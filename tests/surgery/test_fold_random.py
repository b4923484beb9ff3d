"""Folded random graphs compute what they computed before."""

from __future__ import annotations

import os

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


@settings(
    max_examples=GRAPHS,
    deadline=None,
    derandomize="BNZOO_RANDOM_GRAPHS" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
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
    for expected, got in zip(before, run(folded, inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=TOLERANCE[dtype] * np.abs(expected).max())
