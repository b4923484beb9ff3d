"""The Inception networks in NumPy float64, written from the paper's figure and Caffe's, MXNet's and
TensorFlow's rules of padding: the oracle that knows nothing of Keras but the weights' names."""

from __future__ import annotations

import numpy as np

MODULES = ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b")
STRIDE_2 = ("3c", "4e")


def randomize(model, seed=0):
    """Gives every weight a value that a wrong use of it would show, and returns them by name."""
    rng = np.random.default_rng(seed)
    values = {}
    for layer in model.layers:
        for weight in layer.weights:
            shape = weight.shape
            if weight.name in ("gamma", "moving_variance"):
                value = rng.uniform(0.5, 1.5, shape)
            elif weight.name == "alpha":
                value = rng.uniform(0.1, 0.5, shape)
            elif weight.name in ("beta", "moving_mean", "bias"):
                value = rng.normal(0.0, 0.3, shape)
            else:
                fan_in = np.prod(shape[: -2 if weight.name == "depthwise_kernel" else -1])
                value = rng.normal(0.0, np.sqrt(2.0 / fan_in), shape)
            weight.assign(value)
            values[f"{layer.name}/{weight.name}"] = weight.numpy().astype(np.float64)
    return values


def same_pads(size, window, stride):
    """TensorFlow's "same": the smaller half of what is missing comes first."""
    missing = max((-(-size // stride) - 1) * stride + window - size, 0)
    return missing // 2, missing - missing // 2


def windows(x, window, stride, pads, fill):
    """All windows of a map [N, H, W, C]: [N, H', W', C, window, window]."""
    pads = [same_pads(n, window, stride) if pads == "same" else pads for n in x.shape[1:3]]
    x = np.pad(x, ((0, 0), *pads, (0, 0)), constant_values=fill)
    views = np.lib.stride_tricks.sliding_window_view(x, (window, window), axis=(1, 2))
    return views[:, ::stride, ::stride]


def conv(x, kernel, stride, pads):
    """Correlation with a kernel [k, k, c, d]."""
    return np.einsum("nyxchw,hwcd->nyxd", windows(x, kernel.shape[0], stride, pads, 0.0), kernel)


def max_pool(x, stride, pads):
    return windows(x, 3, stride, pads, -np.inf).max(axis=(-1, -2))


def average_pool(x, count_padding):
    total = windows(x, 3, 1, (1, 1), 0.0).sum(axis=(-1, -2))
    if count_padding:
        return total / 9
    return total / windows(np.ones_like(x), 3, 1, (1, 1), 0.0).sum(axis=(-1, -2))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class Inception:
    """The forward pass in inference mode, with the weights of `randomize`."""

    def __init__(self, weights, epsilon, symmetric, stem_pool, module_pool, count_padding):
        self.weights = weights
        self.epsilon = epsilon
        self.symmetric = symmetric
        self.stem_pool = stem_pool
        self.module_pool = module_pool
        self.count_padding = count_padding
        self.outputs = {}

    def unit(self, x, name, stride=1):
        w = self.weights
        if f"{name}/kernel" in w:
            kernel = w[f"{name}/kernel"]
        else:
            depthwise, pointwise = (
                w[f"{name}/depthwise_kernel"],
                w[f"{name}/pointwise_kernel"][0, 0],
            )
            # Channel m of input channel c is row c * multiplier + m of the pointwise kernel.
            pointwise = pointwise.reshape(*depthwise.shape[2:], -1)
            kernel = np.einsum("hwcm,cmd->hwcd", depthwise, pointwise)
        half = kernel.shape[0] // 2
        x = conv(x, kernel, stride, (half, half) if self.symmetric else "same")
        x = x + w.get(f"{name}/bias", 0.0)
        if f"{name}_bn/moving_mean" in w:
            bn = {key: w.get(f"{name}_bn/{key}") for key in ("gamma", "beta")}
            mean, variance = w[f"{name}_bn/moving_mean"], w[f"{name}_bn/moving_variance"]
            x = (x - mean) / np.sqrt(variance + self.epsilon)
            x = x * (1.0 if bn["gamma"] is None else bn["gamma"]) + bn["beta"]
        return self.nonlinearity(x, name)

    def nonlinearity(self, x, name):
        slope = self.weights.get(f"{name}_prelu/alpha", 0.0)
        return np.where(x > 0, x, slope * x)

    def module(self, x, name):
        stride = 2 if name in STRIDE_2 else 1
        prefix = f"inception_{name}"
        branches = [] if stride == 2 else [self.unit(x, f"{prefix}_1x1")]
        branches.append(self.unit(self.unit(x, f"{prefix}_3x3_reduce"), f"{prefix}_3x3", stride))
        double = self.unit(self.unit(x, f"{prefix}_double_3x3_reduce"), f"{prefix}_double_3x3_1")
        branches.append(self.unit(double, f"{prefix}_double_3x3_2", stride))
        if stride == 2:
            branches.append(max_pool(x, 2, self.module_pool))
        else:
            pooled = max_pool(x, 1, (1, 1)) if name == "5b" else average_pool(x, self.count_padding)
            branches.append(self.unit(pooled, f"{prefix}_pool_proj"))
        return np.concatenate(branches, axis=-1)

    def __call__(self, x):
        x = self.unit(x, "conv1_7x7_s2", 2)
        x = max_pool(x, 2, self.stem_pool)
        x = self.unit(self.unit(x, "conv2_3x3_reduce"), "conv2_3x3")
        x = max_pool(x, 2, self.stem_pool)
        for name in MODULES:
            x = self.outputs[f"inception_{name}"] = self.module(x, name)
        x = x.mean(axis=(1, 2))
        kernel, bias = self.weights["predictions/kernel"], self.weights["predictions/bias"]
        return x @ kernel + bias
