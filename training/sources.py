"""What a data set is to training, and the two that need no TFDS: digits and folders of images."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing

from .command_line import BadFlags, RunFailed

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".webp")
DIGITS_TRAINED_ON = 1437


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a data set.

    Raw examples are what is cheap to shuffle and to skip: an index or encoded bytes.

    Attributes:
        examples: how many it has.
        shuffled: from a scalar seed, int64, to all raw examples in an order that depends on it
            alone. To be called inside tf.data's graph.
        ordered: all raw examples, always in the same order.
        read: from a raw example to the image, uint8 [height, width, channels], and the label,
            int64; the decoding is that of the given Preprocessing.
        locate: from a position in `ordered`, counted from 0, to what that example is called.
        remedy: the sentence that says what to do about an example that cannot be read.
        in_memory: whether `read` takes a batch of raw examples too.
    """

    examples: int
    shuffled: Callable[[tf.Tensor], tf.data.Dataset]
    ordered: Callable[[], tf.data.Dataset]
    read: Callable[[Any, Preprocessing], tuple[tf.Tensor, tf.Tensor]]
    locate: Callable[[int], str]
    remedy: str
    in_memory: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set of labelled images.

    Attributes:
        labels: the name of each class.
        channels: 1 for grey images, else 3.
        image_size: what the network's input is unless a flag says otherwise: (height, width) in
            pixels, or None for images of many sizes.
        open_split: from a split's name to the split; BadFlags for a name that there is not.
        split_names: the splits that there are.
        labelled: whether the examples of a split have labels: those of contests keep them back.
    """

    labels: tuple[str, ...]
    channels: int
    image_size: tuple[int, int] | None
    open_split: Callable[[str], Split]
    split_names: tuple[str, ...]
    labelled: Callable[[str], bool] = lambda split: True

    def held_out(self) -> str:
        """The split to evaluate on if none is named."""
        for name in ("test", "validation", "val"):
            if name in self.split_names and self.labelled(name):
                return name
        raise BadFlags(
            f"--eval_split must be given, since the data set has no split called test, validation "
            f"or val with labels. It has {', '.join(self.split_names)}"
        )


def array_split(images: np.ndarray, labels: np.ndarray) -> Split:
    """A split that is held in memory.

    Args:
        images: uint8 [N, height, width, channels].
        labels: int64 [N].
    """
    tensors = tf.constant(images), tf.constant(labels)

    def read(index: tf.Tensor, _: Preprocessing) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.gather(tensors[0], index), tf.gather(tensors[1], index)

    split = _indexed(len(images), read, "example {} in memory".format, "Load it again")
    return dataclasses.replace(split, in_memory=True)


def _indexed(
    examples: int,
    read: Callable[[tf.Tensor, Preprocessing], tuple[tf.Tensor, tf.Tensor]],
    locate: Callable[[int], str],
    remedy: str,
) -> Split:
    """A split whose raw examples are indices."""

    def shuffled(seed: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(examples, dtype=tf.int64), seed=tf.stack([seed, 0])
        )
        return tf.data.Dataset.from_tensor_slices(order)

    ordered = functools.partial(tf.data.Dataset.range, examples)
    return Split(examples, shuffled, ordered, read, locate, remedy)


def _named_splits(
    splits: Mapping[str, Any], open_split: Callable[[Any], Split]
) -> Callable[[str], Split]:
    def open_named(name: str) -> Split:
        if name not in splits:
            raise BadFlags(f"the split must be one of {', '.join(splits)}. Received: {name}")
        return open_split(splits[name])

    return open_named


def digits() -> Source:
    """The 8x8 digits that come with scikit-learn: 1,437 to train on, 360 held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RunFailed("--dataset=digits needs scikit-learn: pip install 'bnzoo[demo]'") from error
    loaded = load_digits()
    # Levels 0..16 become 0..255. RandomState's streams never change, so the split never does.
    pixels = np.round(loaded.images[..., np.newaxis] * (255 / 16)).astype(np.uint8)
    order = np.random.RandomState(0).permutation(len(pixels))
    splits = {"train": order[:DIGITS_TRAINED_ON], "test": order[DIGITS_TRAINED_ON:]}

    def open_split(members: np.ndarray) -> Split:
        return array_split(pixels[members], loaded.target[members].astype(np.int64))

    return Source(
        labels=tuple(str(digit) for digit in loaded.target_names),
        channels=1,
        image_size=(32, 32),
        open_split=_named_splits(splits, open_split),
        split_names=tuple(splits),
    )


def folder(root: str) -> Source:
    """Image files in root/<split>/<class>/; a class has one label in all splits.

    What is hidden is left out: notebooks and desktops leave such folders and files everywhere,
    .ipynb_checkpoints with copies of images and ._1.png that is none among them.
    """
    if not os.path.isdir(root):
        raise RunFailed(f"there is no folder {root}: it must hold images in <split>/<class>/")
    files: dict[str, list[tuple[str, str]]] = {}
    for split in _subfolders(root):
        for label in _subfolders(os.path.join(root, split)):
            _check_class_name(label, os.path.join(root, split))
            members = os.path.join(root, split, label)
            files.setdefault(split, []).extend(
                (os.path.join(members, name), label)
                for name in sorted(entry.name for entry in _entries(members))
                if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")
            )
    files = {split: found for split, found in files.items() if found}
    if not files:
        raise RunFailed(
            f"no images in {root}: they must lie in <split>/<class>/ and end in one of "
            f"{', '.join(IMAGE_SUFFIXES)}"
        )
    labels = sorted({label for found in files.values() for _, label in found})
    numbers = {label: number for number, label in enumerate(labels)}

    def open_split(found: Sequence[tuple[str, str]]) -> Split:
        # As the bytes that they are on the disk: some names of files are no UTF-8.
        paths = tf.constant([os.fsencode(path) for path, _ in found])
        classes = tf.constant([numbers[label] for _, label in found], tf.int64)

        def read(index: tf.Tensor, preprocessing: Preprocessing) -> tuple[tf.Tensor, tf.Tensor]:
            return preprocessing.decode(tf.io.read_file(paths[index])), classes[index]

        return _indexed(
            len(found), read, lambda position: found[position][0], "Replace the file or remove it"
        )

    return Source(tuple(labels), 3, None, _named_splits(files, open_split), tuple(files))


def _check_class_name(name: str, parent: str) -> None:
    """RunFailed for the name of a folder that cannot be a line of a run's labels.txt."""
    try:
        name.encode()
        fits = not {"\n", "\r"} & set(name)
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise RunFailed(
            f"the folder {os.fsencode(name)!r} in {parent} must be renamed: the name of a class "
            "must be UTF-8 and one line"
        )


def _subfolders(parent: str) -> list[str]:
    return sorted(
        entry.name
        for entry in _entries(parent)
        if entry.is_dir() and not entry.name.startswith(".")
    )


def _entries(parent: str) -> list[os.DirEntry[str]]:
    """What lies in the folder `parent`."""
    try:
        with os.scandir(parent) as entries:
            return list(entries)
    except OSError as error:
        raise RunFailed(f"the folder {parent} cannot be read: {error.strerror}") from error
