"""Several crops of one image, whose probabilities are averaged.

- 10: the four corners and the centre of the resized image, and their mirror images (Krizhevsky et
  al. 2012, Section 4.1).
- 144: of the image resized so that its shorter side is 256, 288, 320 and 352 pixels where the
  network sees 224, the left, central and right square (of an upright image the upper, central
  and lower); of each, four corners, the centre and the square itself, resized; and their mirror
  images: 4 * 3 * 6 * 2 (Szegedy et al. 2014, Section 7).
"""

from __future__ import annotations

import math

import tensorflow as tf

from bnzoo.preprocessing import Preprocessing

CROPS = (1, 10, 144)
# Shorter sides of the resized image, in units of what the network sees.
_SCALES = (256 / 224, 288 / 224, 320 / 224, 352 / 224)


def refused_crops(crops: int, preprocessing: Preprocessing) -> str | None:
    """Why there are no such crops with this preprocessing; None if there are."""
    height, width = preprocessing.image_size
    if crops == 10 and preprocessing.crop_fraction == 1.0:
        return "10 crops need a crop_fraction below 1 in preprocessing.json, which leaves room"
    if crops == 144 and height != width:
        return f"144 crops need a network for squares; this one sees {height}x{width} pixels"
    return None


def crop_views(image: tf.Tensor, preprocessing: Preprocessing, crops: int) -> tf.Tensor:
    """The crops of one image, as the network takes them.

    Args:
        image: uint8 [height, width, channels].
        preprocessing: tells size, interpolation and normalization; for 10 crops also how the
            image is resized before its centre would be taken.
        crops: one of `CROPS`. 1 is what `preprocessing` itself gives.

    Returns:
        float32 [crops, *image_size, channels].
    """
    if crops == 1:
        return preprocessing(image)[tf.newaxis]
    views = _ten(image, preprocessing) if crops == 10 else _many(image, preprocessing)
    views = tf.stack(views)
    return preprocessing.normalize(tf.concat([views, tf.reverse(views, axis=[2])], axis=0))


def _ten(image: tf.Tensor, preprocessing: Preprocessing) -> list[tf.Tensor]:
    size, fraction = preprocessing.image_size, preprocessing.crop_fraction
    given = tf.shape(image)[:2]
    if preprocessing.resize == "central_crop":
        window = given - 2 * tf.cast(
            tf.cast(given, tf.float64) * (1 - fraction) / 2 + 1e-6, tf.int32
        )
        return [
            preprocessing.interpolate(crop, size) for crop in _corners_and_centre(image, window)
        ]
    covering = [math.floor(side / fraction + 1e-6) for side in size]
    if preprocessing.resize == "short_side":
        resized = preprocessing.cover(image, covering)
    else:
        resized = preprocessing.interpolate(image, covering)
    return _corners_and_centre(resized, tf.constant(size))


def _many(image: tf.Tensor, preprocessing: Preprocessing) -> list[tf.Tensor]:
    side = preprocessing.image_size[0]
    views: list[tf.Tensor] = []
    for scale in _SCALES:
        shorter = round(side * scale)
        resized = preprocessing.cover(image, [shorter, shorter])
        room = tf.shape(resized)[:2] - shorter
        for third in (0, 1, 2):
            top, left = tf.unstack(room * third // 2)
            square = resized[top : top + shorter, left : left + shorter]
            views += _corners_and_centre(square, tf.constant([side, side]))
            views.append(preprocessing.interpolate(square, (side, side)))
    return [tf.ensure_shape(view, (side, side, preprocessing.channels)) for view in views]


def _corners_and_centre(image: tf.Tensor, size: tf.Tensor) -> list[tf.Tensor]:
    (height, width), room = tf.unstack(size), tf.shape(image)[:2] - size
    places = [room * corner for corner in ([0, 0], [0, 1], [1, 0], [1, 1])] + [room // 2]
    return [
        image[top : top + height, left : left + width]
        for top, left in (tf.unstack(place) for place in places)
    ]
