from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.surgery import fold_batch_norm
from export.other_runtimes import RUNTIMES, float32_form
from tests.export.runs import small_network

IMAGES = np.random.default_rng(4).normal(size=(5, 12, 10, 3)).astype(np.float32)


def answers(runtime: str, network: keras.Model) -> tuple[bytes, dict[str, np.ndarray]]:
    if runtime == "onnx":
        pytest.importorskip("tf2onnx")
        pytest.importorskip("onnxruntime")
    content = RUNTIMES[runtime].convert(float32_form(network))
    return content, dict(RUNTIMES[runtime].run(content, {"images": tf.constant(IMAGES)}))


def under(policy: str) -> keras.Model:
    """A nested network, with a wrapped layer and one that holds others."""
    keras.config.set_dtype_policy(policy)
    try:
        body = small_network()
        image = keras.Input((12, 10, 3))
        x = keras.layers.Rescaling(0.5)(body.get_layer("relu_1").output)
        x = keras.Model(body.input, x, name="body")(image)
        x = keras.layers.Reshape((6, 64))(x[:, :8])
        x = keras.layers.TimeDistributed(keras.layers.Dense(6, activation="swish"))(x)
        x = keras.layers.Bidirectional(
            keras.layers.SimpleRNN(4, unroll=True, recurrent_initializer="he_normal")
        )(x)
        return keras.Model(image, keras.layers.Dense(3, activation="softmax", dtype="float32")(x))
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_network_of_another_type_computes_in_float32(policy: str) -> None:
    network = fold_batch_norm(under(policy))
    form = float32_form(network)
    types = {x.dtype for operation in form.graph.get_operations() for x in operation.outputs}
    assert not types & {tf.float16, tf.bfloat16}
    expected = form(images=tf.constant(IMAGES))
    # By the rounding of bfloat16, of many layers.
    np.testing.assert_allclose(expected, network.predict(IMAGES, verbose=0), atol=8e-2)
    for runtime in RUNTIMES:
        (answer,) = answers(runtime, network)[1].values()
        # LiteRT's weights of 8 bits are rounded.
        atol = 2e-2 if runtime == "litert_int8" else 1e-5
        np.testing.assert_allclose(answer, expected, atol=atol)
