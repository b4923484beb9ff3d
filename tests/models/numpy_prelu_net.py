"""The networks of He et al. in NumPy float64, layer by layer as Tables 1 and 3 list them.

A network is a list of rows: ("conv", name, size, stride, zeros around) and ("pool", size), then the
bins of its pyramid. Nothing here comes from bnzoo but the weights, by name.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

SMALL = [
    ("conv", "conv1", 7, 2, 0),
    ("pool", 3),
    ("conv", "conv2_1", 2, 1, 1),
    ("conv", "conv2_2", 2, 1, 0),
    ("conv", "conv2_3", 2, 1, 1),
    ("conv", "conv2_4", 2, 1, 0),
    ("pool", 2),
    *(("conv", f"conv3_{i}", 2, 1, i % 2) for i in range(1, 7)),
]
DEEP = [*SMALL[:7], *(("conv", f"conv3_{i}", 2, 1, i % 2) for i in range(1, 23))]


def _large(convs: int) -> list[tuple]:
    stages = [
        [("conv", f"conv{stage}_{i}", 3, 1, 1) for i in range(1, convs + 1)] for stage in (2, 3, 4)
    ]
    return [
        ("conv", "conv1", 7, 2, 3),
        ("pool", 2),
        *stages[0],
        ("pool", 2),
        *stages[1],
        ("pool", 2),
        *stages[2],
    ]


NETWORKS = {
    "prelu_net_14": (SMALL, (6, 3, 2, 1)),
    "prelu_net_30": (DEEP, (6, 3, 2, 1)),
    "prelu_net_a": (_large(5), (7, 3, 2, 1)),
    "prelu_net_b": (_large(6), (7, 3, 2, 1)),
    "prelu_net_c": (_large(6), (7, 3, 2, 1)),
}


def _windows(x: np.ndarray, size: int, stride: int) -> np.ndarray:
    """[N, H', W', C, size, size]: what each output place sees."""
    view = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))
    return view[:, ::stride, ::stride]


def _conv(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray, stride: int, pad: int) -> np.ndarray:
    x = np.pad(x, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
    return np.einsum("nhwcij,ijcd->nhwd", _windows(x, len(kernel), stride), kernel) + bias


def features(network: str, weights: Mapping[str, list[np.ndarray]], x: np.ndarray) -> np.ndarray:
    """The last map. `weights` holds [kernel, bias] and [slopes] by the names of the layers."""
    for kind, *row in NETWORKS[network][0]:
        if kind == "pool":
            x = _windows(x, row[0], row[0]).max((-2, -1))
        else:
            name, _, stride, pad = row
            x = rectify(_conv(x, *weights[name], stride, pad), name, weights)
    return x


def rectify(x: np.ndarray, name: str, weights: Mapping[str, list[np.ndarray]]) -> np.ndarray:
    slope = weights[f"{name}_prelu"][0] if f"{name}_prelu" in weights else 0.0
    return np.maximum(x, 0) + slope * np.minimum(x, 0)


def pyramid(network: str, maps: np.ndarray) -> np.ndarray:
    _, height, width, _ = maps.shape
    parts = []
    for n in NETWORKS[network][1]:
        for i in range(n):
            rows = maps[:, i * height // n : -(-(i + 1) * height // n)]
            for j in range(n):
                parts.append(rows[:, :, j * width // n : -(-(j + 1) * width // n)].max((1, 2)))
    return np.concatenate(parts, axis=1)


def scores(network: str, weights: Mapping[str, list[np.ndarray]], maps: np.ndarray) -> np.ndarray:
    """The pyramid, three dense layers and a softmax."""
    x = pyramid(network, maps)
    for name in ("fc1", "fc2"):
        kernel, bias = weights[name]
        x = rectify(x @ kernel + bias, name, weights)
    kernel, bias = weights["predictions"]
    logits = x @ kernel + bias
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


def randomized(model, seed: int) -> dict[str, list[np.ndarray]]:
    """Gives the model weights, biases and slopes that all differ, and returns them in float64.

    Kernels get the deviation that keeps activations near 1, so that no error hides in small values.
    """
    generator = np.random.default_rng(seed)
    weights = {}
    for layer in model.layers:
        drawn = []
        for variable in layer.weights:
            if variable.name == "kernel":
                fan_in = np.prod(variable.shape[:-1])
                value = generator.normal(0, np.sqrt(2 / fan_in), variable.shape)
            elif variable.name == "alpha":
                value = generator.uniform(-0.2, 0.6, variable.shape)
            else:
                value = generator.normal(0, 0.1, variable.shape)
            drawn.append(value.astype("float32"))
        if drawn:
            layer.set_weights(drawn)
            weights[layer.name] = [value.astype("float64") for value in drawn]
    return weights
