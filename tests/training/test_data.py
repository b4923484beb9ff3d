"""Batches: the stream of training, entered anywhere, and evaluation, each example once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from training.data import Inputs, evaluation_batches, open_inputs, training_batches
from training.settings import resolve

from .helpers import given, image_folder, settings


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return open_inputs(settings("--recipe=bn_x5"))


@pytest.fixture(scope="module")
def raw_digits() -> tuple[np.ndarray, np.ndarray]:
    """All training digits as the network sees them, by a way that shares no code."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    chosen = np.random.RandomState(0).permutation(1797)[:1437]
    levels = np.round(loaded.images[chosen] * 255 / 16)
    return ((levels - 127.5) / 127.5).astype(np.float32), loaded.target[chosen]


def take(dataset: tf.data.Dataset, count: int) -> tuple[np.ndarray, np.ndarray]:
    pairs = list(dataset.take(count).as_numpy_iterator())
    return np.stack([images for images, _ in pairs]), np.stack([labels for _, labels in pairs])


def test_each_epoch_has_each_example_once_in_an_order_of_its_own(
    inputs: Inputs, raw_digits: tuple[np.ndarray, np.ndarray]
) -> None:
    images, labels = take(training_batches(inputs, 100, seed=3), 29)
    rows = [
        (image.tobytes(), int(label))
        for image, label in zip(images.reshape(-1, 64), labels.reshape(-1), strict=True)
    ]
    expected = sorted(
        (image.tobytes(), int(label)) for image, label in zip(*raw_digits, strict=True)
    )
    # Batches go across the ends of epochs: the 15th has examples of both.
    first, second = rows[:1437], rows[1437:2874]
    assert sorted(first) == expected
    assert sorted(second) == expected
    assert np.mean([a == b for a, b in zip(first, second, strict=True)]) < 0.02


@pytest.mark.parametrize("first_step", [1, 14, 15, 40])
def test_the_stream_can_be_entered_at_any_step(inputs: Inputs, first_step: int) -> None:
    changed = dataclasses.replace(inputs, augmentation="shift", photometric=0.5)
    images, labels = take(training_batches(changed, 100, seed=3), first_step + 3)
    later_images, later_labels = take(training_batches(changed, 100, 3, first_step), 3)
    np.testing.assert_array_equal(later_labels, labels[first_step:])
    np.testing.assert_array_equal(later_images, images[first_step:])


def test_another_seed_is_another_stream(inputs: Inputs) -> None:
    (_, first), (_, other) = (take(training_batches(inputs, 100, seed), 5) for seed in (3, 4))
    assert np.mean(first == other) < 0.3


def test_examples_are_augmented_anew_in_each_epoch(inputs: Inputs) -> None:
    few = dataclasses.replace(
        inputs.train, examples=1, shuffled=lambda seed: tf.data.Dataset.range(1)
    )
    changed = dataclasses.replace(inputs, train=few, augmentation="shift", photometric=0.5)
    images, _ = take(training_batches(changed, 10, seed=3), 1)
    assert len({image.tobytes() for image in images[0]}) == 10


@pytest.mark.parametrize("batch_size", [1, 7, 16, 24, 40])
def test_evaluation_has_each_example_once(batch_size: int, tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"a": 1}, "val": {"a": 11, "b": 8, "c": 5}})
    found = open_inputs(
        resolve(given("--recipe=bn_x5", f"--dataset=folder:{root}", "--image_size=8"))
    )
    seen = []
    for images, labels, mask in evaluation_batches(
        found.evaluation, found.preprocessing, batch_size
    ).as_numpy_iterator():
        assert images.shape == (batch_size, 8, 8, 3)
        assert labels.shape == mask.shape == (batch_size,)
        real = int(mask.sum())
        assert mask.tolist() == [1.0] * real + [0.0] * (batch_size - real)
        levels = images[:real].mean(axis=(1, 2, 3)) * 127.5 + 127.5
        np.testing.assert_allclose(levels, 24.5 + 40 * labels[:real], atol=3)
        seen += labels[:real].tolist()
    assert seen == [0] * 11 + [1] * 8 + [2] * 5


DEFAULTS = [
    # Data set and flags -> size, way to resize, crop fraction, augmentation.
    (["--dataset=digits"], (32, 32), "direct", 1.0, "none"),
    (["--dataset=digits", "--image_size=48"], (48, 48), "direct", 1.0, "none"),
    (["--dataset=digits", "--augmentation=shift"], (32, 32), "direct", 1.0, "shift"),
    (["--dataset=folder:{}"], (224, 224), "short_side", 0.875, "crop"),
    (["--dataset=folder:{}", "--image_size=65"], (65, 65), "short_side", 0.875, "crop"),
    (["--dataset=folder:{}", "--image_size=64"], (64, 64), "direct", 1.0, "shift"),
]


@pytest.mark.parametrize(("argv", "size", "resize", "fraction", "augmentation"), DEFAULTS)
def test_what_flags_leave_to_the_data(
    argv: list[str],
    size: tuple[int, int],
    resize: str,
    fraction: float,
    augmentation: str,
    tmp_path: Path,
) -> None:
    root = image_folder(tmp_path, {"train": {"a": 1, "b": 1}, "test": {"a": 1}})
    found = open_inputs(resolve(given("--recipe=bn_x5", *(flag.format(root) for flag in argv))))
    preprocessing = found.preprocessing
    assert (preprocessing.image_size, preprocessing.resize) == (size, resize)
    assert (preprocessing.crop_fraction, found.augmentation) == (fraction, augmentation)
    assert preprocessing.mean == preprocessing.scale == (127.5,) * preprocessing.channels


@pytest.mark.data
def test_mnist_is_binary(data_folder: str) -> None:
    folder = str(Path(data_folder) / "tensorflow_datasets")
    splits = ("--train_split=train[:3000]", "--eval_split=test[:500]")
    found = open_inputs(resolve(given("--recipe=mnist_bn", f"--data_dir={folder}", *splits)))
    assert (found.train.examples, found.evaluation.examples) == (3000, 500)
    assert (found.augmentation, found.preprocessing.image_size) == ("none", (28, 28))
    images, labels = take(training_batches(found, 60, seed=0), 5)
    assert images.shape == (5, 60, 28, 28, 1)
    assert set(np.unique(images)) == {0.0, 1.0}
    assert 0.08 < images.mean() < 0.18  # A tenth or so of MNIST is ink.
    assert len(np.unique(labels)) == 10


@pytest.mark.data
def test_real_photographs(data_folder: str) -> None:
    found = open_inputs(
        resolve(
            given(
                "--recipe=bn_x5",
                f"--dataset=folder:{data_folder}/imagenet_sample",
                "--train_split=val",
                "--image_size=80",
            )
        )
    )
    assert (found.train.examples, len(found.labels)) == (100, 100)
    images, labels = take(training_batches(found, 20, seed=0), 5)
    assert sorted(labels.reshape(-1).tolist()) == list(range(100))
    assert images.shape == (5, 20, 80, 80, 3)
    assert images.min() >= -1
    assert images.max() <= 1
    assert images.std() > 0.3
