"""The initialisation of He et al. 2015."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import keras

from . import backend  # noqa: F401 it refuses a backend other than TensorFlow
from .checks import check_choice, check_number, check_whole, is_whole

_MODES = ("fan_in", "fan_out")
_KERNELS = ("conv", "depthwise", "transposed")
_DTYPES = ("float16", "bfloat16", "float32", "float64")


@keras.saving.register_keras_serializable(package="bnzoo")
class HeNormal(keras.initializers.Initializer):
    """Zero-mean Gaussian that keeps the variance through rectifiers (He et al. 2015, Section 2.2).

    Weights have the standard deviation

        std = sqrt(2 / ((1 + a^2) n))

    where a is `negative_slope`: 0 for ReLU (Eq. 10, 14), the slope for a leaky ReLU or PReLU
    (Eq. 15). With `mode="fan_in"`, n is the number of inputs of one response, k^2 c, and the
    variance of the responses is kept going forward (Eq. 10); with `mode="fan_out"`, n is the number
    of responses that one input takes part in, k^2 d, and the variance of the gradients is kept
    going backward (Eq. 14), which is what the paper's networks were trained with. As in the paper,
    strides do not count.

    The Gaussian is not truncated, so that its standard deviation is the one above.
    `keras.initializers.HeNormal` truncates, knows only fan_in, and takes every kernel for one of a
    full convolution.

    An initializer sees only the shape of a kernel, so its kind must be said:

    | kernel       | layers                                | shape           | fan_in | fan_out |
    | ------------ | ------------------------------------- | --------------- | ------ | ------- |
    | "conv"       | Dense                                 | (c, d)          | c      | d       |
    | "conv"       | Conv1D, Conv2D, Conv3D                | (*K, c / g, d)  | kc / g | kd / g  |
    | "depthwise"  | DepthwiseConv1D, DepthwiseConv2D      | (*K, c, m)      | k      | km      |
    | "transposed" | Conv1DTranspose to Conv3DTranspose    | (*K, d, c)      | kc     | kd      |

    with K the kernel's size and k the number of its positions, c input channels, d filters, g
    `groups`, m the depth multiplier. Of a SeparableConv, `depthwise_initializer` is "depthwise" and
    `pointwise_initializer` is "conv".

    An unseeded initializer draws anew at each call, so that layers which are given the same object
    start from different weights; `keras.utils.set_random_seed` makes the sequence of draws
    repeatable. An integer seed gives the same values at each call with the same shape, as
    everywhere in Keras; a `keras.random.SeedGenerator` gives a repeatable sequence.

    Args:
        negative_slope: a, the slope of the rectifier for negative inputs; a finite number.
        mode: "fan_in" or "fan_out".
        kernel: "conv", "depthwise" or "transposed".
        groups: number of groups of a grouped convolution; 1 unless `kernel` is "conv".
        seed: None, an integer, or a `keras.random.SeedGenerator`.

    Raises:
        ValueError: for an argument outside its range; when called, for a shape that is no kernel of
            the kind said, or whose filters do not divide into `groups`, and for a dtype that is not
            floating-point.

    Example:
        >>> import bnzoo, numpy as np
        >>> kernel = bnzoo.initializers.HeNormal(seed=0)((3, 3, 64, 256))
        >>> print(f"{np.std(kernel):.3f} {(2 / (3 * 3 * 64)) ** 0.5:.3f}")
        0.059 0.059
    """

    def __init__(
        self,
        negative_slope: float = 0.0,
        mode: str = "fan_in",
        kernel: str = "conv",
        groups: int = 1,
        seed: Any = None,
    ) -> None:
        check_number("negative_slope", negative_slope)
        check_choice("mode", mode, _MODES)
        check_choice("kernel", kernel, _KERNELS)
        check_whole("groups", groups)
        if groups > 1 and kernel != "conv":
            raise ValueError(
                f'`groups` must be 1 unless `kernel` is "conv". Received: {groups=}, {kernel=}'
            )
        if isinstance(seed, dict):
            seed = keras.saving.deserialize_keras_object(seed)
        if not (seed is None or is_whole(seed) or isinstance(seed, keras.random.SeedGenerator)):
            raise ValueError(
                "`seed` must be None, an integer or a keras.random.SeedGenerator. "
                f"Received: {seed=}"
            )
        self.negative_slope = float(negative_slope)
        self.mode = mode
        self.kernel = kernel
        self.groups = int(groups)
        self.seed = int(seed) if is_whole(seed) else seed

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        shape = self._sizes(shape)
        dtype = keras.backend.standardize_dtype(dtype)
        check_choice("dtype", dtype, _DTYPES)
        # Of a huge slope the square alone would overflow.
        std = math.sqrt(2.0 / self._fan(shape)) / math.hypot(1.0, self.negative_slope)
        seed = self.seed
        if seed is None:
            # Drawn here and not once in the constructor, which would make every layer that is given
            # this object start from the same values. Python's generator is the one that Keras' own
            # unseeded initializers draw from and `keras.utils.set_random_seed` seeds.
            seed = random.randint(1, 10**9)
        return keras.random.normal(shape, mean=0.0, stddev=std, dtype=dtype, seed=seed)

    def _sizes(self, shape: Any) -> tuple[int, ...]:
        """`shape` as the sizes of a kernel of the kind said."""
        smallest_rank = 2 if self.kernel == "conv" else 3
        try:
            sizes = tuple(shape)
        except (TypeError, ValueError):  # Of a tf.TensorShape without a rank the latter.
            sizes = ()
        if len(sizes) < smallest_rank or not all(is_whole(n) and n > 0 for n in sizes):
            raise ValueError(
                f'`shape` of a "{self.kernel}" kernel must be a sequence of at least '
                f"{smallest_rank} whole numbers >= 1. Received: {shape=}"
            )
        return tuple(int(n) for n in sizes)

    def _fan(self, shape: tuple[int, ...]) -> int:
        """n of Eq. 10 (fan_in) or Eq. 14 (fan_out) for a kernel of `shape`."""
        positions = math.prod(shape[:-2])
        if self.kernel == "depthwise":
            fan_in, fan_out = 1, shape[-1]
        elif self.kernel == "transposed":
            fan_out, fan_in = shape[-2:]
        else:
            fan_in, filters = shape[-2:]
            if filters % self.groups:
                raise ValueError(
                    f"The {filters} filters of a kernel must divide into `groups`. "
                    f"Received: groups={self.groups}, {shape=}"
                )
            fan_out = filters // self.groups
        return positions * (fan_in if self.mode == "fan_in" else fan_out)

    def get_config(self) -> dict[str, Any]:
        return {
            "negative_slope": self.negative_slope,
            "mode": self.mode,
            "kernel": self.kernel,
            "groups": self.groups,
            "seed": keras.saving.serialize_keras_object(self.seed),
        }
