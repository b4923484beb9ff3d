"""Augmentation against NumPy, and its ranges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing
from training import augment as module
from training.augment import augment, distort_colors, random_resized_crop, random_shift

PREPROCESSING = Preprocessing(image_size=(8, 8), mean=100.0, scale=50.0)


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (20, 30, 3)).astype(np.uint8)


@pytest.mark.parametrize("kind", ["none", "shift", "crop"])
def test_depends_on_image_and_seed_alone(kind: str, image: np.ndarray) -> None:
    seeds = [[1, 2], [1, 2], [1, 3], [2, 2]]
    results = [
        augment(image, tf.constant(seed), PREPROCESSING, kind, 0.5).numpy() for seed in seeds
    ]
    assert all(result.shape == (8, 8, 3) for result in results)
    np.testing.assert_array_equal(results[0], results[1])
    changed = [bool(np.any(result != results[0])) for result in results[2:]]
    assert changed == [kind != "none"] * 2


def test_none_is_the_preprocessing(image: np.ndarray) -> None:
    found = augment(image, tf.constant([1, 2]), PREPROCESSING, "none", 0.5)
    np.testing.assert_array_equal(found, PREPROCESSING(image))


def test_crops_have_the_areas_and_ratios_of_the_paper() -> None:
    # Of an image whose pixels say where they are, the corners of the crop can be read off.
    rows, columns = np.meshgrid(np.arange(140.0), np.arange(140.0), indexing="ij")
    image = tf.constant(np.stack([rows, columns], axis=-1), tf.float32)
    compiled = tf.function(lambda seed: random_resized_crop(image, seed, (50, 50)))
    boxes = []
    for number in range(300):
        crop = compiled(tf.constant([7, number])).numpy()
        # Resizing samples pixel centres: the outermost lie half a sample inside of the edges.
        steps = (crop[-1, -1] - crop[0, 0]) / 49
        assert (crop[0, 0] >= -0.01).all()
        assert (crop[-1, -1] <= 139.01).all()
        boxes.append(steps * 50)
    heights, widths = np.array(boxes).T
    areas, ratios = heights * widths / 140**2, widths / heights
    assert 0.08 * 0.9 < areas.min() < 0.15
    assert areas.max() > 0.8
    # A crop of 3/4 or 4/3 rounded to whole pixels, the smallest with sides of about 30.
    assert 0.75 * 0.93 < ratios.min() < 0.8
    assert 1.25 < ratios.max() < 4 / 3 * 1.07
    assert abs(np.median(np.log(ratios))) < 0.1


def test_crop_is_a_part_of_the_image_resized(image: np.ndarray) -> None:
    # Where no draw fits, as for an image that is a line, the whole image serves.
    line = tf.constant(image[:1].astype(np.float32))
    found = random_resized_crop(line, tf.constant([0, 0]), (4, 4))
    np.testing.assert_allclose(found, tf.image.resize(line, (4, 4)))


def test_shifts_are_those_of_the_padded_image() -> None:
    image = np.random.default_rng(2).uniform(1, 255, (16, 24, 1)).astype(np.float32)
    padded = np.pad(image, [(2, 2), (3, 3), (0, 0)])
    places = {
        padded[top : top + 16, left : left + 24].tobytes(): (top, left)
        for top, left in itertools.product(range(5), range(7))
    }
    compiled = tf.function(lambda seed: random_shift(tf.constant(image), seed))
    seen = {places[compiled(tf.constant([3, number])).numpy().tobytes()] for number in range(400)}
    assert seen == set(places.values())


def test_half_of_the_images_are_mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "random_shift", lambda image, seed: image)
    image = np.random.default_rng(1).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    plain, mirrored = (PREPROCESSING(side).numpy() for side in (image, image[:, ::-1].copy()))
    compiled = tf.function(lambda seed: augment(image, seed, PREPROCESSING, "shift", 0.0))
    found = [compiled(tf.constant([5, number])).numpy() for number in range(200)]
    is_mirrored = [np.allclose(result, mirrored, atol=1e-5) for result in found]
    assert all(
        one or np.allclose(result, plain, atol=1e-5)
        for one, result in zip(is_mirrored, found, strict=True)
    )
    assert 70 < sum(is_mirrored) < 130  # 100 +- 4 standard deviations.


def numpy_distortion(image: np.ndarray, order: tuple[int, ...], factors: np.ndarray) -> np.ndarray:
    """Brightness (0), contrast (1) and colour (2), written from Howard 2013 and BT.601."""
    for kind in order:
        grey = (image @ [0.299, 0.587, 0.114])[..., np.newaxis]
        other = (0.0, grey.mean(), grey)[kind]
        image = np.clip(other + factors[kind] * (image - other), 0, 255)
    return image


def test_colors_are_distorted_in_random_order(image: np.ndarray) -> None:
    compiled = tf.function(
        lambda seed: distort_colors(tf.constant(image.astype(np.float32)), seed, 0.5)
    )
    orders, all_factors = set(), []
    for number in range(60):
        seed = tf.constant([9, number])
        for_order, for_factors = tf.unstack(tf.random.split(seed, 2))
        factors = tf.random.stateless_uniform([3], for_factors, 0.5, 1.5).numpy()
        order = tuple(
            tf.random.experimental.stateless_shuffle(tf.range(3), seed=for_order).numpy().tolist()
        )
        expected = numpy_distortion(image.astype(np.float64), order, factors.astype(np.float64))
        # float32 rounding of values up to 255, over three blends.
        np.testing.assert_allclose(compiled(seed), expected, atol=1e-3)
        orders.add(order)
        all_factors.append(factors)
    assert len(orders) == 6
    assert np.min(all_factors) < 0.55
    assert np.max(all_factors) > 1.45


def test_grey_images_have_no_colour_to_distort() -> None:
    image = np.full((4, 4, 1), 120.0, np.float32)
    found = distort_colors(tf.constant(image), tf.constant([1, 5]), 0.5).numpy()
    assert found.shape == image.shape
    assert len(np.unique(found)) == 1  # A flat image stays flat: only its brightness changes.


@pytest.mark.parametrize("kind", ["shift", "crop"])
def test_distortions_are_off_at_strength_0(kind: str) -> None:
    image = np.full((20, 20, 3), 120, np.uint8)
    found = augment(image, tf.constant([4, 4]), PREPROCESSING, kind, 0.0).numpy()
    inside = found[2:-2, 2:-2]
    np.testing.assert_allclose(inside, (120 - 100) / 50, rtol=1e-5)
    distorted = augment(image, tf.constant([4, 4]), PREPROCESSING, kind, 0.5).numpy()
    assert np.abs(distorted[4, 4] - found[4, 4]).max() > 0.01
