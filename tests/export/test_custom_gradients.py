"""Networks whose activations have gradients of their own, as Keras' swish, that of EfficientNet."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from export import saved_model
from tests.export.runs import small_network


@pytest.fixture(scope="module")
def network() -> keras.Model:
    body = small_network()
    x = keras.layers.Dense(6, activation="swish")(body.get_layer("pool").output)
    return keras.Model(body.input, keras.layers.Dense(3, activation="softmax")(x))


@pytest.fixture(scope="module")
def file(network: keras.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("network") / "model.keras"
    network.save(file)
    return file


@pytest.mark.parametrize(
    ("flags", "atol"),
    [
        ((), 1e-6),  # Folding reorders float32 sums.
        (("--variables=constants", "--litert=float32,int8"), 1e-6),
        (("--precision=bfloat16",), 2e-2),  # It has 8 bits, and the errors of layers add up.
        (("--precision=bfloat16", "--variables=constants"), 2e-2),
    ],
    ids=["variables", "constants", "bfloat16", "bfloat16 constants"],
)
def test_each_form(
    network: keras.Model,
    file: Path,
    flags: tuple[str, ...],
    atol: float,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    argv = ["bnzoo-export", f"--keras_model={file}", *flags, str(tmp_path)]
    for _ in range(2):
        assert saved_model.main(argv) == 0
    # Functions are numbered by a counter of the process, so that those of the second differ.
    graphs = [(tmp_path / version / "saved_model.pb").read_bytes() for version in "12"]
    assert graphs[0] == graphs[1]
    caplog.clear()
    tf.get_logger().addHandler(caplog.handler)
    try:
        model = tf.saved_model.load(str(tmp_path / "1"))
    finally:
        tf.get_logger().removeHandler(caplog.handler)
    assert not caplog.messages
    images = np.random.default_rng(3).normal(size=(5, 12, 10, 3)).astype(np.float32)
    answer = model.signatures["serving_default"](images=images)
    np.testing.assert_allclose(
        answer["probabilities"], network.predict(images, verbose=0), atol=atol
    )
