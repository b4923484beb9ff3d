"""An initializer times a factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from bnzoo.checks import check_number


@keras.saving.register_keras_serializable(package="bnzoo")
class Scaled(keras.initializers.Initializer):
    """The values of another initializer times `scale`.

    Ioffe & Szegedy 2015, Section 4.2.3, vary the members of their ensemble by larger initial
    weights in the convolutions, which BN makes harmless (Section 3.3).

    Args:
        initializer: a Keras initializer, or what `keras.initializers.get` takes for one.
        scale: the factor, a finite number.

    Raises:
        ValueError: `scale` is no finite number.

    Example:

    >>> Scaled(keras.initializers.Ones(), 1.5)((2,)).numpy().tolist()
    [1.5, 1.5]
    """

    def __init__(self, initializer: Any, scale: float) -> None:
        check_number("scale", scale)
        self.initializer = keras.initializers.get(initializer)
        self.scale = float(scale)

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        return self.scale * self.initializer(shape, dtype=dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            "initializer": keras.initializers.serialize(self.initializer),
            "scale": self.scale,
        }
