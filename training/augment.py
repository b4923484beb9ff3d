"""Random changes of training images, each a function of the image and a seed alone."""

from __future__ import annotations

import math

import tensorflow as tf

from bnzoo.preprocessing import Preprocessing

# Szegedy et al. 2014, Section 6: crops of 8% to 100% of the area, of aspect ratio 3/4 to 4/3.
CROP_AREA = (0.08, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)
# A crop that sticks out of the image is drawn again, this often; then the whole image serves.
CROP_ATTEMPTS = 10
# Small images are shifted by up to an eighth of their side: 4 pixels of CIFAR's 32.
SHIFT_FRACTION = 1 / 8
# ITU-R BT.601's luma, the grey that contrast and colour are changed against.
LUMA = (0.299, 0.587, 0.114)


def augment(
    image: tf.Tensor,
    seed: tf.Tensor,
    preprocessing: Preprocessing,
    kind: str,
    photometric: float,
) -> tf.Tensor:
    """One training image as the network sees it.

    Args:
        image: uint8 [height, width, channels].
        seed: two integers; equal seeds give equal changes.
        preprocessing: what is done to images that are not augmented. Its size and its scaling
            hold here too; its resizing is replaced by the random crop where there is one.
        kind: "none"; "shift", a random shift and mirroring; "crop", a random part of the image
            and mirroring.
        photometric: strength of `distort_colors`; without effect where `kind` is "none".

    Returns:
        float32 [*preprocessing.image_size, channels].
    """
    if kind == "none":
        return preprocessing(image)
    place, mirror, colors = tf.unstack(tf.random.split(seed, 3))
    image = tf.cast(image, tf.float32)
    if kind == "crop":
        image = random_resized_crop(image, place, preprocessing.image_size)
    else:
        image = random_shift(image, place)
    image = tf.image.stateless_random_flip_left_right(image, mirror)
    if photometric:
        image = distort_colors(image, colors, photometric)
    return preprocessing.normalize(image) if kind == "crop" else preprocessing(image)


def random_resized_crop(image: tf.Tensor, seed: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    """A part of the image, its area and aspect ratio drawn from CROP_AREA and CROP_ASPECT.

    The area is uniform, the aspect ratio uniform in its logarithm, so that upright and lying crops
    are alike. Resized bilinearly to `size`.
    """
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32))
    for_area, for_aspect, for_place = tf.unstack(tf.random.split(seed, 3))
    draws = [CROP_ATTEMPTS]
    area = tf.random.stateless_uniform(draws, for_area, *CROP_AREA) * height * width
    aspect = tf.exp(
        tf.random.stateless_uniform(draws, for_aspect, *(math.log(end) for end in CROP_ASPECT))
    )
    heights = tf.round(tf.sqrt(area / aspect))
    widths = tf.round(tf.sqrt(area * aspect))
    fits = (heights >= 1) & (widths >= 1) & (heights <= height) & (widths <= width)
    first = tf.argmax(tf.cast(fits, tf.int32))
    fitting = tf.reduce_any(fits)
    crop = tf.stack(
        [
            tf.where(fitting, heights[first], height),
            tf.where(fitting, widths[first], width),
        ]
    )
    corner = tf.floor(
        tf.random.stateless_uniform([2], for_place) * (tf.stack([height, width]) - crop + 1)
    )
    top, left = tf.unstack(tf.cast(corner, tf.int32))
    rows, columns = tf.unstack(tf.cast(crop, tf.int32))
    return tf.image.resize(image[top : top + rows, left : left + columns], size)


def random_shift(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """The image moved by up to SHIFT_FRACTION of each side; what comes in is black."""
    size = tf.shape(image)
    margin = tf.cast(tf.round(tf.cast(size[:2], tf.float32) * SHIFT_FRACTION), tf.int32)
    padded = tf.pad(image, [[margin[0], margin[0]], [margin[1], margin[1]], [0, 0]])
    return tf.ensure_shape(tf.image.stateless_random_crop(padded, size, seed), image.shape)


def distort_colors(image: tf.Tensor, seed: tf.Tensor, strength: float) -> tf.Tensor:
    """Brightness, contrast and colour, each times a factor in 1 +- strength, in random order.

    A. Howard 2013 (arXiv:1312.5402), whose factors are in 0.5..1.5; GoogLeNet was trained so.

    Args:
        image: float in 0..255, [height, width, channels].
        seed: two integers.
        strength: in [0, 1).

    Returns:
        float32 in 0..255, of the shape of `image`.
    """
    for_order, for_factors = tf.unstack(tf.random.split(seed, 2))
    order = tf.random.experimental.stateless_shuffle(tf.range(3), seed=for_order)
    factors = tf.random.stateless_uniform([3], for_factors, 1 - strength, 1 + strength)

    def grey(image: tf.Tensor) -> tf.Tensor:
        if image.shape[-1] == 1:
            return image
        return tf.reduce_sum(image * tf.constant(LUMA), axis=-1, keepdims=True)

    for turn in range(3):
        # Each is a blend with an image that has none of it: black, a flat grey, the grey image.
        without = tf.switch_case(
            order[turn],
            [
                lambda image=image: tf.zeros_like(image),
                lambda image=image: tf.zeros_like(image) + tf.reduce_mean(grey(image)),
                lambda image=image: tf.zeros_like(image) + grey(image),
            ],
        )
        image = without + factors[order[turn]] * (image - without)
        image = tf.clip_by_value(image, 0.0, 255.0)
    return image
