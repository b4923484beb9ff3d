"""Keras' own tests of BatchNormalization and PReLU, run with these classes in their place.

The wheel of Keras ships its tests. Those that may differ are listed here and explained in
docs/keras_conformance.md; all others must pass.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import keras

FILES = (
    "layers/normalization/batch_normalization_test.py",
    "layers/activations/prelu_test.py",
)

# Batch Renormalization, which bnzoo refuses.
RENORM = {
    "test_renorm_basics",
    "test_renorm_correctness",
    "test_renorm_inference",
    "test_renorm_invalid_clipping_keys",
    "test_renorm_stddev_initializer",
    "test_serialization",
}
# These compare the moving variance with the biased variance of a batch of 10 to 45 values.
BIASED_VARIANCE = {
    *(f"test_correctness{case}" for case in range(16)),
    *(f"test_bachnorm_ignore_masked_values{case}" for case in range(6)),
}


def test_keras_own_tests(tmp_path: Path) -> None:
    source = Path(keras.__file__).parent / "src"
    report = tmp_path / "report.xml"
    # Keras' tests expect its conftest, which is not in the wheel, and no other.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "tests.layers.keras_swap",
    ]
    command += ["-c", "/dev/null", "--rootdir", str(tmp_path), f"--junitxml={report}"]
    command += [str(source / file) for file in FILES]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert report.exists(), result.stdout + result.stderr

    cases = ElementTree.parse(report).getroot().iter("testcase")
    failed, passed = set(), set()
    for case in cases:
        bad = case.find("failure") is not None or case.find("error") is not None
        (failed if bad else passed).add(case.get("name"))
    assert failed == RENORM | BIASED_VARIANCE, result.stdout
    # Not an empty run: those that pass are most of both files.
    assert {
        "test_bn_basics",
        "test_trainable_behavior",
        "test_prelu",
        "test_prelu_correctness",
    } <= passed
