from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing
from export import command_line, forms, served
from export.crops import CROPS, crop_views, refused_crops

IMAGE = np.random.default_rng(0).integers(0, 256, (10, 16, 3), dtype=np.uint8)


def test_ten_are_corners_centre_and_mirror_images() -> None:
    # 10x16 is its own size here: 8 / 0.8 is 10, so that no pixel is interpolated.
    preprocessing = Preprocessing((8, 8), resize="short_side", crop_fraction=0.8, scale=2.0)
    views = crop_views(tf.constant(IMAGE), preprocessing, 10).numpy()
    places = [(0, 0), (0, 8), (2, 0), (2, 8), (1, 4)]
    expected = [IMAGE[top : top + 8, left : left + 8] / 2 for top, left in places]
    expected += [view[:, ::-1] for view in expected]
    np.testing.assert_array_equal(views, np.stack(expected))
    np.testing.assert_array_equal(views[4], preprocessing(tf.constant(IMAGE)))


@pytest.mark.parametrize("resize", ["direct", "short_side", "central_crop"])
def test_the_fifth_of_ten_is_what_one_crop_is(resize: str) -> None:
    preprocessing = Preprocessing((7, 7), resize=resize, crop_fraction=0.7)
    image = tf.constant(IMAGE)
    views = crop_views(image, preprocessing, 10)
    np.testing.assert_allclose(views[4], preprocessing(image), atol=1e-6)
    assert len({view.numpy().tobytes() for view in views}) == 10


def test_144_are_of_four_sizes_three_squares_six_crops_and_mirrored() -> None:
    preprocessing = Preprocessing((7, 7), crop_fraction=0.875, scale=1.0)
    views = crop_views(tf.constant(IMAGE), preprocessing, 144).numpy()
    assert views.shape == (144, 7, 7, 3)
    np.testing.assert_array_equal(views[72:], views[:72, :, ::-1])
    # The first scale: the shorter side becomes 8; its left square starts at the image's corner.
    resized = tf.image.resize(IMAGE, (8, 12)).numpy()
    np.testing.assert_allclose(views[0], resized[:7, :7], atol=1e-4)
    np.testing.assert_allclose(views[1], resized[:7, 1:8], atol=1e-4)
    whole = tf.image.resize(resized[:, :8], (7, 7))
    np.testing.assert_allclose(views[5], whole, atol=1e-4)
    # The right square of the same scale.
    np.testing.assert_allclose(views[12], resized[:7, 4:11], atol=1e-4)


def test_refuses_crops_that_there_are_not() -> None:
    assert "crop_fraction below 1" in str(refused_crops(10, Preprocessing((8, 8))))
    assert "squares; this one sees 8x9" in str(refused_crops(144, Preprocessing((8, 9))))
    assert refused_crops(144, Preprocessing((8, 8))) is None


def test_the_flags_know_the_same_choices() -> None:
    assert tuple(map(int, command_line.CROPS)) == CROPS
    assert set(served.KINDS) == set(command_line.OUTPUTS)
    assert (forms.FORMS, forms.PRECISIONS) == (command_line.VARIABLES, command_line.PRECISIONS)
