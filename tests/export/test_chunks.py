from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing
from export import signatures
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


def test_one_step_at_a_time() -> None:
    """Or a large batch would take the memory of several steps."""
    spec = tf.TensorSpec((None, 3), tf.float32)
    function = tf.function(lambda x: {"same": x + 1}).get_concrete_function(x=spec)
    joined = tf.function(lambda x: in_chunks(function, {"x": x}, 4)).get_concrete_function(spec)
    loops = [op for op in joined.graph.get_operations() if op.type.endswith("While")]
    assert [loop.get_attr("parallel_iterations") for loop in loops] == [1]


def test_a_step_counts_crops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network sees as many images at a time, whether they are crops of one or not."""
    sizes = []

    def recorded(function: Any, inputs: Any, size: int) -> dict[str, tf.Tensor]:
        sizes.append((next(iter(inputs)), size))
        return in_chunks(function, inputs, size)

    monkeypatch.setattr(signatures, "in_chunks", recorded)
    image = keras.Input((8, 8, 3))
    network = keras.Model(image, keras.layers.Softmax()(keras.layers.Flatten()(image)))
    preprocessing = Preprocessing((8, 8), crop_fraction=0.5)
    signatures.build_signatures(network, preprocessing, crops=10, step=25)
    assert sorted(sizes) == [("image_bytes", 2), ("images", 2), ("images", 25)]
    # However few there are, one image is whole.
    sizes.clear()
    signatures.build_signatures(network, preprocessing, crops=10, step=3)
    assert sorted(sizes) == [("image_bytes", 1), ("images", 1), ("images", 3)]


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
