"""The papers' equations in NumPy float64: what the layers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class BatchNormStep(NamedTuple):
    """One training step of Batch Normalization; statistics keep the reduced axes as 1."""

    y: np.ndarray
    mean: np.ndarray
    biased_variance: np.ndarray
    unbiased_variance: np.ndarray
    count: np.ndarray


def reduction_axes(rank: int, axis: int | Sequence[int]) -> tuple[int, ...]:
    """The axes over which Algorithm 1 averages, given those that keep statistics."""
    kept = [axis] if isinstance(axis, int) else axis
    return tuple(i for i in range(rank) if i not in [a % rank for a in kept])


def batch_norm_step(
    x: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    epsilon: float,
    axis: int | Sequence[int],
    mask: np.ndarray | None = None,
) -> BatchNormStep:
    """Algorithm 1, by its four lines; `mask` has the rank of `x`."""
    x = np.asarray(x, "float64")
    axes = reduction_axes(x.ndim, axis)
    weight = np.ones_like(x) if mask is None else np.broadcast_to(mask, x.shape).astype("float64")
    count = weight.sum(axes, keepdims=True)
    valid = np.where(weight > 0, x, 0)
    mean = valid.sum(axes, keepdims=True) / count
    biased = (weight * (np.where(weight > 0, x, mean) - mean) ** 2).sum(axes, keepdims=True) / count
    normalized = (x - mean) / np.sqrt(biased + epsilon)
    gamma, beta = (np.asarray(v, "float64").reshape(mean.shape) for v in (gamma, beta))
    unbiased = biased * count / np.maximum(count - 1, 1)
    return BatchNormStep(gamma * normalized + beta, mean, biased, unbiased, count)


def batch_norm_gradients(
    x: np.ndarray, gamma: np.ndarray, epsilon: float, axis: int | Sequence[int], dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Section 3's gradients, line by line: of the input, gamma and beta."""
    x, dy = np.asarray(x, "float64"), np.asarray(dy, "float64")
    axes = reduction_axes(x.ndim, axis)
    mean = x.mean(axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    m = np.prod([x.shape[i] for i in axes])
    root = np.sqrt(variance + epsilon)
    normalized = (x - mean) / root

    d_normalized = dy * np.asarray(gamma, "float64").reshape(mean.shape)
    d_variance = (d_normalized * (x - mean) * -0.5 * (variance + epsilon) ** -1.5).sum(
        axes, keepdims=True
    )
    d_mean = (d_normalized * -1 / root).sum(axes, keepdims=True) + d_variance * (
        -2 * (x - mean)
    ).sum(axes, keepdims=True) / m
    dx = d_normalized / root + d_variance * 2 * (x - mean) / m + d_mean / m
    dgamma = (dy * normalized).sum(axes, keepdims=True)
    dbeta = dy.sum(axes, keepdims=True)
    return dx, dgamma, dbeta


def batch_norm_inference(
    x: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    epsilon: float,
    axis: int | Sequence[int],
) -> np.ndarray:
    """Algorithm 2, line 11."""
    x = np.asarray(x, "float64")
    axes = reduction_axes(x.ndim, axis)
    shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
    gamma, beta, mean, variance = (
        np.asarray(v, "float64").reshape(shape) for v in (gamma, beta, mean, variance)
    )
    return gamma / np.sqrt(variance + epsilon) * x + (
        beta - gamma * mean / np.sqrt(variance + epsilon)
    )
