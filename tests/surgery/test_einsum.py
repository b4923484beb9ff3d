"""EinsumDense takes in what comes after and before it; the oracle is the unfolded model."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import bnzoo
from bnzoo.surgery import fold_batch_norm

from .models import randomize, relative_error

L = keras.layers
TOLERANCE = 2e-6  # Float32 sums of some ten products.

# equation, shape of one example, output_shape, axis of the normalization, bias_axes tried
AFTER = [
    ("ab,bc->ac", (3,), 4, -1, [None, "c"]),
    ("abc,cd->abd", (2, 3), (2, 4), -1, [None, "d", "bd"]),
    ("abc,cd->abd", (2, 3), (None, 4), -1, [None, "d"]),
    ("abc,cde->abde", (2, 3), (2, 4, 5), -1, [None, "e", "de"]),
    ("abc,cde->abde", (2, 3), (2, 4, 5), 2, [None, "e", "d", "de"]),
    ("abc,cde->abde", (2, 3), (2, 4, 5), (2, 3), [None, "e"]),
    ("abc,bcd->abd", (2, 3), (2, 4), 1, [None, "d", "b"]),
    ("...x,xy->...y", (2, 3), 4, -1, [None, "y"]),
    ("...x,yx->...y", (3,), 4, -1, [None, "y"]),
    ("abx...,xy->aby...", (2, 3, 2), (2, 4), 2, [None, "y"]),
    ("abc,dc->adb", (2, 3), (4, 2), 1, [None, "d", "b"]),
]
BEFORE = [
    ("ab,bc->ac", (3,), 4, -1, [None, "c"]),
    ("abc,cd->abd", (2, 3), (2, 4), -1, [None, "d", "bd"]),
    ("abc,bcd->ad", (2, 3), 4, -1, [None, "d"]),
    ("abc,bcd->ad", (2, 3), 4, 1, [None, "d"]),
    ("abc,bcd->ad", (2, 3), 4, (1, 2), [None, "d"]),
    ("abc,bcd->abd", (2, 3), (2, 4), 1, [None, "d", "b"]),
    ("...x,yx->...y", (2, 3), 4, -1, [None, "y"]),
    ("abc,dc->adb", (2, 3), (4, 2), -1, [None, "d"]),
]


def _model(layers: list[keras.Layer], shape: tuple[int, ...]) -> keras.Model:
    return randomize(keras.Sequential([keras.Input(shape), *layers]))


@pytest.mark.parametrize("row", AFTER, ids=lambda row: f"{row[0]} {row[3]}")
def test_takes_in_what_follows(row: tuple) -> None:
    equation, shape, output_shape, axis, biases = row
    for bias_axes in biases:
        layer = L.EinsumDense(equation, output_shape, bias_axes=bias_axes)
        model = _model([layer, bnzoo.layers.BatchNormalization(axis), L.Activation("tanh")], shape)
        folded, report = fold_batch_norm(model, return_report=True)
        assert report.count("folded") == 1, report
        assert relative_error(model, folded) < TOLERANCE


@pytest.mark.parametrize("row", BEFORE, ids=lambda row: f"{row[0]} {row[3]}")
def test_takes_in_what_comes_before(row: tuple) -> None:
    equation, shape, output_shape, axis, biases = row
    for bias_axes in biases:
        layer = L.EinsumDense(equation, output_shape, bias_axes=bias_axes, activation="tanh")
        model = _model([bnzoo.layers.BatchNormalization(axis), layer], shape)
        folded, report = fold_batch_norm(model, return_report=True)
        assert report.count("folded") == 1, report
        assert relative_error(model, folded) < TOLERANCE


@pytest.mark.parametrize(
    ("layers", "shape", "reason"),
    [
        (  # The axis b is carried over from the input.
            [L.EinsumDense("abc,cd->abd", (2, 4)), L.BatchNormalization(1)],
            (2, 3),
            "differs along an axis that the kernel does not have",
        ),
        (
            [L.BatchNormalization(1), L.EinsumDense("abc,cd->abd", (2, 4))],
            (2, 3),
            "differs along an axis that the kernel does not have",
        ),
        (  # The offset is added once for each value of b, of which the kernel knows nothing.
            [L.BatchNormalization(), L.EinsumDense("abc,cd->ad", 4)],
            (2, 3),
            "sums over an axis that its kernel does not have",
        ),
    ],
)
def test_refuses(layers: list[keras.Layer], shape: tuple[int, ...], reason: str) -> None:
    model = _model(layers, shape)
    folded, report = fold_batch_norm(model, return_report=True)
    assert report.count("affine") == 1
    assert reason in report.batch_norms[0].reason
    assert relative_error(model, folded) < TOLERANCE


def test_folds_the_known_value() -> None:
    """Case 31: w=3, b=2; mean 1, variance 3, epsilon 1, gamma 4, beta 5 give w=6, b=7."""
    layer = L.EinsumDense("ab,bc->ac", 2, bias_axes="c")
    norm = L.BatchNormalization(epsilon=1.0)
    model = keras.Sequential([keras.Input((3,)), layer, norm])
    layer.set_weights([np.full((3, 2), 3.0), np.full(2, 2.0)])
    norm.set_weights([np.full(2, value) for value in (4.0, 5.0, 1.0, 3.0)])
    kernel, bias = fold_batch_norm(model).layers[0].get_weights()
    np.testing.assert_allclose(kernel, 6.0, rtol=1e-6)
    np.testing.assert_allclose(bias, 7.0, rtol=1e-6)
