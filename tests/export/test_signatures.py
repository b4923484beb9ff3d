from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.surgery import fold_batch_norm
from export.signatures import TOP_K, build_signatures, save_signatures
from tests.export.runs import LABELS, PREPROCESSING, encoded_image, small_network


@pytest.fixture(scope="module")
def network() -> keras.Model:
    return small_network()


@pytest.fixture(scope="module")
def folder(network: keras.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    labels = folder / "labels.txt"
    labels.write_text("\n".join(LABELS))
    signatures = build_signatures(fold_batch_norm(network), PREPROCESSING, LABELS)
    save_signatures(signatures, [labels], folder / "1")
    return folder / "1"


@pytest.fixture(scope="module")
def served(folder: Path) -> dict[str, tf.types.experimental.ConcreteFunction]:
    model = tf.saved_model.load(str(folder))
    # The functions live as long as the model that they belong to.
    return {"model": model, **model.signatures}


def evaluated(network: keras.Model, contents: list[bytes]) -> np.ndarray:
    """What evaluation says of encoded images."""
    images = [PREPROCESSING(PREPROCESSING.decode(encoded)) for encoded in contents]
    return network.predict(np.stack(images), verbose=0)


def test_names_types_and_shapes(served: dict) -> None:
    outputs = {
        "probabilities": ((None, len(LABELS)), tf.float32),
        "scores": ((None, TOP_K), tf.float32),
        "classes": ((None, TOP_K), tf.string),
    }
    for name, key, shape, dtype in (
        ("serving_default", "images", (None, 12, 10, 3), tf.float32),
        ("serving_uint8", "images", (None, None, None, 3), tf.uint8),
        ("serving_bytes", "image_bytes", (None,), tf.string),
    ):
        function = served[name]
        inputs = function.structured_input_signature[1]
        assert {key: (tuple(spec.shape), spec.dtype) for key, spec in inputs.items()} == {
            key: (shape, dtype)
        }
        found = {
            key: (tuple(spec.shape), spec.dtype)
            for key, spec in function.structured_outputs.items()
        }
        assert found == outputs


def test_default_takes_images_as_the_network_does(network: keras.Model, served: dict) -> None:
    images = np.random.default_rng(1).normal(size=(5, 12, 10, 3)).astype(np.float32)
    answer = served["serving_default"](images=images)
    expected = network.predict(images, verbose=0)
    # Folding reorders float32 sums; the probabilities are of order 0.1.
    np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-6)


def test_scores_and_classes_are_the_most_probable_in_order(served: dict) -> None:
    images = np.random.default_rng(2).normal(size=(4, 12, 10, 3)).astype(np.float32)
    answer = served["serving_default"](images=images)
    probabilities = answer["probabilities"].numpy()
    order = np.argsort(-probabilities, axis=-1)[:, :TOP_K]
    assert [[name.decode() for name in row] for row in answer["classes"].numpy()] == [
        [LABELS[index] for index in row] for row in order
    ]
    np.testing.assert_array_equal(answer["scores"], np.take_along_axis(probabilities, order, -1))


def test_fewer_classes_than_top_k() -> None:
    signatures = build_signatures(small_network(classes=2), PREPROCESSING, ("no", "yes"))
    answer = signatures["serving_default"](images=tf.zeros((3, 12, 10, 3)))
    assert answer["scores"].shape == (3, 2)
    assert {name.decode() for name in answer["classes"].numpy()[0]} == {"no", "yes"}


def test_uint8_preprocesses_any_size(network: keras.Model, served: dict) -> None:
    contents = [encoded_image(seed, 31, 17) for seed in range(3)]
    images = np.stack([PREPROCESSING.decode(encoded) for encoded in contents])
    answer = served["serving_uint8"](images=images)
    np.testing.assert_allclose(answer["probabilities"], evaluated(network, contents), atol=1e-6)


def test_case_43_bytes_of_images_of_different_sizes(network: keras.Model, served: dict) -> None:
    decoded = [tf.io.decode_png(encoded_image(seed, 15 + 9 * seed, 40 - seed)) for seed in range(7)]
    contents = [
        tf.io.encode_jpeg(image).numpy() if seed % 2 else tf.io.encode_png(image).numpy()
        for seed, image in enumerate(decoded)
    ]
    contents[5] = encoded_image(5, channels=1)  # Grey.
    expected = evaluated(network, contents)
    alone = served["serving_bytes"](image_bytes=tf.constant(contents[:1]))["probabilities"]
    for count in (1, 3, 7):
        answer = served["serving_bytes"](image_bytes=tf.constant(contents[:count]))
        np.testing.assert_allclose(answer["probabilities"], expected[:count], atol=1e-6)
        # Convolutions of another batch size may add in another order.
        np.testing.assert_allclose(answer["probabilities"][:1], alone, atol=1e-7)


def test_case_43_empty_batch(served: dict) -> None:
    answer = served["serving_bytes"](image_bytes=tf.constant([], tf.string))
    assert answer["probabilities"].shape == (0, len(LABELS))
    assert answer["classes"].shape == (0, TOP_K)


def test_bytes_that_are_no_image_fail_and_the_next_request_works(served: dict) -> None:
    contents = [encoded_image(seed) for seed in range(20)]
    contents[13], contents[16] = encoded_image(13)[:-20], b""
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"no JPEG, PNG, GIF or WebP image, or a damaged one, at position\] \[13 16\]",
    ):
        served["serving_bytes"](image_bytes=tf.constant(contents))
    answer = served["serving_bytes"](image_bytes=tf.constant([encoded_image(0)]))
    assert answer["probabilities"].shape == (1, len(LABELS))


def test_case_41_every_variable_is_stored_once(network: keras.Model, folder: Path) -> None:
    reader = tf.train.load_checkpoint(str(folder / "variables" / "variables"))
    stored = sum(
        int(np.prod(shape))
        for name, shape in reader.get_variable_to_shape_map().items()
        if not name.startswith("_CHECKPOINTABLE")
    )
    folded = fold_batch_norm(network)
    weights = sum(int(np.prod(weight.shape)) for weight in folded.weights)
    assert stored == weights
    assert not any("bn" in layer.name for layer in folded.layers)


def test_assets(folder: Path) -> None:
    assert (folder / "assets" / "labels.txt").read_text() == "\n".join(LABELS)
    # The place that they were copied from is nobody's business.
    graph = (folder / "saved_model.pb").read_bytes()
    assert str(folder.parent).encode() not in graph


def test_case_45_loads_where_bnzoo_and_keras_cannot_be_imported(folder: Path) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('bnzoo', 'keras', 'tf_keras')))\n"
        "import tensorflow as tf\n"
        "model = tf.saved_model.load(sys.argv[1])\n"
        "answer = model.signatures['serving_default'](images=tf.ones((2, 12, 10, 3)))\n"
        "print(answer['classes'].shape, 'keras' in str(sys.modules['keras']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == f"(2, {TOP_K}) False"
