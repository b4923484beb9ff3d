"""Seeded weights for other people's networks, with statistics that are not trivial."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# The ends of the names of vectors that scale or are a variance, in all families: near 1, positive.
# All other vectors are biases, offsets and means: near 0.
POSITIVE = (
    "_bn.weight",
    "running_var",
    "gamma",
    "moving_var",
    "moving_variance",
    "bn_scale_0",
    "bn/sc_w_0",
    "bn_var_0",
)


def seeded_tensors(
    shapes: Mapping[str, tuple[int, ...]], out_axis: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Tensors of the given names and shapes; `out_axis` is that of a kernel's out channels.

    RandomState's streams never change, so values computed from them can be stored.
    """
    random = np.random.RandomState(seed)
    tensors = {}
    for name in sorted(shapes):
        shape = tuple(shapes[name])
        if len(shape) > 1:
            fan_in = np.prod(shape) / shape[out_axis]
            tensor = random.standard_normal(shape) * np.sqrt(2 / fan_in)
        elif name.endswith(POSITIVE):
            tensor = random.uniform(0.5, 1.5, shape)
        else:
            tensor = 0.2 * random.standard_normal(shape)
        tensors[name] = tensor.astype(np.float32)
    return tensors


def seeded_images(images: int = 2, size: int = 224, seed: int = 1) -> np.ndarray:
    """Images [N, H, W, 3] with a different level and contrast in each channel and image."""
    random = np.random.RandomState(seed)
    noise = random.standard_normal((images, size, size, 3))
    level = random.uniform(-1, 1, (images, 1, 1, 3))
    contrast = random.uniform(0.3, 1, (images, 1, 1, 3))
    return (level + contrast * noise).astype(np.float32)


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """As a fraction of the largest expected value; the shapes must be equal."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())
