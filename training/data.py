"""A data set -> batches: for training from any step on, for evaluation each example once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from bnzoo.preprocessing import Preprocessing

from . import augment, sources
from .command_line import BadFlags, RunFailed
from .recipes import RECIPES
from .settings import DIGITS, FOLDER, LARGEST_BATCH, SMALL_IMAGE, Settings
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


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows of each global batch that one process reads, dealt to its replicas.

    Attributes:
        start: the first row.
        sizes: how many each replica gets, in their order; none is 0.
        turns: of so many batches in a row the process takes one alone,
        turn: that of this number, from 0.
    """

    start: int
    sizes: tuple[int, ...]
    turns: int = 1
    turn: int = 0

    @property
    def rows(self) -> int:
        """How many rows the process reads."""
        return sum(self.sizes)


def share(batch_size: int, processes: int, process: int, replicas: int) -> Share:
    """What process number `process` reads, as even as can be: sizes differ by 1 at most.

    The first replicas get the longer parts. Nothing is padded: BN and the losses take each
    replica's number of rows as it is.

    Args:
        batch_size: rows of the global batch; at least `replicas`.
        processes: how many there are, with equally many replicas each.
        process: from 0.
        replicas: of all processes together.
    """
    sizes = [batch_size // replicas + (n < batch_size % replicas) for n in range(replicas)]
    own = replicas // processes
    first = process * own
    return Share(sum(sizes[:first]), tuple(sizes[first : first + own]))


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
    inputs: Inputs, batch_size: int, seed: int, first_step: int = 0, part: Share | None = None
) -> tf.data.Dataset:
    """Batches without end, from step `first_step` on (counted from 0).

    Each epoch is a new order of all examples. The order and the augmentation of example i of the
    stream depend on `seed` and i alone, so the position in the input is the step: nothing else
    needs to be stored to go on where a run was interrupted. Batches go across the ends of epochs,
    so all are full.

    Args:
        inputs: the data.
        batch_size: rows of the global batch.
        seed: of the order and the augmentation.
        first_step: as said.
        part: which rows of each of these batches to read: the others are passed over before they
            are decoded. By default all.

    Returns:
        A data set of images, float32 [rows, height, width, channels], and labels, int64; with
        `part` one element for each of its replicas in turn.
    """
    split = inputs.train
    position = first_step * batch_size
    # Not divmod, which tensors do not have.
    epoch, offset = position // split.examples, position % split.examples

    def shuffled(epoch: tf.Tensor) -> tf.data.Dataset:
        return split.shuffled(seed * 1_000_003 + epoch)

    raw = tf.data.Dataset.range(epoch, _FOREVER).flat_map(shuffled).skip(offset)
    rows = batch_size if part is None else part.rows
    if inputs.augmentation == "none":
        batches = _batches(split, _part(raw, batch_size, part), inputs.preprocessing, rows)
        return _dealt(batches, part).prefetch(tf.data.AUTOTUNE)
    numbered = tf.data.Dataset.zip(tf.data.Dataset.range(position, _FOREVER), raw)

    def prepare(number: tf.Tensor, example: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = split.read(example, inputs.preprocessing)
        example_seed = tf.stack([tf.cast(seed, tf.int64), number])
        image = augment.augment(
            image, example_seed, inputs.preprocessing, inputs.augmentation, inputs.photometric
        )
        return image, label

    batches = (
        _part(numbered, batch_size, part)
        .map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(rows, drop_remainder=True)
    )
    return _dealt(batches, part).prefetch(tf.data.AUTOTUNE)


def evaluation_batches(
    split: Split, preprocessing: Preprocessing, batch_size: int, part: Share | None = None
) -> tf.data.Dataset:
    """Each example of `split` once, in batches of one size: the last is filled up.

    Args:
        split: the data.
        preprocessing: what is done to an image.
        batch_size: rows of the global batch.
        part: which rows of each batch to read, as in `training_batches`; so a replica for which
            nothing is left in the last batch gets what is masked, and never nothing.

    Returns:
        A data set of images, float32 [rows, height, width, channels]; labels, int64; and a mask,
        float32, that is 0 for what fills the last batch up.

    Raises:
        BadFlags: the batch has more rows than TensorFlow can count.
    """
    if batch_size > LARGEST_BATCH:
        raise BadFlags(
            f"--batch_size must be a whole number in [1, {LARGEST_BATCH}]. "
            f"Received: --batch_size={batch_size}"
        )
    rows = batch_size if part is None else part.rows

    def fill(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        missing = rows - tf.shape(images)[0]
        padded = (
            tf.pad(values, [[0, missing]] + [[0, 0]] * (values.shape.rank - 1))
            for values in (images, labels, tf.ones_like(labels, tf.float32))
        )
        return tuple(tf.ensure_shape(value, (rows, *value.shape[1:])) for value in padded)

    raw = _part(split.ordered(), batch_size, part, drop_remainder=False)
    batches = _batches(split, raw, preprocessing, rows, drop_remainder=False).map(fill)
    if part is not None:
        # Of the last batch there may be nothing for this process, but the others wait for it.
        nothing = tuple(tf.zeros(spec.shape, spec.dtype) for spec in batches.element_spec)
        batches = batches.concatenate(tf.data.Dataset.from_tensors(nothing))
        batches = batches.take(number_of_batches(split, batch_size))
    return _dealt(batches, part).prefetch(tf.data.AUTOTUNE)


def number_of_batches(split: Split, batch_size: int) -> int:
    """How many batches `evaluation_batches` makes of `split`."""
    return -(-split.examples // batch_size)


def _part(
    raw: tf.data.Dataset, batch_size: int, part: Share | None, drop_remainder: bool = True
) -> tf.data.Dataset:
    """The rows of `part` of each batch of the raw examples `raw`; these are cheap to pass over."""
    if part is None or (part.rows == batch_size and part.turns == 1):
        return raw

    def cut(*batch: tf.Tensor) -> Sequence[tf.Tensor] | tf.Tensor:
        rows = tuple(values[part.start : part.start + part.rows] for values in batch)
        return rows if len(rows) > 1 else rows[0]

    batches = raw.batch(batch_size, drop_remainder=drop_remainder)
    return batches.shard(part.turns, part.turn).map(cut).unbatch()


def _dealt(batches: tf.data.Dataset, part: Share | None) -> tf.data.Dataset:
    """Each of `batches` cut into one for each replica of `part`."""
    if part is None or len(part.sizes) == 1:
        return batches
    if len(set(part.sizes)) == 1:
        return batches.rebatch(part.sizes[0], drop_remainder=True)
    return batches.rebatch(part.sizes)


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
