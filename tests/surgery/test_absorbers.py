"""Every kind of layer takes in what comes after and before it; the oracle is the unfolded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import bnzoo
from bnzoo.surgery import fold_batch_norm

from .models import batch_norms, randomize, relative_error

L = keras.layers
# Float32 sums of some tens of products: a few units of 6e-8.
TOLERANCE = 2e-6

# (layer, shape of one example, needs XLA on a CPU). The layer is given `use_bias`.
Row = tuple[Callable[..., keras.Layer], tuple[int, ...], bool]


def _row(layer: type, shape: tuple[int, ...], jit: bool = False, **arguments: Any) -> Row:
    return (lambda **more: layer(**arguments, **more)), shape, jit


FIRST = {"data_format": "channels_first"}
BACKWARD: dict[str, Row] = {
    "conv1d": _row(L.Conv1D, (6, 3), filters=4, kernel_size=3, padding="same"),
    "conv1d causal": _row(L.Conv1D, (6, 3), filters=4, kernel_size=3, padding="causal"),
    "conv2d": _row(L.Conv2D, (5, 5, 3), filters=4, kernel_size=3, padding="same", strides=2),
    "conv2d grouped": _row(L.Conv2D, (5, 5, 4), filters=6, kernel_size=3, groups=2),
    "conv2d dilated": _row(L.Conv2D, (6, 6, 3), filters=4, kernel_size=2, dilation_rate=2),
    "conv2d first": _row(L.Conv2D, (3, 5, 5), True, filters=4, kernel_size=3, **FIRST),
    "conv3d": _row(L.Conv3D, (4, 4, 4, 2), filters=4, kernel_size=2),
    "conv3d first": _row(L.Conv3D, (2, 4, 4, 4), filters=4, kernel_size=2, **FIRST),
    "conv1d transpose": _row(L.Conv1DTranspose, (4, 3), filters=5, kernel_size=3, strides=2),
    "conv2d transpose same": _row(
        L.Conv2DTranspose, (4, 4, 2), filters=5, kernel_size=3, strides=2, padding="same"
    ),
    "conv2d transpose valid": _row(
        L.Conv2DTranspose, (4, 4, 2), filters=5, kernel_size=3, strides=2
    ),
    "conv2d transpose first": _row(
        L.Conv2DTranspose, (2, 4, 4), True, filters=5, kernel_size=3, **FIRST
    ),
    "conv2d transpose dilated": _row(
        L.Conv2DTranspose, (4, 4, 2), True, filters=5, kernel_size=2, dilation_rate=2
    ),
    "conv3d transpose": _row(L.Conv3DTranspose, (3, 3, 3, 2), filters=4, kernel_size=2),
    "depthwise1d": _row(L.DepthwiseConv1D, (6, 3), kernel_size=3),
    "depthwise2d": _row(L.DepthwiseConv2D, (5, 5, 3), kernel_size=3, padding="same"),
    "depthwise2d multiplied": _row(
        L.DepthwiseConv2D, (5, 5, 3), kernel_size=3, depth_multiplier=2, strides=2
    ),
    "depthwise2d first": _row(
        L.DepthwiseConv2D, (3, 5, 5), kernel_size=3, depth_multiplier=2, **FIRST
    ),
    "separable1d": _row(L.SeparableConv1D, (6, 3), filters=4, kernel_size=3),
    "separable2d": _row(
        L.SeparableConv2D, (5, 5, 3), filters=4, kernel_size=3, padding="same", depth_multiplier=2
    ),
    "separable2d first": _row(L.SeparableConv2D, (3, 5, 5), filters=4, kernel_size=3, **FIRST),
    "dense": _row(L.Dense, (3,), units=4),
    "dense on images": _row(L.Dense, (2, 2, 3), units=4),
}
FORWARD: dict[str, Row] = {
    "conv1d": _row(L.Conv1D, (6, 3), filters=4, kernel_size=3),
    "conv2d": _row(L.Conv2D, (5, 5, 3), filters=4, kernel_size=3, strides=2),
    "conv2d pointwise": _row(
        L.Conv2D, (5, 5, 3), filters=4, kernel_size=1, padding="same", strides=2
    ),
    "conv2d grouped": _row(L.Conv2D, (5, 5, 6), filters=4, kernel_size=3, groups=2),
    "conv2d dilated": _row(L.Conv2D, (6, 6, 3), filters=4, kernel_size=2, dilation_rate=2),
    "conv2d first": _row(L.Conv2D, (3, 5, 5), True, filters=4, kernel_size=3, **FIRST),
    "conv3d": _row(L.Conv3D, (4, 4, 4, 2), filters=4, kernel_size=2),
    "conv2d transpose": _row(L.Conv2DTranspose, (4, 4, 3), filters=5, kernel_size=1),
    "depthwise1d": _row(L.DepthwiseConv1D, (6, 3), kernel_size=3),
    "depthwise2d": _row(L.DepthwiseConv2D, (5, 5, 3), kernel_size=3),
    "depthwise2d multiplied": _row(
        L.DepthwiseConv2D, (5, 5, 3), kernel_size=3, depth_multiplier=2, strides=2
    ),
    "separable1d": _row(L.SeparableConv1D, (6, 3), filters=4, kernel_size=3),
    "separable2d": _row(L.SeparableConv2D, (5, 5, 3), filters=4, kernel_size=3, depth_multiplier=2),
    "separable2d first": _row(L.SeparableConv2D, (3, 5, 5), filters=4, kernel_size=3, **FIRST),
    "dense": _row(L.Dense, (3,), units=4),
    "dense on images": _row(L.Dense, (2, 2, 3), units=4),
}
# A zero offset goes also where padding adds zeros.
PADDED: dict[str, Row] = {
    "conv1d causal": _row(L.Conv1D, (6, 3), filters=4, kernel_size=3, padding="causal"),
    "conv2d": _row(L.Conv2D, (5, 5, 3), filters=4, kernel_size=3, padding="same"),
    "conv2d transpose": _row(L.Conv2DTranspose, (4, 4, 3), filters=5, kernel_size=3, strides=2),
    "conv2d transpose strided": _row(
        L.Conv2DTranspose, (4, 4, 3), filters=5, kernel_size=1, strides=2
    ),
    "depthwise2d": _row(L.DepthwiseConv2D, (5, 5, 3), kernel_size=3, padding="same"),
    "separable2d": _row(L.SeparableConv2D, (5, 5, 3), filters=4, kernel_size=3, padding="same"),
}
# Whether there is a bias, a beta and a gamma. XLA takes seconds for each.
PRESENT = [(True, True, True), (False, True, True), (True, False, True), (False, True, False)]
CLASSES = [L.BatchNormalization, bnzoo.layers.BatchNormalization]


def _axis(layer: keras.Layer) -> int:
    return 1 if getattr(layer, "data_format", "") == "channels_first" else -1


@pytest.mark.parametrize("row", BACKWARD.values(), ids=BACKWARD)
def test_takes_in_what_follows(row: Row) -> None:
    make, shape, jit = row
    for number, (use_bias, center, scale) in enumerate(PRESENT[: 2 if jit else None]):
        layer = make(use_bias=use_bias)
        norm = CLASSES[number % 2](_axis(layer), center=center, scale=scale)
        model = randomize(
            keras.Sequential([keras.Input(shape), layer, norm, L.Activation("tanh")]), number
        )
        folded, report = fold_batch_norm(model, return_report=True)
        assert report.count("folded") == 1, report
        assert batch_norms(folded) == []
        assert [type(layer) for layer in folded.layers] == [type(layer), L.Activation]
        assert relative_error(model, folded, jit=jit) < TOLERANCE


@pytest.mark.parametrize("row", FORWARD.values(), ids=FORWARD)
def test_takes_in_what_comes_before(row: Row) -> None:
    make, shape, jit = row
    for number, (use_bias, center, scale) in enumerate(PRESENT[: 2 if jit else None]):
        layer = make(use_bias=use_bias, activation="tanh")
        norm = CLASSES[number % 2](_axis(layer), center=center, scale=scale)
        model = randomize(keras.Sequential([keras.Input(shape), norm, layer]), number)
        folded, report = fold_batch_norm(model, return_report=True)
        assert report.count("folded") == 1, report
        assert [type(layer) for layer in folded.layers] == [type(layer)]
        assert relative_error(model, folded, jit=jit) < TOLERANCE


@pytest.mark.parametrize("row", PADDED.values(), ids=PADDED)
def test_takes_in_only_a_scale_where_padding_adds_zeros(row: Row) -> None:
    make, shape, _ = row
    model = randomize(keras.Sequential([keras.Input(shape), L.BatchNormalization(), make()]))
    folded, report = fold_batch_norm(model, return_report=True)
    assert "would not get its offset" in report.batch_norms[0].reason
    assert isinstance(folded.layers[0], bnzoo.layers.ChannelAffine)
    assert relative_error(model, folded) < TOLERANCE

    norm = model.layers[0]
    norm.moving_mean.assign(np.zeros(shape[-1]))
    norm.beta.assign(np.zeros(shape[-1]))
    folded, report = fold_batch_norm(model, return_report=True)
    assert report.count("folded") == 1
    assert relative_error(model, folded) < TOLERANCE


@pytest.mark.parametrize("size", [6, None])
def test_refuses_a_bias_that_keras_would_add_along_the_width(size: int | None) -> None:
    """With channels first, Keras 3.15 adds a bias along an axis of the same size that is last."""
    layers = [L.DepthwiseConv2D(3, use_bias=False, **FIRST), L.BatchNormalization(1)]
    model = randomize(keras.Sequential([keras.Input((4, size, size)), *layers]))
    folded, report = fold_batch_norm(model, return_report=True)
    assert "could add a bias" in report.batch_norms[0].reason
    inputs = np.random.default_rng(0).normal(size=(2, 4, 6, 6)).astype("float32")
    assert relative_error(model, folded, inputs) < TOLERANCE


def test_refuses_a_bias_of_an_equation_that_keras_would_add_along_the_last_axis() -> None:
    layers = [L.EinsumDense("abc,bcd->abd", (4, 4)), bnzoo.layers.BatchNormalization(1)]
    model = randomize(keras.Sequential([keras.Input((4, 3)), *layers]))
    folded, report = fold_batch_norm(model, return_report=True)
    assert "could add a bias" in report.batch_norms[0].reason
    assert relative_error(model, folded) < TOLERANCE


def test_transposed_convolution_scales_the_third_axis() -> None:
    """Case 33: kernel (3, 3, 5, 2), five distinct scales."""
    layer = L.Conv2DTranspose(5, 3, strides=2, padding="same", use_bias=False)
    norm = L.BatchNormalization(epsilon=0.0, center=False)
    model = keras.Sequential([keras.Input((4, 4, 2)), layer, norm])
    norm.gamma.assign([1, 2, 3, 4, 5])
    kernel = np.random.default_rng(0).normal(size=(3, 3, 5, 2)).astype("float32")
    layer.kernel.assign(kernel)
    folded = fold_batch_norm(model)
    scales = np.arange(1, 6, dtype="float32")
    np.testing.assert_array_equal(folded.layers[0].kernel, kernel * scales[:, np.newaxis])


@pytest.mark.parametrize("row", BACKWARD.values(), ids=BACKWARD)
def test_folds_the_known_value(row: Row) -> None:
    """Case 31: w=3, b=2; mean 1, variance 3, epsilon 1, gamma 4, beta 5 give w=6, b=7."""
    make, shape, _ = row
    layer = make()
    norm = L.BatchNormalization(_axis(layer), epsilon=1.0)
    model = keras.Sequential([keras.Input(shape), layer, norm])
    for name, value in [("pointwise_kernel", 3.0), ("kernel", 3.0), ("bias", 2.0)]:
        if hasattr(layer, name):
            getattr(layer, name).assign(np.full(getattr(layer, name).shape, value))
    values = {"moving_mean": 1.0, "moving_variance": 3.0, "gamma": 4.0, "beta": 5.0}
    for name, value in values.items():
        getattr(norm, name).assign(np.full(norm.gamma.shape, value))
    new = fold_batch_norm(model).layers[0]
    kernel = new.pointwise_kernel if hasattr(new, "pointwise_kernel") else new.kernel
    np.testing.assert_allclose(kernel, 6.0, rtol=1e-6)
    np.testing.assert_allclose(new.bias, 7.0, rtol=1e-6)


def test_epsilon_is_inside_the_root() -> None:
    """Case 31: variance 0 and epsilon 1e-3 give the scale 31.6228."""
    model = keras.Sequential([keras.Input((1,)), L.Dense(1), L.BatchNormalization(epsilon=1e-3)])
    model.layers[0].kernel.assign([[1.0]])
    model.layers[1].moving_variance.assign([0.0])
    np.testing.assert_allclose(fold_batch_norm(model).layers[0].kernel, [[31.6228]], rtol=1e-5)


def test_keeps_what_the_layer_is_otherwise() -> None:
    layer = L.Conv2D(
        4, 3, use_bias=False, kernel_regularizer="l2", kernel_constraint="max_norm", name="c"
    )
    layer.trainable = False
    model = keras.Sequential([keras.Input((5, 5, 3)), layer, L.BatchNormalization()])
    new = fold_batch_norm(model).get_layer("c")
    assert isinstance(new.kernel_regularizer, keras.regularizers.L2)
    assert isinstance(new.kernel_constraint, keras.constraints.MaxNorm)
    assert new.trainable is False
    assert new.use_bias is True
