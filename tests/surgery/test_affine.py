"""Affine maps: values and layouts, against NumPy on the values that they act on."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import bnzoo
from bnzoo.surgery.affine import Affine, NotFoldable, batch_norm_affine, spread


def _random(*shape: int, seed: int = 0) -> Affine:
    rng = np.random.default_rng(seed)
    return Affine(rng.normal(size=shape), rng.normal(size=shape))


def _values(*shape: int) -> np.ndarray:
    return np.random.default_rng(9).normal(size=shape)


def _apply(affine: Affine, x: np.ndarray) -> np.ndarray:
    return affine.scale * x + affine.offset


@pytest.mark.parametrize("make", [keras.layers.BatchNormalization, bnzoo.layers.BatchNormalization])
def test_batch_norm_is_the_affine_map_of_algorithm_2(make: type[keras.Layer]) -> None:
    norm = make(axis=1, epsilon=0.01)
    norm.build((None, 3, 4))
    gamma, beta, mean, variance = np.random.default_rng(0).uniform(0.5, 2, (4, 3))
    norm.set_weights([gamma, beta, mean, variance])
    gamma, beta, mean, variance = (np.float32(v).astype("float64") for v in norm.get_weights())
    x = _values(2, 3, 4)
    expected = np.stack(
        [gamma[c] * (x[:, c] - mean[c]) / (variance[c] + 0.01) ** 0.5 + beta[c] for c in range(3)],
        axis=1,
    )
    affine = batch_norm_affine(norm, 3)
    assert affine.scale.dtype == np.float64
    np.testing.assert_allclose(_apply(affine, x), expected, rtol=1e-13)


def test_without_gamma_and_beta() -> None:
    norm = keras.layers.BatchNormalization(center=False, scale=False, epsilon=1.0)
    norm.build((None, 2))
    norm.set_weights([np.array([1.0, 2.0]), np.array([3.0, 0.0])])
    affine = batch_norm_affine(norm, 2)
    np.testing.assert_array_equal(affine.scale, [0.5, 1.0])
    np.testing.assert_array_equal(affine.offset, [-0.5, -2.0])


def test_several_axes_lie_in_ascending_order() -> None:
    scale = np.arange(6.0).reshape(2, 3)
    affine = spread(scale, -scale, (-1, 1), 4)
    assert affine.scale.shape == (2, 1, 3)
    np.testing.assert_array_equal(affine.scale[:, 0], scale)


def test_after_is_composition() -> None:
    first, second, x = _random(1, 3), _random(1, 3, seed=1), _values(2, 3)
    np.testing.assert_allclose(
        _apply(second.after(first), x), _apply(second, _apply(first, x)), rtol=1e-12
    )


def test_along_is_a_vector_of_one_axis() -> None:
    affine = _random(1, 4, 1)
    scale, offset = affine.along(1, 4)
    np.testing.assert_array_equal(scale, affine.scale.ravel())
    np.testing.assert_array_equal(offset, affine.offset.ravel())
    constant = _random(1, 1, 1)
    np.testing.assert_array_equal(constant.along(-1, 3)[0], np.full(3, constant.scale.item()))
    with pytest.raises(NotFoldable, match="differs along axis 2, not by channel alone"):
        affine.along(-1, 3)


def test_cut_takes_a_part_of_an_axis() -> None:
    affine = _random(1, 5)
    np.testing.assert_array_equal(affine.cut(1, 2, 4).scale, affine.scale[:, 2:4])
    np.testing.assert_array_equal(affine.cut(0, 2, 4).offset, affine.offset)


def test_reshape_acts_on_the_same_values() -> None:
    affine, x = _random(1, 1, 3), _values(2, 4, 3)
    flat = affine.reshape((2, 4, 3), (24,))
    np.testing.assert_allclose(_apply(flat, x.reshape(24)), _apply(affine, x).reshape(24))


def test_reshape_finds_the_channels_again() -> None:
    affine = _random(1, 1, 3)
    there = affine.reshape((2, 4, 3), (24,))
    back = there.reshape((24,), (2, 4, 3))
    np.testing.assert_array_equal(back.scale, affine.scale)
    np.testing.assert_array_equal(back.offset, affine.offset)


def test_reshape_needs_all_sizes() -> None:
    with pytest.raises(NotFoldable, match="sizes that a reshape needs are unknown"):
        _random(1, 3).reshape((None, 3), (None,))
