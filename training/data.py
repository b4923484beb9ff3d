"""A data set -> batches: for training from any step on, for evaluation each example once."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from bnzoo.preprocessing import Preprocessing

from . import augment, sources
from .command_line import RunFailed
from .recipes import RECIPES
from .settings import DIGITS, FOLDER, SMALL_IMAGE, Settings
from .sources import Source, Split

# Mirrored or shifted characters are others, or none.
CHARACTERS = (
    DIGITS,
    "mnist",
    "emnist",
    "kmnist",
    "binarized_mnist",
    "mnist_corrupted",
    "omniglot",
    "svhn_cropped",
)
# GoogLeNet's and its successors' single crop: 224 of 256 pixels.
LARGE_IMAGE_CROP = 0.875

_FOREVER = tf.int64.max


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What reaches the network: the two splits, and what is done to their images."""

    labels: tuple[str, ...]
    train: Split
    evaluation: Split
    preprocessing: Preprocessing
    augmentation: str
    photometric: float


def open_source(dataset: str, data_dir: str | None) -> Source:
    """Opens a data set, downloading it where TFDS can.

    Args:
        dataset: what --dataset names.
        data_dir: the folder of TFDS data sets; None is TFDS' own.

    Raises:
        BadFlags: there is no such data set, or it is none of labelled images.
        RunFailed: it is neither present nor can it be downloaded.
    """
    if dataset == DIGITS:
        return sources.digits()
    if dataset.startswith(FOLDER):
        return sources.folder(dataset[len(FOLDER) :])
    # Imported here: only who uses TFDS waits for it.
    from .tfds_source import open_tfds

    return open_tfds(dataset, data_dir)


def open_inputs(settings: Settings) -> Inputs:
    """Opens the data set of `settings` and decides what its flags leave to it.

    Raises:
        BadFlags, RunFailed: as `open_source`; or there is no such split, or one class alone.
    """
    source = open_source(settings.dataset, settings.data_dir)
    if len(source.labels) < 2:
        raise RunFailed(
            f"{settings.dataset} has one class, {source.labels[0]}: there is nothing to learn "
            "from fewer than two"
        )
    recipe = RECIPES[settings.recipe]
    side = settings.image_size or recipe.image_size
    size = (side, side) if settings.image_size else source.image_size or (side, side)
    small = max(size) <= SMALL_IMAGE
    augmentation = settings.augmentation
    if augmentation is None:
        augmentation = "shift" if small else "crop"
        if settings.dataset.partition("/")[0].partition(":")[0] in CHARACTERS:
            augmentation = "none"
    return Inputs(
        labels=source.labels,
        train=source.open_split(settings.train_split),
        evaluation=source.open_split(settings.eval_split or source.held_out()),
        preprocessing=Preprocessing(
            image_size=size,
            channels=source.channels,
            resize="direct" if small else "short_side",
            crop_fraction=1.0 if small else LARGE_IMAGE_CROP,
            mean=recipe.mean,
            scale=recipe.scale,
            binarize_threshold=recipe.binarize_threshold,
        ),
        augmentation=augmentation,
        photometric=settings.photometric,
    )


def training_batches(
    inputs: Inputs, batch_size: int, seed: int, first_step: int = 0
) -> tf.data.Dataset:
    """Batches without end, from step `first_step` on (counted from 0).

    Each epoch is a new order of all examples. The order and the augmentation of example i of the
    stream depend on `seed` and i alone, so the position in the input is the step: nothing else
    needs to be stored to go on where a run was interrupted. Batches go across the ends of epochs,
    so all are full.

    Returns:
        A data set of images, float32 [batch_size, height, width, channels], and labels, int64.
    """
    split = inputs.train
    position = first_step * batch_size
    epoch, offset = divmod(position, split.examples)

    def shuffled(epoch: tf.Tensor) -> tf.data.Dataset:
        return split.shuffled(seed * 1_000_003 + epoch)

    raw = tf.data.Dataset.range(epoch, _FOREVER).flat_map(shuffled).skip(offset)
    if inputs.augmentation == "none":
        return _batches(split, raw, inputs.preprocessing, batch_size).prefetch(tf.data.AUTOTUNE)
    numbered = tf.data.Dataset.zip(tf.data.Dataset.range(position, _FOREVER), raw)

    def prepare(number: tf.Tensor, example: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = split.read(example, inputs.preprocessing)
        example_seed = tf.stack([tf.constant(seed, tf.int64), number])
        image = augment.augment(
            image, example_seed, inputs.preprocessing, inputs.augmentation, inputs.photometric
        )
        return image, label

    return (
        numbered.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(batch_size, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )


def evaluation_batches(
    split: Split, preprocessing: Preprocessing, batch_size: int
) -> tf.data.Dataset:
    """Each example of `split` once, in batches of one size: the last is filled up.

    Returns:
        A data set of images, float32 [batch_size, height, width, channels]; labels, int64; and a
        mask, float32, that is 0 for what fills the last batch up.
    """

    def fill(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        missing = batch_size - tf.shape(images)[0]
        padded = (
            tf.pad(values, [[0, missing]] + [[0, 0]] * (values.shape.rank - 1))
            for values in (images, labels, tf.ones_like(labels, tf.float32))
        )
        return tuple(tf.ensure_shape(value, (batch_size, *value.shape[1:])) for value in padded)

    batches = _batches(split, split.ordered(), preprocessing, batch_size, drop_remainder=False)
    return batches.map(fill).prefetch(tf.data.AUTOTUNE)


def _batches(
    split: Split,
    raw: tf.data.Dataset,
    preprocessing: Preprocessing,
    batch_size: int,
    drop_remainder: bool = True,
) -> tf.data.Dataset:
    """Batches of the raw examples `raw` of `split`, as they are in evaluation and serving."""

    def prepare(example: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = split.read(example, preprocessing)
        return preprocessing(image), label

    if split.in_memory:
        # All images have one size: a whole batch at a time is many times faster.
        batches = raw.batch(batch_size, drop_remainder=drop_remainder)
        return batches.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    examples = raw.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    return examples.batch(batch_size, drop_remainder=drop_remainder)
