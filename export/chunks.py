"""A large batch in steps of a few images, so that its size bounds neither memory nor speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from .settings import STEP

_STEP_PIXELS = STEP * 224 * 224
_LARGEST_STEP = 1024


def step_size(network: keras.Model) -> int:
    """Images in a step: as many as have the pixels of `STEP` images of 224x224; of several inputs,
    those of the largest."""
    return min(_step_size(tensor.shape) for tensor in keras.tree.flatten(network.input))


def _step_size(shape: Sequence[int | None]) -> int:
    if len(shape) != 4:
        return _LARGEST_STEP
    pixels = [extent or 224 for extent in sorted(shape[1:], key=lambda extent: extent or 224)[1:]]
    return max(1, min(_LARGEST_STEP, _STEP_PIXELS // math.prod(pixels)))


def in_chunks(
    function: tf.types.experimental.ConcreteFunction, inputs: Mapping[str, tf.Tensor], size: int
) -> dict[str, tf.Tensor]:
    """`function` of batches of `size` and a rest, joined.

    Args:
        function: takes each of `inputs` by its name and returns a dict of tensors; all have the
            batch as their first dimension, and what is computed for one image does not depend on
            the others.
        inputs: at least one tensor.
        size: images in a step.

    Returns:
        What `function` returns for all of `inputs` at once. For an empty batch, empty tensors:
        `function` does not run.
    """
    count = tf.shape(next(iter(inputs.values())))[0]
    outputs = function.structured_outputs
    steps = (count + size - 1) // size
    arrays = {
        name: tf.TensorArray(spec.dtype, steps, element_shape=spec.shape, infer_shape=False)
        for name, spec in outputs.items()
    }

    def step(
        number: tf.Tensor, arrays: dict[str, tf.TensorArray]
    ) -> tuple[tf.Tensor, dict[str, tf.TensorArray]]:
        chunk = {name: x[number * size : (number + 1) * size] for name, x in inputs.items()}
        found = function(**chunk)
        return number + 1, {name: arrays[name].write(number, found[name]) for name in arrays}

    # One step at a time, or the memory would be that of several.
    _, arrays = tf.while_loop(
        lambda number, _: number < steps, step, (0, arrays), parallel_iterations=1
    )
    return {
        name: tf.ensure_shape(array.concat(), (None, *outputs[name].shape[1:]))
        for name, array in arrays.items()
    }
