"""The ways in which a layer can be run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from bnzoo.layers import kernel_or_equations


def small(function: Callable) -> Callable:
    """`function`, traced with what bnzoo does for small inputs."""

    def traced(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_or_equations, "KERNEL_MIN_VALUES", 1 << 30)
            return function(*arguments)

    return traced


MODES: dict[str, Callable[[Callable], Callable]] = {
    "eager": lambda f: f,
    "graph": lambda f: tf.function(f),
    "small": lambda f: small(tf.function(f)),
    "xla": lambda f: tf.function(f, jit_compile=True),
}
