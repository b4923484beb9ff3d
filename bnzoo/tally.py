"""Sums up the statistics of batches: each batch gives a tally, and tallies are merged.

A tally is a float64 array with a column for each channel and these rows:

- COUNT: how many values there were, `sum(m)`;
- MEAN: their mean;
- WITHIN: the squared deviations of the values from the means of their batches, summed;
- BETWEEN: the squared deviations of those means from MEAN, summed over all values;
- FREEDOM: the degrees of freedom of WITHIN, `sum(m - 1)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

COUNT, MEAN, WITHIN, BETWEEN, FREEDOM = range(5)

VARIANCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "algorithm_2": lambda tally: tally[WITHIN] / tally[FREEDOM],
    "pooled": lambda tally: (tally[WITHIN] + tally[BETWEEN]) / (tally[COUNT] - 1),
}
"""The unbiased variance: of the values within a batch, and of all values as one batch."""


def empty(shape: tuple[int, ...]) -> np.ndarray:
    """The tally of no batch, for statistics of this shape."""
    return np.zeros((5, math.prod(shape)))


def of_batch(mean: np.ndarray, unbiased: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The tally of one batch, from its mean, unbiased variance and count for each channel."""
    # The mean of nothing and the variance of one value may be anything.
    mean, unbiased = np.where(count > 0, mean, 0.0), np.where(count > 1, unbiased, 0.0)
    values = np.asarray(count, np.float64)
    freedom = np.maximum(values - 1, 0)
    return np.stack([values, mean, freedom * unbiased, np.zeros_like(values), freedom])


def merged(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The tally of the batches of both.

    Example:
        >>> first = of_batch(np.array([1]), np.array([2]), np.array([2]))
        >>> both = merged(first, of_batch(np.array([12]), np.array([8]), np.array([2])))
        >>> [float(value) for value in both[:, 0]]
        [4.0, 6.5, 10.0, 121.0, 2.0]
    """
    total = first + second
    share = second[COUNT] / np.maximum(total[COUNT], 1)
    distance = second[MEAN] - first[MEAN]
    # Not from sums of squares: those would cancel for a mean that is large against the spread.
    total[MEAN] = first[MEAN] + distance * share
    total[BETWEEN] += np.square(distance) * first[COUNT] * share
    return total
