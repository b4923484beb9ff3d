"""How large an image of a request may be, so that a small file cannot take all memory.

There are two ways to be too large. An image may have too many pixels. And where it is resized with
its aspect ratio kept, until it covers what the network sees, a strip of a few pixels becomes one of
millions: 1x40000 pixels, a PNG of a hundred bytes, would be 256x10,240,000.
"""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from bnzoo.preprocessing import Preprocessing

# Of an image that becomes as large as this times what it is to cover; for a square that is how many
# times its short side the long one may be.
LONGEST = 100


@dataclasses.dataclass(frozen=True)
class Limit:
    """What an image must keep to.

    Attributes:
        max_pixels: the most that it may have.
        covered: height and width that are covered with its aspect ratio kept; None where the size
            after resizing does not depend on the image.
    """

    max_pixels: int
    covered: tuple[int, int] | None = None

    @classmethod
    def of(cls, preprocessing: Preprocessing, max_megapixels: float, crops: int = 1) -> Limit:
        """That of `max_megapixels` millions of pixels, if so many `crops` of it are seen."""
        # Of 144 crops all are from images whose aspect ratio is kept: see `crops`.
        keeps = preprocessing.resize == "short_side" if crops < 144 else True
        fraction = preprocessing.crop_fraction
        height, width = (math.floor(side / fraction + 1e-6) for side in preprocessing.image_size)
        return cls(int(max_megapixels * 1e6), (height, width) if keeps else None)

    def allows(self, size: tf.Tensor) -> tf.Tensor:
        """Whether an image of `size`, int64 height and width, is small enough; of many sizes
        [N, 2], for each."""
        few = tf.reduce_prod(size, axis=-1) <= self.max_pixels
        return few & tf.logical_not(self.too_long(size))

    def too_long(self, size: tf.Tensor) -> tf.Tensor:
        """Whether an image of `size`, as of `allows`, is too long to be resized."""
        if self.covered is None:
            return tf.zeros(tf.shape(size)[:-1], tf.bool)
        # Height and width in units of what is covered, times the same number: in integers.
        sides = size * tf.constant(self.covered[::-1], tf.int64)
        return tf.reduce_max(sides, axis=-1) > LONGEST * tf.reduce_min(sides, axis=-1)

    def checked(self, images: tf.Tensor) -> tf.Tensor:
        """(In a tf.function.) Decoded `images` [N, height, width, channels] as they are.

        Raises:
            tf.errors.InvalidArgumentError: (when it runs) they are too long to be resized.
        """
        if self.covered is None:
            return images
        size = tf.shape(images, tf.int64)[1:3]
        fits = tf.debugging.Assert(
            tf.logical_not(self.too_long(size)),
            [f"images holds images {self.narrow()}: of height and width", size],
        )
        with tf.control_dependencies([fits]):
            return tf.identity(images)

    def __str__(self) -> str:
        """What is not allowed, in words."""
        pixels = (
            f"of more than {self.max_pixels} pixels, the limit that bnzoo-export "
            "--max_megapixels set"
        )
        return pixels if self.covered is None else f"{pixels}, or {self.narrow()}"

    def narrow(self) -> str:
        """What is too long, in words."""
        height, width = self.covered or (0, 0)
        return (
            f"so narrow that they would be resized to more than {LONGEST} times the "
            f"{height}x{width} pixels to be covered"
        )
