from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from export.chunks import in_chunks, step_size


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 12])
def test_joins_what_the_function_gives_for_steps(count: int) -> None:
    largest = tf.Variable(0)

    def double(x: tf.Tensor) -> dict[str, tf.Tensor]:
        largest.assign(tf.maximum(largest, tf.shape(x)[0]))
        return {"double": 2 * x, "sum": tf.reduce_sum(x, axis=1)}

    spec = tf.TensorSpec((None, 3), tf.float32)
    function = tf.function(double).get_concrete_function(x=spec)
    x = np.arange(3.0 * count, dtype=np.float32).reshape(count, 3)
    found = tf.function(lambda x: in_chunks(function, {"x": x}, 4))(tf.constant(x))
    np.testing.assert_array_equal(found["double"], 2 * x)
    np.testing.assert_array_equal(found["sum"], x.sum(axis=1))
    assert largest.numpy() == min(count, 4)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((224, 224, 3), 16),
        ((32, 32, 3), 784),
        ((3, 224, 224), 16),
        ((2000, 2000, 3), 1),
        ((9,), 1024),
    ],
)
def test_a_step_has_as_many_pixels(shape: tuple[int, ...], size: int) -> None:
    image = keras.Input(shape)
    assert step_size(keras.Model(image, keras.layers.Flatten()(image))) == size
