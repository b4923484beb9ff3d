"""Decode, crop, resize, scale: one code for training, evaluation and the served signatures.

A network is only as good as the agreement between the pixels it was trained on and those it is
served. So what is done to an image is a value, `Preprocessing`, that is stored beside the weights
and run, as TensorFlow operations, wherever images come in: eagerly, in tf.data, in a SavedModel.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from .checks import check_choice, is_finite, is_whole

FORMAT_VERSION = 1

# libjpeg's accurate transform gives the pixels that every other decoder gives. TensorFlow's
# default, INTEGER_FAST, is off by up to 5 levels, and tf.io.decode_image offers no choice.
DCT_METHOD = "INTEGER_ACCURATE"

_Resize = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

# Bilinear has three meanings in the published weights: sampling at pixel centres (TensorFlow 2),
# the same but averaging when it shrinks (Pillow, so torchvision), and sampling at pixel corners
# (TensorFlow 1, so TF-slim).
_INTERPOLATIONS: dict[str, _Resize] = {
    "nearest": functools.partial(tf.image.resize, method="nearest"),
    "bilinear": functools.partial(tf.image.resize, method="bilinear"),
    "bilinear_antialias": functools.partial(tf.image.resize, method="bilinear", antialias=True),
    "bilinear_corners": functools.partial(tf.compat.v1.image.resize, method="bilinear"),
    "bicubic": functools.partial(tf.image.resize, method="bicubic"),
    "bicubic_antialias": functools.partial(tf.image.resize, method="bicubic", antialias=True),
    "area": functools.partial(tf.image.resize, method="area"),
}
_CHOICES = {
    "resize": ("direct", "short_side", "central_crop"),
    "channel_order": ("rgb", "bgr"),
    "interpolation": tuple(_INTERPOLATIONS),
}


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """What is done to an image before a network sees it.

    The steps, with every pixel in 0..255 until the last one:

    1. `decode`: JPEG, PNG, GIF or WebP bytes to `uint8` RGB or grey;
    2. `resize` and crop to `image_size`, in one of three ways;
    3. with `binarize_threshold`, each value becomes 255 if it is above it, else 0;
    4. channels are put into `channel_order`;
    5. `y = (x - mean) / scale`, per channel.

    The ways to resize; `crop_fraction` is the fraction of each side that the network sees:

    - `"direct"`: the whole image, its aspect ratio given up, to `image_size / crop_fraction`
      (rounded down), then the centre of `image_size`.
    - `"short_side"`: the image, its aspect ratio kept, to the smallest size that covers
      `image_size / crop_fraction` (rounded down), then the centre of `image_size`. For a square
      it is the shorter side that becomes that long.
    - `"central_crop"`: the centre that is `crop_fraction` of each side, then that to
      `image_size`, its aspect ratio given up. What TF-slim's networks are evaluated with.

    As published weights want it (`c`: ImageNet's mean, `s`: its standard deviation, times 255):

    | weights | resize | fraction | interpolation | mean | scale | order |
    |---|---|---|---|---|---|---|
    | TF-slim | central_crop | 0.875 | bilinear_corners | 127.5 | 127.5 | rgb |
    | PyTorch bn_inception | short_side | 0.875 | bilinear_antialias | 104, 117, 128 | 1 | bgr |
    | torchvision | short_side | 0.875 | bilinear_antialias | c | s | rgb |
    | MXNet Inception-BN | short_side | 0.875 | bilinear | 123.68, 116.779, 103.939 | 1 | rgb |
    | Caffe | direct | 0.875 | bilinear | 104, 117, 123 | 1 | bgr |

    Args:
        image_size: height and width that the network sees, in pixels.
        channels: 3, or 1 for grey images.
        resize: `"direct"`, `"short_side"` or `"central_crop"`.
        crop_fraction: in (0, 1].
        mean: subtracted, in units of 0..255: one number, or one a channel in `channel_order`.
        scale: divided by, as `mean`. Not 0.
        channel_order: `"rgb"` or `"bgr"`.
        interpolation: `"nearest"`, `"bilinear"`, `"bilinear_antialias"` (averages when it
            shrinks, as Pillow does), `"bilinear_corners"` (as TensorFlow 1 does), `"bicubic"`,
            `"bicubic_antialias"` or `"area"`.
        binarize_threshold: None, or a number in 0..255. With `mean` 0 and `scale` 255 the
            network sees 0 and 1: the "28x28 binary image" of Ioffe & Szegedy 2015, Section 4.1.

    Raises:
        ValueError: an argument is outside of its range.

    Example:

    >>> mnist = Preprocessing(image_size=(28, 28), channels=1, binarize_threshold=127.5)
    >>> mnist(tf.fill((28, 28, 1), tf.constant(200, tf.uint8))).numpy().max()
    np.float32(1.0)
    >>> Preprocessing.from_json(mnist.to_json()) == mnist
    True
    """

    image_size: tuple[int, int]
    channels: int = 3
    resize: str = "direct"
    crop_fraction: float = 1.0
    mean: tuple[float, ...] | float = 0.0
    scale: tuple[float, ...] | float = 255.0
    channel_order: str = "rgb"
    interpolation: str = "bilinear"
    binarize_threshold: float | None = None

    def __post_init__(self) -> None:
        size = self.image_size
        if not (
            isinstance(size, (tuple, list))
            and len(size) == 2
            and all(is_whole(side) and side > 0 for side in size)
        ):
            raise ValueError(
                f"`image_size` must be two positive integers, height and width. "
                f"Received: image_size={size}"
            )
        if not is_whole(self.channels) or self.channels not in (1, 3):
            raise ValueError(f"`channels` must be 1 or 3. Received: channels={self.channels!r}")
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        if self.channels == 1 and self.channel_order != "rgb":
            raise ValueError(
                f"`channel_order` must be rgb where `channels` is 1. "
                f"Received: channel_order={self.channel_order}"
            )
        if not (is_finite(self.crop_fraction) and 0 < self.crop_fraction <= 1):
            raise ValueError(
                f"`crop_fraction` must be a number in (0, 1]. "
                f"Received: crop_fraction={self.crop_fraction}"
            )
        threshold = self.binarize_threshold
        if threshold is not None and not (is_finite(threshold) and 0 <= threshold <= 255):
            raise ValueError(
                f"`binarize_threshold` must be None or a number in [0, 255]. "
                f"Received: binarize_threshold={threshold}"
            )
        mean = _per_channel("mean", self.mean, self.channels)
        scale = _per_channel("scale", self.scale, self.channels)
        if 0.0 in scale:
            raise ValueError(f"`scale` must not be 0. Received: scale={self.scale}")
        # One canonical form, so that equal settings are equal values and equal JSON.
        for name, value in (
            ("image_size", tuple(int(side) for side in size)),
            ("channels", int(self.channels)),
            ("crop_fraction", float(self.crop_fraction)),
            ("mean", mean),
            ("scale", scale),
            ("binarize_threshold", None if threshold is None else float(threshold)),
        ):
            object.__setattr__(self, name, value)

    def decode(self, contents: tf.Tensor | bytes) -> tf.Tensor:
        """Decodes one JPEG, PNG, GIF (its first frame) or WebP image.

        CMYK, palette and 16 bit images become 8 bit RGB, an alpha channel is dropped, grey becomes
        three equal channels. With `channels=1` colours become their luma
        `0.299 R + 0.587 G + 0.114 B` (ITU-R BT.601). The format is told by the bytes, not by a
        file's name. The EXIF orientation is ignored, as TensorFlow does, so an image that viewers
        turn is seen unturned: by training, evaluation and the served model alike.

        Args:
            contents: a scalar string tensor, or bytes.

        Returns:
            The image, `uint8` of shape `(height, width, channels)`.

        Raises:
            ValueError: `contents` is not one string.
            tf.errors.InvalidArgumentError: the bytes are no such image, or are cut off. BMP is
                refused, since TensorFlow decodes those with a palette to wrong colours.
        """
        contents = tf.convert_to_tensor(contents)
        if contents.dtype != tf.string or contents.shape.rank != 0:
            raise ValueError(
                f"`contents` must be one string, the bytes of one image. "
                f"Received: contents of shape {contents.shape} and dtype {contents.dtype.name}"
            )
        refuse_bmp = tf.debugging.Assert(
            tf.logical_not(_starts_with(contents, b"BM")),
            ["BMP images are not supported: convert them to PNG or JPEG."],
        )
        # Eagerly there is no operation to wait for: the check has been done.
        with tf.control_dependencies([] if refuse_bmp is None else [refuse_bmp]):
            image = tf.cond(
                _starts_with(contents, b"\xff\xd8\xff"),
                lambda: tf.io.decode_jpeg(contents, channels=3, dct_method=DCT_METHOD),
                lambda: tf.io.decode_image(contents, channels=3, expand_animations=False),
            )
        image = tf.ensure_shape(image, (None, None, 3))
        return image if self.channels == 3 else _luma(image)

    def __call__(self, image: tf.Tensor) -> tf.Tensor:
        """Resizes, crops and normalizes one image, or a batch of images of one size.

        Args:
            image: `uint8` or floating point in 0..255, RGB or grey, of shape
                `(height, width, channels)` or `(batch, height, width, channels)`.

        Returns:
            `float32` of shape `(*image_size, channels)`, behind the batch if there is one.

        Raises:
            ValueError: rank, channels or dtype of `image` are others.
        """
        return self.normalize(self._resized(self._checked(image)))

    def normalize(self, images: tf.Tensor) -> tf.Tensor:
        """Binarizes, reorders channels, subtracts `mean` and divides by `scale`.

        Args:
            images: as for a call, of any height and width.

        Returns:
            `float32` of the shape of `images`.

        Raises:
            ValueError: rank, channels or dtype of `images` are others.
        """
        images = tf.cast(self._checked(images), tf.float32)
        if self.binarize_threshold is not None:
            images = tf.where(images > self.binarize_threshold, 255.0, 0.0)
        if self.channel_order == "bgr":
            images = tf.reverse(images, axis=[-1])
        return (images - tf.constant(self.mean, tf.float32)) / tf.constant(self.scale, tf.float32)

    def interpolate(self, images: tf.Tensor, size: Sequence[int] | tf.Tensor) -> tf.Tensor:
        """Resizes to `size`, height and width in pixels, by `interpolation`.

        Args:
            images: as for a call.
            size: two integers.

        Returns:
            `float32`, in 0..255 where the interpolation does not overshoot.
        """
        return _INTERPOLATIONS[self.interpolation](tf.cast(images, tf.float32), size)

    def cover(self, images: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
        """Resizes to the smallest size that covers `size`, the aspect ratio kept.

        Args:
            images: as for a call.
            size: height and width in pixels; for a square it is what the shorter side becomes.

        Returns:
            As of `interpolate`.
        """
        return self.interpolate(images, _covering_size(tf.shape(images)[-3:-1], list(size)))

    def to_json(self) -> str:
        """The settings as a JSON object, with the version of its format."""
        return json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Preprocessing:
        """The inverse of `to_json`.

        Raises:
            ValueError: `text` is no JSON object, of another format version, or has other keys.
        """
        try:
            settings = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"`text` must be the JSON of a Preprocessing: {error}") from error
        if not isinstance(settings, dict):
            raise ValueError(f"`text` must be a JSON object. Received: {text[:80]}")
        version = settings.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"`format_version` must be {FORMAT_VERSION}. Received: format_version={version}"
            )
        expected = {field.name for field in dataclasses.fields(cls)}
        for problem, keys in (
            ("unknown", settings.keys() - expected),
            ("missing", expected - settings.keys()),
        ):
            if keys:
                raise ValueError(
                    f"`text` must have exactly the settings of a Preprocessing. "
                    f"Received {problem}: {', '.join(sorted(keys))}"
                )
        return cls(**settings)

    def _checked(self, images: tf.Tensor) -> tf.Tensor:
        images = tf.convert_to_tensor(images)
        if images.shape.rank not in (3, 4) or images.shape[-1] not in (self.channels, None):
            raise ValueError(
                f"`image` must have shape (height, width, {self.channels}), or that behind a "
                f"batch. Received: shape {images.shape}"
            )
        if images.dtype != tf.uint8 and not images.dtype.is_floating:
            raise ValueError(
                f"`image` must be uint8 or floating point, in 0..255. "
                f"Received: dtype {images.dtype.name}"
            )
        return images

    def _resized(self, images: tf.Tensor) -> tf.Tensor:
        interpolate = _INTERPOLATIONS[self.interpolation]
        images = tf.cast(images, tf.float32)
        if self.resize == "central_crop":
            # tf.image.central_crop is off by one in graphs for sizes like 20 * 0.8.
            given = tf.cast(tf.shape(images)[-3:-1], tf.float64)
            edge = tf.cast(given * (1 - self.crop_fraction) / 2 + 1e-6, tf.int32)
            images = _cropped(images, edge, tf.shape(images)[-3:-1] - 2 * edge)
            images = interpolate(images, self.image_size)
        else:
            # The small term keeps a size like 63 / 0.9 from being rounded down to 69.
            size = [math.floor(side / self.crop_fraction + 1e-6) for side in self.image_size]
            if self.resize == "short_side":
                size = _covering_size(tf.shape(images)[-3:-1], size)
            images = interpolate(images, size)
            edge = (tf.shape(images)[-3:-1] - self.image_size) // 2
            images = _cropped(images, edge, self.image_size)
        return tf.ensure_shape(images, (*images.shape[:-3], *self.image_size, self.channels))


def _cropped(images: tf.Tensor, edge: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """`size` (height, width) of `images`, from `edge` (top, left) on."""
    (top, left), (height, width) = tf.unstack(edge), tf.unstack(size)
    return images[..., top : top + height, left : left + width, :]


def _covering_size(given: tf.Tensor, wanted: list[int]) -> tf.Tensor:
    """The smallest size of the aspect ratio `given` that covers `wanted`; int32, rounded down."""
    height, width = tf.unstack(tf.cast(given, tf.int64))
    # In integers, so that no rounding of a ratio can make a side one pixel too short.
    return tf.cast(
        tf.cond(
            wanted[0] * width >= wanted[1] * height,
            lambda: tf.stack([wanted[0], wanted[0] * width // height]),
            lambda: tf.stack([wanted[1] * height // width, wanted[1]]),
        ),
        tf.int32,
    )


def _luma(image: tf.Tensor) -> tf.Tensor:
    """0.299 R + 0.587 G + 0.114 B in 16 bit fixed point, rounded; leaves grey as it is."""
    weighted = tf.cast(image, tf.int32) * tf.constant([19595, 38470, 7471])
    total = tf.reduce_sum(weighted, axis=-1, keepdims=True)
    return tf.cast((total + 2**15) // 2**16, tf.uint8)


def _starts_with(contents: tf.Tensor, magic: bytes) -> tf.Tensor:
    return tf.equal(tf.strings.substr(contents, 0, len(magic)), magic)


def _per_channel(name: str, given: tuple[float, ...] | float, channels: int) -> tuple[float, ...]:
    """`given` as one number a channel."""
    values = tuple(given) if isinstance(given, (tuple, list)) else (given,) * channels
    if len(values) != channels or not all(is_finite(value) for value in values):
        raise ValueError(
            f"`{name}` must be a number or {channels} of them, one a channel. "
            f"Received: {name}={given}"
        )
    return tuple(float(value) for value in values)
