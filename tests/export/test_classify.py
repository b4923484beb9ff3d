from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from bnzoo.preprocessing import Preprocessing
from export import classify
from export.signatures import build_signatures, save_signatures


def test_picture_has_ten_shades_two_characters_a_pixel() -> None:
    image = np.array([[0, 25, 26], [128, 230, 255]], np.uint8)[..., np.newaxis]
    assert classify.picture(image) == ["    ..", "++%%@@"]


def test_side_by_side() -> None:
    assert classify.side_by_side([["a", "bcd"], ["ef", "g"]]) == "a     ef\nbcd   g"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A classifier of digits, exported, and six images with what it says of them."""
    folder = tmp_path_factory.mktemp("digits")
    preprocessing = Preprocessing(image_size=(8, 8), channels=1)
    image = keras.Input((8, 8, 1))
    x = keras.layers.Flatten()(image)
    network = keras.Model(image, keras.layers.Dense(10, activation="softmax")(x))
    names = [str(digit) for digit in range(10)]
    save_signatures(build_signatures(network, preprocessing, names), [], folder / "1")
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1), dtype=np.uint8)
    probabilities = network.predict(preprocessing(images), verbose=0)
    labels = probabilities.argmax(axis=1)
    labels[2] = (labels[2] + 1) % 10
    return folder / "1", {"images": images, "labels": labels, "probabilities": probabilities}


def classified(saved_model: Path, held: dict[str, np.ndarray]) -> subprocess.CompletedProcess[str]:
    held_out = saved_model.parent / "held_out.npz"
    np.savez(held_out, **held)
    return subprocess.run(
        [sys.executable, classify.__file__, str(saved_model), str(held_out)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_classifies_without_bnzoo_and_keras(digits: tuple[Path, dict[str, np.ndarray]]) -> None:
    saved_model, held = digits
    done = classified(saved_model, held)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0][:16] == classify.picture(held["images"][0])[0]
    best = held["probabilities"].argmax(axis=1)
    first = f"{best[0]} at {held['probabilities'][0].max():.1%}, is {held['labels'][0]}"
    assert lines[8].startswith(first)
    assert lines[8].count(" at ") == classify.SHOWN
    assert lines[10] == f"{saved_model}, without bnzoo and Keras: 5 of 6 digits right"
    assert lines[11].startswith("largest difference of a probability to the unfolded model: ")


def test_fails_where_the_model_is_another(
    digits: tuple[Path, dict[str, np.ndarray]],
) -> None:
    saved_model, held = digits
    held_out = saved_model.parent / "held_out.npz"
    probabilities = held["probabilities"].copy()
    probabilities[4, 3] += 2e-4
    np.savez(held_out, **{**held, "probabilities": probabilities})
    assert classify.main(str(saved_model), str(held_out)) == 1
