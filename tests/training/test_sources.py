"""Digits and folders of images: what is in them, in which order, and what is said if nothing is."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from bnzoo.preprocessing import Preprocessing
from training import sources
from training.command_line import BadFlags, RunFailed
from training.sources import Split

from .helpers import image_folder

GREY = Preprocessing(image_size=(8, 8), channels=1)
RGB = Preprocessing(image_size=(8, 8), channels=3)


def read_all(split: Split, preprocessing: Preprocessing) -> tuple[list[np.ndarray], list[int]]:
    examples = split.ordered().map(lambda raw: split.read(raw, preprocessing))
    pairs = list(examples.as_numpy_iterator())
    return [image for image, _ in pairs], [int(label) for _, label in pairs]


def test_digits_are_all_of_scikit_learns_once() -> None:
    from sklearn.datasets import load_digits

    source = sources.digits()
    assert source.labels == tuple("0123456789")
    assert (source.channels, source.image_size, source.held_out()) == (1, (32, 32), "test")
    train, test = source.open_split("train"), source.open_split("test")
    assert (train.examples, test.examples) == (1437, 360)
    found = []
    for split in (train, test):
        images, labels = read_all(split, GREY)
        assert images[0].shape == (8, 8, 1)
        assert images[0].dtype == np.uint8
        found += [(image.tobytes(), label) for image, label in zip(images, labels, strict=True)]
    loaded = load_digits()
    levels = np.round(loaded.images * 255 / 16).astype(np.uint8)
    expected = [
        (image.tobytes(), int(label)) for image, label in zip(levels, loaded.target, strict=True)
    ]
    assert sorted(found) == sorted(expected)
    assert max(max(image) for image, _ in found) == 255


def test_digits_are_split_alike_each_time() -> None:
    # The figure is what RandomState(0), whose streams NumPy froze, gave when this was written.
    _, labels = read_all(sources.digits().open_split("test"), GREY)
    assert labels[:12] == [7, 9, 4, 7, 0, 2, 6, 1, 3, 1, 3, 7]
    assert read_all(sources.digits().open_split("test"), GREY)[1] == labels


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RunFailed, match=r"needs scikit-learn: pip install 'bnzoo\[demo\]'"):
        sources.digits()


def test_folder_has_each_image_with_its_class(tmp_path: Path) -> None:
    counts = {"train": {"b": 3, "a": 2, "c": 1}, "val": {"c": 2, "a": 1}}
    source = sources.folder(str(image_folder(tmp_path, counts)))
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    assert source.labels == ("a", "b", "c")
    assert (source.channels, source.image_size, source.held_out()) == (3, None, "val")
    for split, classes in counts.items():
        opened = source.open_split(split)
        images, labels = read_all(opened, RGB)
        assert opened.examples == sum(classes.values())
        assert labels == sorted(
            number for number, label in enumerate("abc") for _ in range(classes.get(label, 0))
        )
        for image, label in zip(images, labels, strict=True):
            assert image.shape == (12, 15, 3)
            assert (image // 10 == 2 + 4 * label).all()


def test_folder_leaves_out_what_is_hidden(tmp_path: Path) -> None:
    """.git looks like a split, .ipynb_checkpoints like a class, and ._0.png like an image."""
    image_folder(
        tmp_path,
        {"train": {"a": 2, "b": 1, ".ipynb_checkpoints": 1}, "val": {"b": 1}, ".git": {"c": 1}},
    )
    (tmp_path / "train" / "b" / "._0.png").write_bytes(b"no image")
    source = sources.folder(str(tmp_path))
    assert (source.labels, source.split_names) == (("a", "b"), ("train", "val"))
    assert read_all(source.open_split("train"), RGB)[1] == [0, 0, 1]


@pytest.mark.parametrize("name", [b"two\nlines", b"a\rb", b"caf\xe9"])
def test_names_that_labels_txt_cannot_hold_are_refused(name: bytes, tmp_path: Path) -> None:
    image_folder(tmp_path, {"train": {"a": 1, "b": 1}})
    os.rename(tmp_path / "train" / "b", os.fsencode(tmp_path / "train") + b"/" + name)
    with pytest.raises(RunFailed, match="must be renamed: the name of a class must be") as caught:
        sources.folder(str(tmp_path))
    assert str(caught.value).startswith(f"the folder {name!r} in {tmp_path}/train must")


@pytest.mark.parametrize("unreadable", ["", "train", "train/b"])
def test_a_folder_that_cannot_be_read_is_named(
    unreadable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_folder(tmp_path, {"train": {"a": 1, "b": 1}})
    scandir = os.scandir

    def refused(path: str) -> Iterator[os.DirEntry[str]]:
        # Permissions do not stop root.
        if Path(path) == tmp_path / unreadable:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(RunFailed) as caught:
        sources.folder(str(tmp_path))
    folder = str(tmp_path / unreadable)
    assert str(caught.value) == f"the folder {folder} cannot be read: Permission denied"


def test_names_of_files_need_not_be_utf_8(tmp_path: Path) -> None:
    image_folder(tmp_path, {"train": {"a": 2}})
    folder = os.fsencode(tmp_path / "train" / "a")
    os.rename(folder + b"/0.png", folder + b"/caf\xe9.png")
    split = sources.folder(str(tmp_path)).open_split("train")
    assert len(read_all(split, RGB)[0]) == 2
    assert os.fsencode(split.locate(1)) == folder + b"/caf\xe9.png"


def test_folder_takes_many_kinds_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "x"
    folder.mkdir(parents=True)
    for name in ("1.JPEG", "2.jpg", "3.png", "4.gif", "5.webp"):
        kind = {"jpg": "jpeg"}.get(name[2:].lower(), name[2:].lower())
        Image.fromarray(np.full((9, 9, 3), 100, np.uint8)).save(folder / name, format=kind)
    split = sources.folder(str(tmp_path)).open_split("train")
    images, _ = read_all(split, RGB)
    assert [image.shape for image in images] == [(9, 9, 3)] * 5


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (
            lambda root: root / "absent",
            "there is no folder .*absent: it must hold images in <split>/",
        ),
        (lambda root: root, "no images in .*: they must lie in <split>/<class>/ and end in one of"),
    ],
)
def test_folder_without_images(
    prepare: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(RunFailed, match=message):
        sources.folder(str(prepare(tmp_path)))


def test_unknown_split(tmp_path: Path) -> None:
    source = sources.folder(str(image_folder(tmp_path, {"train": {"a": 1}, "new": {"a": 1}})))
    with pytest.raises(BadFlags, match=r"the split must be one of new, train. Received: test"):
        source.open_split("test")
    with pytest.raises(BadFlags, match=r"--eval_split must be given, .* It has new, train"):
        source.held_out()


def test_shuffled_is_a_permutation_that_depends_on_the_seed() -> None:
    split = sources.digits().open_split("test")
    orders = [
        [int(raw) for raw in split.shuffled(tf.constant(seed, tf.int64))] for seed in (1, 2, 1)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(360))
    assert orders[0] == orders[2]
    # Two random permutations of 360 agree in about one place.
    assert np.sum(np.equal(orders[0], orders[1])) < 10
    assert np.sum(np.equal(orders[0], np.arange(360))) < 10
