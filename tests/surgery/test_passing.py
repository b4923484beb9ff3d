"""Affine maps move across layers that commute with them; the oracle is the unfolded model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import bnzoo
from bnzoo.surgery import fold_batch_norm

from .models import batch_norms, randomize, relative_error

L = keras.layers
TOLERANCE = 2e-6  # Float32 sums of some tens of products.
FIRST: dict[str, Any] = {"data_format": "channels_first"}

# A layer and the shape of one example that it gets.
IMAGES = [
    L.Identity(),
    L.Dropout(0.5),
    L.AlphaDropout(0.5),
    L.GaussianDropout(0.5),
    L.GaussianNoise(1.0),
    L.SpatialDropout2D(0.5),
    L.ActivityRegularization(0.1),
    L.Activation("linear"),
    L.AveragePooling2D(2),
    L.AveragePooling2D(3, strides=1, padding="same"),
    L.UpSampling2D(2),
    L.UpSampling2D(2, interpolation="bilinear"),
    L.UpSampling2D(2, interpolation="bicubic"),
    L.Cropping2D(1),
    L.Permute((2, 1, 3)),
    L.Reshape((2, 8, 3)),
    L.Reshape((1, 16, 1, 3)),
]
SEQUENCES = [
    L.SpatialDropout1D(0.5),
    L.AveragePooling1D(2),
    L.UpSampling1D(2),
    L.Cropping1D(1),
]
VOLUMES = [L.SpatialDropout3D(0.5), L.AveragePooling3D(2), L.UpSampling3D(2), L.Cropping3D(1)]
ROWS = [(layer, (4, 4, 3)) for layer in IMAGES]
ROWS += [(layer, (4, 3)) for layer in SEQUENCES] + [(layer, (4, 4, 4, 3)) for layer in VOLUMES]
ROWS += [
    (L.GlobalAveragePooling1D(), (4, 3)),
    (L.GlobalAveragePooling2D(), (4, 4, 3)),
    (L.GlobalAveragePooling2D(keepdims=True), (4, 4, 3)),
    (L.GlobalAveragePooling3D(), (2, 2, 2, 3)),
]
MAXIMA = [
    (L.MaxPooling1D(2), (4, 3)),
    (L.MaxPooling2D(3, strides=2, padding="same"), (4, 4, 3)),
    (L.MaxPooling3D(2), (4, 4, 4, 3)),
    (L.GlobalMaxPooling1D(), (4, 3)),
    (L.GlobalMaxPooling2D(keepdims=True), (4, 4, 3)),
    (L.GlobalMaxPooling3D(), (2, 2, 2, 3)),
]
FORWARD_ONLY = [(L.Flatten(), (2, 2, 3)), (L.Reshape((12,)), (2, 2, 3))]


def _copy(layer: keras.Layer) -> keras.Layer:
    return type(layer).from_config(layer.get_config())


def _fold(layers: list[keras.Layer], shape: tuple[int, ...]) -> tuple[keras.Model, Any]:
    model = randomize(keras.Sequential([keras.Input(shape), *layers]))
    if any(isinstance(layer, tuple(type(row[0]) for row in MAXIMA)) for layer in layers):
        for norm in batch_norms(model):
            norm.gamma.assign(np.abs(norm.gamma))
    folded, report = fold_batch_norm(model, return_report=True)
    assert relative_error(model, folded) < TOLERANCE
    return folded, report


def _ids(row: tuple[keras.Layer, tuple[int, ...]]) -> str:
    return type(row[0]).__name__


@pytest.mark.parametrize("row", ROWS + MAXIMA, ids=_ids)
def test_across_backward(row: tuple[keras.Layer, tuple[int, ...]]) -> None:
    layer, shape = row
    norm = L.BatchNormalization()
    _, report = _fold([L.Dense(3), _copy(layer), norm, L.Activation("tanh")], shape)
    assert report.count("folded") == 1, report


@pytest.mark.parametrize("row", ROWS + MAXIMA + FORWARD_ONLY, ids=_ids)
def test_across_forward(row: tuple[keras.Layer, tuple[int, ...]]) -> None:
    layer, shape = row
    _, report = _fold(
        [L.BatchNormalization(), _copy(layer), L.Dense(4), L.Activation("tanh")], shape
    )
    assert report.count("folded") == 1, report


@pytest.mark.parametrize(
    ("layer", "forward"),
    [
        (L.AveragePooling2D(2, **FIRST), L.Conv2D(2, 1, groups=2, **FIRST)),
        (L.GlobalAveragePooling2D(**FIRST), L.Dense(3)),
        (L.UpSampling2D(2, **FIRST), L.DepthwiseConv2D(2, **FIRST)),
        (L.Cropping2D(1, **FIRST), L.DepthwiseConv2D(2, **FIRST)),
        (L.Permute((2, 3, 1)), L.Conv2D(3, 2)),
        (L.Flatten(), L.Dense(3)),
    ],
)
def test_channels_first(layer: keras.Layer, forward: keras.Layer) -> None:
    depthwise = L.DepthwiseConv2D(1, **FIRST)
    layers = [depthwise, L.BatchNormalization(1), L.Activation("tanh"), L.BatchNormalization(1)]
    _, report = _fold([*layers, layer, forward], (2, 6, 6))
    assert report.count("folded") == 2, report


def test_flatten_repeats_the_channels() -> None:
    """Case 37: y = x + (1, 10), flattened, in a Dense of weights 1..8."""
    norm, dense = L.BatchNormalization(epsilon=0.0, scale=False), L.Dense(1)
    model = keras.Sequential([keras.Input((2, 2, 2)), norm, L.Flatten(), dense])
    norm.beta.assign([1.0, 10.0])
    dense.kernel.assign(np.arange(1.0, 9.0).reshape(8, 1))
    folded, report = fold_batch_norm(model, return_report=True)
    assert report.count("folded") == 1
    # 1 + 3 + 5 + 7 times 1 and 2 + 4 + 6 + 8 times 10.
    np.testing.assert_allclose(folded.layers[-1].bias, [216.0], rtol=1e-6)
    assert relative_error(model, folded) < TOLERANCE


def test_flatten_of_one_pixel_backward() -> None:
    _, report = _fold(
        [L.Conv2D(3, 2), L.Flatten(), L.BatchNormalization(), L.Activation("tanh")], (2, 2, 2)
    )
    assert report.count("folded") == 1


def test_activations_of_their_own_fold_forward() -> None:
    norm = bnzoo.layers.BatchNormalization((1, 2, 3))
    _, report = _fold([norm, L.Flatten(), L.Dense(3)], (2, 2, 3))
    assert report.count("folded") == 1


@pytest.mark.parametrize(
    ("layers", "shape", "reason"),
    [
        (
            [L.Dense(3), L.MaxPooling2D(), L.BatchNormalization(name="bn")],
            (4, 4, 2),
            "a negative scale would turn the maximum of 'max_pooling2d",
        ),
        (
            [L.Dense(3), L.Flatten(), L.BatchNormalization()],
            (2, 2, 3),
            "differs along axis 1, not by channel alone",
        ),
        (
            [L.BatchNormalization(1), L.Flatten(data_format="channels_first"), L.Dense(3)],
            (2, 2, 3),
            "moves the channels to the end",
        ),
        (
            [L.BatchNormalization(1), L.AveragePooling2D(2), L.Dense(3)],
            (4, 4, 3),
            "differs along axis 1, not by channel alone",
        ),
        (
            [L.BatchNormalization(1), L.GlobalAveragePooling2D(), L.Dense(3)],
            (4, 4, 3),
            "differs along axis 1, not by channel alone",
        ),
        (
            [L.Dense(3), L.Activation("tanh"), L.BatchNormalization()],
            (4,),
            "is a nonlinearity",
        ),
        ([L.Dense(3), L.ReLU(), L.BatchNormalization()], (4,), "(ReLU) is in the way"),
        (
            [L.BatchNormalization(), L.ZeroPadding2D(1), L.Conv2D(2, 3)],
            (4, 4, 3),
            "(ZeroPadding2D) is in the way",
        ),
    ],
)
def test_refuses(layers: list[keras.Layer], shape: tuple[int, ...], reason: str) -> None:
    model = randomize(keras.Sequential([keras.Input(shape), *map(_copy, layers)]))
    folded, report = fold_batch_norm(model, return_report=True)
    assert report.count("affine") == 1
    assert reason in report.batch_norms[0].reason
    assert relative_error(model, folded) < TOLERANCE


def test_dropout_that_is_on_at_inference_is_not_crossed() -> None:
    inputs = keras.Input((4,))
    x = L.Dropout(0.5, name="on")(L.Dense(3)(inputs), training=True)
    model = keras.Model(inputs, L.BatchNormalization()(x))
    _, report = fold_batch_norm(model, return_report=True)
    assert "backward: 'on' is called with training=True" in report.batch_norms[0].reason
