"""Builds a model from a list of steps, whatever the steps are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import bnzoo

L = keras.layers
# Name of the kind of step, which of the tensors it takes, seed of its choices.
Step = tuple[str, int, int]
INPUTS = [(4,), (3, 3, 3, 2), (6, 3), (5, 5, 2)]
VARIANCES = (1e-6, 1e4)


@dataclass
class Builder:
    """The tensors made so far, and the layers to use again."""

    tensors: list[Any]
    dtype: str
    layers: list[tuple[tuple[int | None, ...], keras.Layer]]
    depth: int = 0

    def take(self, which: int, rank: int | None = None) -> Any:
        """A tensor of the rank, or None if there is none; the latest comes first."""
        fitting = [x for x in reversed(self.tensors) if rank in (None, len(x.shape))]
        return fitting[which % len(fitting)] if fitting else None

    def call(self, layer: keras.Layer, x: Any) -> None:
        """Adds the result of a layer."""
        self.layers.append((x.shape, layer))
        self.tensors.append(layer(x))


def _norm(builder: Builder, x: Any, rng: np.random.Generator) -> keras.Layer:
    axis: Any = -1
    if len(x.shape) > 2 and rng.random() < 0.15:
        axis = 1
    arguments = {
        "epsilon": float(rng.choice([1e-3, 1e-5])),
        "center": rng.random() < 0.8,
        "scale": rng.random() < 0.8,
        "dtype": builder.dtype,
    }
    if rng.random() < 0.5:
        return L.BatchNormalization(axis, **arguments)
    if rng.random() < 0.1:
        axis = tuple(range(1, len(x.shape)))
    return bnzoo.layers.BatchNormalization(axis, **arguments)


def _convolution(builder: Builder, x: Any, rng: np.random.Generator) -> keras.Layer | None:
    rank = len(x.shape) - 2
    if rank not in (1, 2, 3):
        return None
    kernel = int(rng.integers(1, 4))
    padding = str(rng.choice(["valid", "same"] if rank > 1 else ["valid", "same", "causal"]))
    kernel = 1 if min(x.shape[1:-1]) < kernel and padding == "valid" else kernel
    stride = int(rng.integers(1, 3))
    common = {"padding": padding, "use_bias": rng.random() < 0.5, "dtype": builder.dtype}
    common["activation"] = str(rng.choice(["linear", "linear", "linear", "tanh"]))
    kinds = ["conv", "conv"]
    if padding != "causal":
        kinds += ["transpose", "depthwise", "separable"] if rank < 3 else ["transpose"]
    kind = rng.choice(kinds)
    if kind == "conv":
        # XLA compiles each convolution in groups, which takes long: only some.
        groups = 2 if x.shape[-1] % 2 == 0 and rng.random() < 0.1 else 1
        make = [L.Conv1D, L.Conv2D, L.Conv3D][rank - 1]
        if padding == "same" and rng.random() < 0.2:
            return make(4, kernel, dilation_rate=2, **common)
        return make(2 * int(rng.integers(1, 3)), kernel, strides=stride, groups=groups, **common)
    if kind == "transpose":
        if max(x.shape[1:-1]) > 6:
            return None
        make = [L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose][rank - 1]
        return make(int(rng.integers(1, 4)), kernel, strides=stride, **common)
    multiplier = int(rng.integers(1, 3))
    if kind == "depthwise":
        make = [L.DepthwiseConv1D, L.DepthwiseConv2D][rank - 1]
        return make(kernel, strides=stride, depth_multiplier=multiplier, **common)
    make = [L.SeparableConv1D, L.SeparableConv2D][rank - 1]
    return make(3, kernel, strides=stride, depth_multiplier=multiplier, **common)


def _dense(builder: Builder, x: Any, rng: np.random.Generator) -> keras.Layer:
    units, use_bias = int(rng.integers(1, 5)), rng.random() < 0.5
    if rng.random() < 0.5:
        return L.Dense(units, use_bias=use_bias, dtype=builder.dtype)
    bias_axes = "y" if use_bias else None
    # Keras 3.15 turns around what it takes the extents behind `...` for, if they are several.
    rank = len(x.shape)
    kept = "..." if rank < 4 else "abcd"[: rank - 1]
    shape = units if rank < 4 else (*x.shape[1:-1], units)
    equation = f"{kept}x,xy->{kept}y"
    return L.EinsumDense(equation, shape, bias_axes=bias_axes, dtype=builder.dtype)


def _pointwise(builder: Builder, x: Any, rng: np.random.Generator) -> keras.Layer:
    makes: list[Callable[..., keras.Layer]] = [
        L.ReLU,
        lambda **kw: L.Activation("tanh", **kw),
        lambda **kw: L.Dropout(0.5, **kw),
        L.Identity,
        lambda **kw: L.GaussianNoise(0.1, **kw),
        lambda **kw: L.Activation("linear", **kw),
    ]
    return makes[rng.integers(len(makes))](dtype=builder.dtype)


def _resample(builder: Builder, x: Any, rng: np.random.Generator) -> keras.Layer | None:
    rank = len(x.shape) - 2
    if rank not in (1, 2, 3):
        return None
    choice = rng.integers(6)
    if choice < 2:
        name = "GlobalAveragePooling" if choice else "GlobalMaxPooling"
        return getattr(L, f"{name}{rank}D")(keepdims=rng.random() < 0.3, dtype=builder.dtype)
    if choice == 2:
        return getattr(L, f"ZeroPadding{rank}D")(1, dtype=builder.dtype)
    if min(x.shape[1:-1]) < 3 or max(x.shape[1:-1]) > 6:
        return None
    if choice == 3:
        name = str(rng.choice(["Cropping", "UpSampling"]))
        return getattr(L, f"{name}{rank}D")(1 if name == "Cropping" else 2, dtype=builder.dtype)
    name = str(rng.choice(["Average", "Max"]))
    if rank == 3 and builder.dtype == "float64":
        return None  # TensorFlow pools volumes in float32 only.
    padding = str(rng.choice(["valid", "same"]))
    return getattr(L, f"{name}Pooling{rank}D")(2, padding=padding, dtype=builder.dtype)


def _relayout(builder: Builder, x: Any, rng: np.random.Generator) -> keras.Layer:
    rank = len(x.shape) - 1
    choice = rng.integers(3)
    if choice == 0:
        return L.Flatten(dtype=builder.dtype)
    if choice == 1:
        return L.Permute(tuple(int(i) + 1 for i in rng.permutation(rank)), dtype=builder.dtype)
    return L.Reshape((1, *x.shape[1:]) if rank < 3 else (-1, x.shape[-1]), dtype=builder.dtype)


_LAYERS = {
    "norm": _norm,
    "norm after": _norm,
    "convolution": _convolution,
    "dense": _dense,
    "pointwise": _pointwise,
    "resample": _resample,
    "relayout": _relayout,
}
# Some more than once, for the patterns that fold to come up often.
KINDS = [*_LAYERS, "merge", "again", "nest", "add operation"]
KINDS += ["convolution", "norm after"] * 3


def _step(builder: Builder, step: Step) -> None:
    kind, which, seed = step
    rng = np.random.default_rng(seed)
    if kind in _LAYERS:
        # "norm after" follows the latest tensor, so that most graphs have what folds.
        x = builder.take(0 if kind == "norm after" else which)
        layer = _LAYERS[kind](builder, x, rng)
        if layer is not None and np.prod(x.shape[1:]) <= 600:
            builder.call(layer, x)
        return
    x = builder.take(which)
    alike = [y for y in builder.tensors if y.shape == x.shape]
    if kind == "add operation":
        builder.tensors.append(x + alike[which % len(alike)])
    elif kind == "merge":
        y = alike[which % len(alike)]
        make = L.Add if rng.random() < 0.5 else L.Concatenate
        builder.tensors.append(make(dtype=builder.dtype)([x, y]))
    elif kind == "again":
        fitting = [layer for shape, layer in builder.layers if shape == x.shape]
        if fitting:
            builder.call(fitting[which % len(fitting)], x)
    elif builder.depth < 2:
        builder.call(_nested(builder, x, rng), x)
        if len(alike) > 1 and rng.random() < 0.5:
            builder.call(builder.layers[-1][1], alike[0])


def _nested(builder: Builder, x: Any, rng: np.random.Generator) -> keras.Model:
    inputs = keras.Input(x.shape[1:], dtype=builder.dtype)
    kinds = rng.choice(["convolution", "norm after", "pointwise", "norm", "dense", "nest"], 5)
    inner = Builder([inputs], builder.dtype, [], builder.depth + 1)
    if rng.random() < 0.5:
        for kind in kinds:
            _step(inner, (str(kind), 0, int(rng.integers(1 << 16))))
        return keras.Model(inputs, inner.tensors[-1])
    layers: list[keras.Layer] = [inputs]
    for kind in kinds:
        layer = None if kind == "nest" else _LAYERS[str(kind)](inner, inner.tensors[-1], rng)
        if layer is not None:
            inner.call(layer, inner.tensors[-1])
            layers.append(layer)
    return keras.Sequential([*layers, L.Identity(dtype=builder.dtype)])


def build(steps: Sequence[Step], dtype: str) -> keras.Model:
    """The model of the steps, with random weights; steps that do not fit are left out."""
    inputs = [keras.Input(shape, dtype=dtype) for shape in INPUTS]
    builder = Builder(list(inputs), dtype, [])
    for step in steps:
        _step(builder, step)
    made = builder.tensors[len(inputs) :]
    # What nothing takes, and the first tensor in any case, which most often something takes.
    taken = {
        id(x)
        for layer in made
        for x in layer._keras_history.operation._inbound_nodes[
            layer._keras_history.node_index
        ].input_tensors
    }
    outputs = [x for i, x in enumerate(made) if id(x) not in taken or (i == 0 and len(made) > 9)]
    return keras.Model(inputs, outputs or inputs)  # Steps may find nothing to work on.
