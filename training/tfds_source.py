"""A TFDS data set as a source of images, read so that any epoch can be entered anywhere."""

from __future__ import annotations

import math
import os

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from bnzoo.preprocessing import Preprocessing

from .command_line import BadFlags, RunFailed
from .failures import explained, first_line
from .settings import DIGITS, did_you_mean
from .sources import Source, Split, array_split

# Splits of at most this many bytes of decoded images of one size are read once, into memory.
IN_MEMORY_BYTES = 256 * 2**20
# Those of others are shuffled in a window of this many bytes, which is about 4,700 encoded images
# of ImageNet, whose files are put into a new order in each epoch too.
SHUFFLE_BYTES = 512 * 2**20
# Bytes that are read from a file at a time.
READ_BYTES = 2**20
# Files that are read at a time, one example from each in turn.
INTERLEAVED_FILES = 16


def open_tfds(name: str, data_dir: str | None) -> Source:
    """Opens a TFDS data set, downloading it if it is not there.

    TFDS' own shuffling cannot be entered in the middle of its tenth epoch without reading nine, so
    its files are read here.

    Raises:
        BadFlags: there is no such data set, or it is none of labelled images.
        RunFailed: it is neither present nor can it be downloaded.
    """
    builder = _builder(name, data_dir)
    image_key, label_key = _image_and_label(name, builder.info)
    _prepare(name, builder)
    info = builder.info
    features = info.features
    height, width, channels = features[image_key].shape
    kept_channels = 1 if channels == 1 else 3
    examples = sum(split.num_examples for split in info.splits.values())
    window = math.ceil(SHUFFLE_BYTES * examples / max(info.dataset_size, 1))

    def image_and_label(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # The image is left encoded, so that one decoder serves all sources and the served model.
        example = features.deserialize_example(
            record, decoders={image_key: tfds.decode.SkipDecoding()}
        )
        return example[image_key], example[label_key]

    def read(record: tf.Tensor, preprocessing: Preprocessing) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = image_and_label(record)
        return preprocessing.decode(image), label

    def labelled(split: str) -> bool:
        """Whether the first example has a label: TFDS has -1 where there is none."""
        first = info.splits[split].file_instructions[0]
        try:
            (record,) = _records(str(first.filename), first.skip, 1)
            return int(image_and_label(record)[1]) >= 0
        except (tf.errors.OpError, ValueError):
            return True  # It cannot be read: which one that is, and why, is told by who reads all.

    def open_split(split: str) -> Split:
        try:
            chosen = info.splits[split]
            parts = chosen.file_instructions
        except ValueError as error:
            raise BadFlags(
                f"the split must be one of {', '.join(info.splits)}, or a part of one such as "
                f"train[:90%]. Received: {split}"
            ) from error
        # TFDS takes train[5:2] as it comes, as a negative number of examples or, of train[5:4], as
        # all behind the fifth.
        for part in tfds.core.ReadInstruction.from_spec(split).to_absolute(dict(info.splits)):
            whole = info.splits[part.splitname].num_examples
            if (part.from_ or 0) >= (whole if part.to is None else part.to):
                raise BadFlags(
                    "the split must have at least one example in each of its parts. "
                    f"Received: {split}"
                )
            if not labelled(part.splitname):
                raise BadFlags(
                    f"the split must have labels, but those of {part.splitname} are kept back. "
                    f"{name} has {', '.join(info.splits)}. Received: {split}"
                )
        files = (
            tf.constant([str(part.filename) for part in parts]),
            tf.constant([part.skip for part in parts], tf.int64),
            tf.constant([part.take for part in parts], tf.int64),
        )

        def shuffled(seed: tf.Tensor) -> tf.data.Dataset:
            order = tf.random.experimental.stateless_shuffle(
                tf.range(len(parts)), seed=tf.stack([seed, 0])
            )
            columns = tuple(tf.gather(column, order) for column in files)
            records = tf.data.Dataset.from_tensor_slices(columns).interleave(
                _records, cycle_length=INTERLEAVED_FILES, num_parallel_calls=tf.data.AUTOTUNE
            )
            # This graph's seed, which shuffle joins to its own. By default it is the process's
            # global seed, on which the order must not depend; and for 0 it fails on a tensor.
            tf.compat.v1.set_random_seed(1)
            return records.shuffle(min(window, chosen.num_examples), seed=seed)

        def ordered() -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices(files).flat_map(_records)

        streamed = Split(
            chosen.num_examples,
            shuffled,
            ordered,
            read,
            lambda position: f"example {position} (counted from 0) of {name}, split {split},",
            f"Delete {builder.data_dir} and prepare the data set again",
        )
        pixels = (height or math.inf) * (width or math.inf) * kept_channels
        if pixels * streamed.examples <= IN_MEMORY_BYTES:
            return _loaded(streamed, Preprocessing((height, width), kept_channels))
        return streamed

    return Source(
        labels=tuple(features[label_key].names),
        channels=kept_channels,
        image_size=(height, width) if height and width else None,
        open_split=open_split,
        split_names=tuple(info.splits),
        labelled=labelled,
    )


def _records(file: tf.Tensor, skip: tf.Tensor, take: tf.Tensor) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(file, buffer_size=READ_BYTES).skip(skip).take(take)


def _loaded(split: Split, preprocessing: Preprocessing) -> Split:
    """`split` in memory."""
    read = split.ordered().map(
        lambda record: split.read(record, preprocessing), num_parallel_calls=tf.data.AUTOTUNE
    )
    with explained(split, preprocessing):
        blocks = list(read.batch(1000).as_numpy_iterator())
    images, labels = (np.concatenate(column) for column in zip(*blocks, strict=True))
    return array_split(images, labels)


def _builder(name: str, data_dir: str | None) -> tfds.core.DatasetBuilder:
    """The builder of a data set, which may not be on disk yet."""
    try:
        return tfds.builder(name, data_dir=data_dir and os.path.expanduser(data_dir))
    except tfds.core.DatasetNotFoundError as error:
        known = [DIGITS, *tfds.list_builders(with_community_datasets=False)]
        raise BadFlags(
            "--dataset must be digits, folder:PATH or a data set of TFDS. "
            f"Received: --dataset={name}.{did_you_mean(name, known)}"
        ) from error
    except (ValueError, AssertionError) as error:  # An unknown configuration or version.
        raise BadFlags(f"--dataset={name}: {first_line(error)}") from error


def _prepare(name: str, builder: tfds.core.DatasetBuilder) -> None:
    """Sees that a data set is on disk, downloading it if need be."""
    if not builder.is_prepared():
        try:
            builder.download_and_prepare()
        except Exception as error:
            # What can go wrong on the way has no common class: network, disk, missing archives.
            raise RunFailed(
                f"no data set {name} in {builder.data_dir}, and it cannot be downloaded: "
                f"{first_line(error).rstrip('.')}. {_remedy(builder)}"
            ) from error
    if builder.info.file_format != tfds.core.FileFormat.TFRECORD:
        raise RunFailed(
            f"the data set in {builder.data_dir} is stored as {builder.info.file_format.value}: "
            "only tfrecord, TFDS' default, can be read"
        )


def _image_and_label(name: str, info: tfds.core.DatasetInfo) -> tuple[str, str]:
    """The names of the two features that are trained on."""
    keys = info.supervised_keys
    # Keys of structured inputs are dicts or tuples themselves.
    if keys and len(keys) == 2 and all(isinstance(key, str) for key in keys):
        image, label = keys
        kinds = type(info.features[image]), type(info.features[label])
        if kinds == (tfds.features.Image, tfds.features.ClassLabel):
            return image, label
    raise BadFlags(
        f"--dataset must be of images that each have one class label. Received: --dataset={name}"
    )


def _remedy(builder: tfds.core.DatasetBuilder) -> str:
    """How to get a data set that cannot be downloaded now."""
    by_hand = " ".join((builder.MANUAL_DOWNLOAD_INSTRUCTIONS or "").split())
    if not by_hand:
        return (
            f"With a network, `tfds build {builder.name} --data_dir=FOLDER` prepares it; then "
            "give --data_dir=FOLDER."
        )
    root = str(builder.data_dir).removesuffix(builder.info.full_name)
    return f"manual_dir is {os.path.join(root, 'downloads', 'manual')}: {by_hand}"
