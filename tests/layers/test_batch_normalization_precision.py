"""BatchNormalization's parameters in half precision, with outputs whose rounding hides nothing."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import BatchNormalization
from tests.layers.modes import MODES

EPSILON = 1.1e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_gamma_and_beta_are_not_rounded(policy: str, training: bool, mode: str) -> None:
    """1.0004 lies between two halves; the difference that is left is one of small numbers."""
    gamma, beta = np.array([1.0004, 1.0]), np.array([-1.0, -1.0004])
    layer = BatchNormalization(epsilon=EPSILON, dtype=policy)
    layer.build((None, 2))
    layer.set_weights([gamma, beta, np.zeros(2), np.ones(2)])
    # Mean 0 and variance 1, like the moving statistics.
    x = tf.constant([[1.0, 1.0], [-1.0, -1.0]], layer.compute_dtype)
    y = MODES[mode](lambda x: layer(x, training=training))(x)
    expected = np.array([[1.0], [-1.0]]) / np.sqrt(1 + EPSILON) * gamma + beta
    # 4e-4, with the rounding of float32 near 1 and half an ulp of the output's type.
    got = np.asarray(tf.cast(y, tf.float64))[0]
    rtol = 1e-3 if policy == "mixed_float16" else 4e-3
    np.testing.assert_allclose(got, expected[0], rtol=rtol, atol=0)
