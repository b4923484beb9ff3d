from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.models import Ensemble
from bnzoo.surgery import fold_batch_norm
from export.errors import ExportFailed
from export.served import served_network
from export.signatures import build_signatures, save_signatures
from export.verify import (
    Examples,
    allowed_difference,
    compare,
    compared,
    expected_outputs,
)
from tests.export.runs import LABELS, PREPROCESSING, encoded_image, small_network

EXAMPLES = [encoded_image(seed, 20 + seed) for seed in range(4)]
IMAGES = Examples.of_images(EXAMPLES, PREPROCESSING)


@pytest.fixture(scope="module")
def network() -> keras.Model:
    return small_network()


@pytest.fixture(scope="module")
def folder(network: keras.Model, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("exported") / "1"
    save_signatures(build_signatures(network, PREPROCESSING, LABELS), [], folder)
    return folder


def test_the_same_network_differs_by_rounding_at_most(network: keras.Model, folder: Path) -> None:
    found = compare(folder, network, IMAGES)
    assert list(found) == ["serving_default", "serving_uint8", "serving_bytes"]
    for comparison in found.values():
        assert comparison.examples == 4
        assert comparison.agreement == 1.0
        assert comparison.largest <= 1e-6


def test_differences_are_fractions_of_the_largest_probability(
    network: keras.Model, folder: Path
) -> None:
    other = keras.models.clone_model(network)
    other.set_weights(network.get_weights())
    other.get_layer("bn_1").moving_mean.assign_add(np.linspace(0.0, 0.4, 8))
    inputs = np.stack([PREPROCESSING(PREPROCESSING.decode(image)) for image in EXAMPLES])
    trained, served = other.predict(inputs, verbose=0), network.predict(inputs, verbose=0)
    largest = np.max(np.abs(served - trained) / trained.max(axis=1, keepdims=True))
    agreement = np.mean(served.argmax(1) == trained.argmax(1))
    assert largest > 0.01
    for comparison in compare(folder, other, IMAGES).values():
        assert comparison.largest == pytest.approx(largest, rel=1e-4)
        assert comparison.agreement == agreement


def test_features_are_judged_by_their_own_scale_and_probabilities_by_the_image() -> None:
    # A layer of rectifiers that gives the second image next to nothing.
    expected = {"features": np.float32([[100, 0], [1e-3, 0]]), "probabilities": np.eye(2)}
    answer = {"features": np.float32([[101, 0], [0.2, 0]]), "probabilities": np.eye(2)}
    found = compared(answer, expected)
    assert found.largest == pytest.approx(0.01)
    assert found.mean == pytest.approx((1 + 0.199) / 100 / 4, rel=1e-5)
    assert (found.worst, found.agreement) == ("features", 1.0)
    assert str(found).startswith("largest 1.0e-02 of features, mean ")
    answer["probabilities"] = np.array([[1, 0], [np.nan, 1]])
    assert np.isnan(compared(answer, expected).largest)
    assert compared(answer, expected).worst is None  # Of probabilities.


def test_values_that_are_no_floating_point_numbers_are_counted() -> None:
    # As of a network that ends with an argmax, and of one that gives words.
    expected = {"class": np.array([3, 1, 4, 1]), "words": np.array([[b"a"], [b"b"], [b"c"], [b""]])}
    expected["words"] = expected["words"].astype(object)
    answer = {name: value.copy() for name, value in expected.items()}
    answer["words"] = answer["words"].astype(bytes)  # As NumPy reads it from a file.
    same = compared(answer, expected)
    assert (same.largest, same.agreement) == (0.0, 1.0)
    answer["class"] = np.array([3, 1, 5, 1], np.int32)
    found = compared(answer, expected)
    assert (found.largest, found.mean, found.agreement) == (0.25, 0.25, 0.75)
    assert found.worst == "class"
    answer["words"][2:] = b"d"
    assert compared(answer, expected).largest == 0.5


def test_agreement_of_one_column() -> None:
    values = np.float32([[0.4], [0.6], [0.9]])
    found = compared({"probabilities": values + np.float32(0.15)}, {"probabilities": values})
    assert found.agreement == pytest.approx(2 / 3)
    found = compared({"price": values + 1}, {"price": values})
    assert found.agreement is None
    assert str(found) == "largest 1.1e+00, mean 1.1e+00"


def test_rows_that_are_not_the_batch_are_refused() -> None:
    image = keras.Input((8,))
    rows = keras.layers.Lambda(lambda x: tf.reshape(x, (-1, 2)), output_shape=(2,), name="rows")
    network = served_network(keras.Model(image, rows(image)), "any")
    with pytest.raises(
        ExportFailed, match=r"^output 'rows' has shape \(32, 2\) for a batch of 8: "
    ):
        expected_outputs(network, Examples.of_noise(network))


def test_other_preprocessing_in_the_graph_is_found(network: keras.Model, tmp_path: Path) -> None:
    other = PREPROCESSING.__class__(**{**PREPROCESSING.__dict__, "channel_order": "bgr"})
    save_signatures(build_signatures(network, other, LABELS), [], tmp_path / "1")
    found = compare(tmp_path / "1", network, IMAGES)
    assert found["serving_default"].largest <= 1e-6
    assert found["serving_uint8"].largest > 0.01
    assert found["serving_bytes"].largest > 0.01


def test_an_example_that_is_no_image() -> None:
    with pytest.raises(ExportFailed, match=r"^example notes is no JPEG, PNG, [^\n]+$"):
        Examples.of_images([EXAMPLES[0], b"text"], PREPROCESSING, names=["a.png", "notes"])


@pytest.mark.parametrize(
    ("policy", "allowed"), [("float32", 1e-4), ("mixed_float16", 1e-2), ("mixed_bfloat16", 8e-2)]
)
def test_folding_under_each_policy_differs_by_rounding(
    policy: str, allowed: float, tmp_path: Path
) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        network = small_network()
    finally:
        keras.config.set_dtype_policy("float32")
    assert allowed_difference(network) == allowed
    assert allowed_difference(Ensemble([network, small_network()])) == allowed
    assert allowed_difference(network, "int8") == max(allowed, 0.2)
    folded = fold_batch_norm(network)
    save_signatures(build_signatures(folded, PREPROCESSING, LABELS), [], tmp_path / "1")
    for comparison in compare(tmp_path / "1", network, IMAGES).values():
        assert comparison.largest <= allowed / 2
