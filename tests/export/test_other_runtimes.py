from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


@pytest.fixture(scope="module")
def scaled() -> keras.Model:
    """As EfficientNet: statistics that are no variables, depthwise convolution and swish; and a
    GELU."""
    image = keras.Input((12, 10, 3))
    scaler = keras.layers.Normalization(mean=[1.0, 2.0, 3.0], variance=[4.0, 5.0, 6.0])
    x = scaler(image)
    x = keras.layers.DepthwiseConv2D(3, bias_initializer="normal")(x)
    x = small_network().get_layer("bn_0")(keras.layers.Conv2D(6, 3, use_bias=False)(x))
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Activation("swish")(x))
    x = keras.layers.Dense(6, activation="gelu")(keras.layers.Dense(6, activation="relu6")(x))
    return keras.Model(image, keras.layers.Dense(3, activation="softmax")(x))


@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_statistics_are_in_the_file_and_its_bytes_always_the_same(
    scaled: keras.Model, runtime: str
) -> None:
    content, answer = answers(runtime, scaled)
    expected = scaled.predict(IMAGES, verbose=0)
    np.testing.assert_allclose(*answer.values(), expected, atol=1e-6)
    assert answers(runtime, scaled)[0] == content


def recurrent(cell: type) -> keras.Model:
    image = keras.Input((12, 10, 3))
    x = keras.layers.Reshape((12, 30))(image)
    x = keras.layers.Bidirectional(cell(4))(x)
    return keras.Model(image, keras.layers.Dense(3, activation="softmax")(x))


def test_onnx_does_not_depend_on_the_order_of_sets(tmp_path: Path) -> None:
    network = recurrent(keras.layers.LSTM)
    content, answer = answers("onnx", network)
    np.testing.assert_allclose(*answer.values(), network.predict(IMAGES, verbose=0), atol=1e-6)
    network.save(tmp_path / "network.keras")
    program = (
        "import sys, keras; from export.other_runtimes import RUNTIMES, float32_form\n"
        "network = keras.models.load_model(sys.argv[1])\n"
        "sys.stdout.buffer.write(RUNTIMES['onnx'].convert(float32_form(network)))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "network.keras")]
    path = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert done.stdout == content


def test_onnx_with_operations_inside_of_an_operation() -> None:
    onnx = pytest.importorskip("onnx")
    network = recurrent(keras.layers.SimpleRNN)
    content, answer = answers("onnx", network)
    np.testing.assert_allclose(*answer.values(), network.predict(IMAGES, verbose=0), atol=1e-6)
    model = onnx.load_from_string(content)
    assert any(node.op_type == "Loop" for node in model.graph.node)
    (images,) = model.graph.input
    assert images.name == "images"
    assert [one.dim_value for one in images.type.tensor_type.shape.dim] == [0, 12, 10, 3]
    onnx.checker.check_model(model, full_check=True)
