"""TFDS data sets: real ones, parts of splits, and what is said of those that are not there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from bnzoo.preprocessing import Preprocessing
from training import data, tfds_source
from training.command_line import BadFlags, RunFailed
from training.failures import explained
from training.tfds_source import open_tfds

TEST_FILE = "mnist-test.tfrecord-00000-of-00001"
GREY = Preprocessing(image_size=(28, 28), channels=1)


@pytest.fixture
def data_dir(data_folder: str) -> str:
    return str(Path(data_folder) / "tensorflow_datasets")


@pytest.mark.data
@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("split", ["test[:5000]", "train[10%:12%]"])
def test_mnist_has_the_examples_that_tfds_gives(
    split: str, in_memory: bool, data_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_memory:
        monkeypatch.setattr(tfds_source, "IN_MEMORY_BYTES", 1000)
    source = open_tfds("mnist", data_dir)
    assert source.labels == tuple("0123456789")
    assert (source.channels, source.image_size) == (1, (28, 28))
    opened = source.open_split(split)
    oracle = tfds.load("mnist", split=split, data_dir=data_dir, as_supervised=True).batch(20_000)
    images, labels = next(oracle.as_numpy_iterator())
    assert (opened.examples, opened.in_memory) == (len(labels), in_memory)
    found = opened.ordered().map(lambda raw: opened.read(raw, GREY)).batch(20_000)
    found_images, found_labels = next(found.as_numpy_iterator())
    np.testing.assert_array_equal(found_labels, labels)
    np.testing.assert_array_equal(found_images, images)


@pytest.mark.data
def test_cifar10_is_in_colour(data_dir: str) -> None:
    source = open_tfds("cifar10", data_dir)
    assert (source.channels, source.image_size, source.labels[3]) == (3, (32, 32), "cat")
    split = source.open_split("test[:64]")
    images, labels = next(
        split.ordered()
        .map(lambda raw: split.read(raw, Preprocessing(image_size=(32, 32))))
        .batch(64)
        .as_numpy_iterator()
    )
    assert images.shape == (64, 32, 32, 3)
    # Colours differ between channels; a grey decoding would make them equal.
    assert np.abs(images[..., 0].astype(int) - images[..., 2]).mean() > 10
    assert len(set(labels)) == 10


@pytest.mark.data
def test_shuffled_is_a_permutation_that_depends_on_the_seed(
    data_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfds_source, "IN_MEMORY_BYTES", 0)
    split = open_tfds("mnist", data_dir).open_split("test[:500]")
    records = [raw.numpy() for raw in split.ordered()]
    orders = []
    for global_seed, seed in ((1, 0), (1, 6), (0, 0)):
        tf.random.set_seed(global_seed)
        raw = tf.data.Dataset.range(seed, seed + 1).flat_map(split.shuffled)
        orders.append([records.index(record) for record in raw.as_numpy_iterator()])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(500))
    assert orders[0] == orders[2]
    assert np.sum(np.equal(orders[0], orders[1])) < 12
    # The window holds a small set as a whole: first examples come from everywhere.
    assert np.std(orders[0][:100]) > 100


@pytest.mark.data
def test_small_windows_still_give_each_example_once(
    data_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfds_source, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(tfds_source, "SHUFFLE_BYTES", 10_000)
    split = open_tfds("mnist", data_dir).open_split("test[:300]")
    order = list(tf.data.Dataset.range(1).flat_map(split.shuffled).as_numpy_iterator())
    assert sorted(order) == sorted(raw.numpy() for raw in split.ordered())


@pytest.mark.data
@pytest.mark.parametrize("split", ["validation", "train[9%"])
def test_unknown_split(split: str, data_dir: str) -> None:
    with pytest.raises(BadFlags, match=r"must be one of train, test, or a part .* Received: "):
        open_tfds("mnist", data_dir).open_split(split)


class Contest(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A data set whose test split has no labels, as imagenet2012's."""

    VERSION = tfds.core.Version("1.0.0")
    LABELS = {"train": [0, 1] * 4, "test": [-1] * 4, "validation": [1, 0]}  # noqa: RUF012

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(4, 4, 3)),
            "label": tfds.features.ClassLabel(num_classes=2),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, _: Any) -> dict[str, Any]:
        return {split: self._generate_examples(labels) for split, labels in self.LABELS.items()}

    def _generate_examples(self, labels: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, label in enumerate(labels):
            yield number, {"image": np.full((4, 4, 3), number, np.uint8), "label": label}


@pytest.fixture(scope="module")
def contest(tmp_path_factory: pytest.TempPathFactory) -> Contest:
    builder = Contest(data_dir=tmp_path_factory.mktemp("tfds"))
    builder.download_and_prepare()
    return builder


def test_a_split_without_labels_is_not_chosen(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfds_source, "_builder", lambda name, data_dir: contest)
    source = open_tfds("contest", None)
    assert source.split_names == ("train", "test", "validation")
    assert source.held_out() == "validation"
    assert source.open_split("train[:3]+validation").examples == 5


@pytest.mark.parametrize(
    ("split", "message"),
    [
        *(
            (split, "must have labels, but those of test are kept back. contest has train, test")
            for split in ("test", "test[1:]", "validation+test", "all")
        ),
        *(
            (split, "must have at least one example in each of its parts")
            for split in ("train[:0]", "train[5:5]", "train[5:4]", "train[5:2]", "train[90%:50%]")
        ),
        ("validation+train[5:4]", "must have at least one example in each of its parts"),
    ],
)
def test_splits_without_labels_or_examples_are_refused(
    split: str, message: str, contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfds_source, "_builder", lambda name, data_dir: contest)
    with pytest.raises(BadFlags, match=message) as caught:
        open_tfds("contest", None).open_split(split)
    assert str(caught.value).endswith(f"Received: {split}")
    assert "\n" not in str(caught.value)


def test_unknown_data_set(tmp_path: Path) -> None:
    with pytest.raises(BadFlags) as caught:
        open_tfds("cifar11", str(tmp_path))
    assert str(caught.value) == (
        "--dataset must be digits, folder:PATH or a data set of TFDS. Received: "
        "--dataset=cifar11. Did you mean cifar10_1?"
    )


def test_other_kinds_of_data_are_refused_before_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", None)
    with pytest.raises(BadFlags, match="of images that each have one class label"):
        open_tfds("imdb_reviews", str(tmp_path))


def test_digits_misspelt(tmp_path: Path) -> None:
    with pytest.raises(BadFlags, match=r"Received: --dataset=Digits\. Did you mean digits\?"):
        open_tfds("Digits", str(tmp_path))


@pytest.mark.data
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_record_that_cannot_be_decoded_is_named_by_split_and_position(
    in_memory: bool, data_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set of which the 8th test image lost the bytes that say it is a PNG."""
    source = Path(data_dir) / "mnist" / "3.0.1"
    copy = tmp_path / "mnist" / "3.0.1"
    copy.mkdir(parents=True)
    for path in source.glob("*.json"):
        shutil.copy(path, copy)
    records = [raw.numpy() for raw in tf.data.TFRecordDataset([str(source / TEST_FILE)])]
    records[7] = records[7].replace(b"\x89PNG", b"\x89PNX")
    with tf.io.TFRecordWriter(str(copy / TEST_FILE)) as writer:
        for record in records:
            writer.write(record)
    if not in_memory:
        monkeypatch.setattr(tfds_source, "IN_MEMORY_BYTES", 0)

    def read() -> None:
        split = open_tfds("mnist", str(tmp_path)).open_split("test[2:500]")
        with explained(split, GREY):
            list(data.evaluation_batches(split, GREY, 100))

    with pytest.raises(RunFailed) as caught:
        read()
    message = str(caught.value)
    assert message.startswith(
        "example 5 (counted from 0) of mnist, split test[2:500], cannot be read: Unknown image "
    )
    assert message.endswith(f". Delete {copy} and prepare the data set again")
    assert "\n" not in message


def test_unknown_configuration(tmp_path: Path) -> None:
    with pytest.raises(BadFlags, match="--dataset=mnist_corrupted/nothing: ") as caught:
        open_tfds("mnist_corrupted/nothing", str(tmp_path))
    assert "\n" not in str(caught.value)


def test_data_set_that_must_be_fetched_by_hand(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        open_tfds("imagenet2012", str(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"no data set imagenet2012 in {tmp_path}/imagenet2012/")
    assert f"{tmp_path}/downloads/manual" in message
    assert "ILSVRC2012_img_train.tar" in message
    assert "\n" not in message


def test_data_set_that_cannot_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(self: Any) -> None:
        raise ConnectionError("Failed to get url https://example.org/x.gz.\nmore lines")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", no_network)
    with pytest.raises(RunFailed) as caught:
        open_tfds("kmnist", str(tmp_path))
    assert str(caught.value) == (
        f"no data set kmnist in {tmp_path}/kmnist/3.0.1, and it cannot be downloaded: Failed to "
        "get url https://example.org/x.gz. With a network, `tfds build kmnist --data_dir=FOLDER` "
        "prepares it; then give --data_dir=FOLDER."
    )


@pytest.mark.parametrize(
    ("keys", "features"),
    [
        (None, {}),
        (("image", "image"), {"image": tfds.features.Image()}),
        (
            ("text", "label"),
            {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(num_classes=2)},
        ),
    ],
)
def test_data_set_of_other_things(keys: Any, features: dict[str, Any]) -> None:
    info = SimpleNamespace(supervised_keys=keys, features=features)
    with pytest.raises(
        BadFlags, match=r"must be of images that each have one class label\. Received"
    ):
        tfds_source._image_and_label("imdb_reviews", info)
