"""Inputs that are whole numbers, into layers that compute with real ones."""

from __future__ import annotations

import tensorflow as tf


def as_floating(inputs: tf.Tensor, dtype: tf.DType | str) -> tf.Tensor:
    """`inputs` as they are if they are floating-point, else in the given dtype.

    Args:
        inputs: Floating-point numbers, integers or booleans.
        dtype: A floating-point dtype.

    Raises:
        ValueError: For complex numbers, of which a cast would lose a part, and for strings.

    Example:
        >>> as_floating(tf.constant([1, 2]), "float32").numpy().tolist()
        [1.0, 2.0]
    """
    if inputs.dtype.is_floating:
        return inputs
    if not (inputs.dtype.is_integer or inputs.dtype.is_bool):
        raise ValueError(
            f"`inputs` must be real numbers. Received: inputs of dtype {inputs.dtype.name}"
        )
    return tf.cast(inputs, dtype)
