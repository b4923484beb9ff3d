"""Dense evaluation against window-by-window evaluation in NumPy float64."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from bnzoo import models
from tests.models import numpy_prelu_net

SMALL = {"input_shape": (64, 64, 3), "classes": 5, "width_multiplier": 0.0625}


def _images(*shape: int) -> np.ndarray:
    return np.random.default_rng(480).normal(0.2, 1.0, shape).astype("float32")


def _window_by_window(network: str, weights: dict, images: np.ndarray, side: int) -> np.ndarray:
    maps = numpy_prelu_net.features(network, weights, images.astype("float64"))
    _, height, width, _ = maps.shape
    return np.mean(
        [
            numpy_prelu_net.scores(network, weights, maps[:, i : i + side, j : j + side])
            for i in range(height - side + 1)
            for j in range(width - side + 1)
        ],
        axis=0,
    )


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("function", [models.prelu_net_14, models.prelu_net_a])
def test_equals_every_window_in_turn(function, mirror: bool) -> None:
    model = function(**SMALL)
    weights = numpy_prelu_net.randomized(model, seed=8)
    # Maps of 4x4 at 64 pixels; of 6 or 7 x 5 here, so 3 or 4 x 2 windows.
    images = _images(2, 107, 84, 3)
    name = function.__name__
    expected = _window_by_window(name, weights, images, 4)
    if mirror:
        mirrored = _window_by_window(name, weights, images[:, :, ::-1], 4)
        assert np.abs(mirrored - expected).max() > 1e-3
        expected = (expected + mirrored) / 2
    dense = models.dense_evaluation(model, mirror=mirror)
    np.testing.assert_allclose(dense(images), expected, rtol=1e-3, atol=1e-5)


def test_at_the_size_of_training_it_is_the_network() -> None:
    model = models.prelu_net_a(**SMALL)
    numpy_prelu_net.randomized(model, seed=9)
    images = _images(3, 64, 64, 3)
    dense = models.dense_evaluation(model, mirror=False)
    np.testing.assert_allclose(dense(images), model(images), rtol=1e-4)


def test_the_given_model_is_left_alone(tmp_path) -> None:
    model = models.prelu_net_14(**SMALL)
    before = model.get_weights()
    dense = models.dense_evaluation(model)
    numpy_prelu_net.randomized(dense.get_layer("prelu_net_14"), seed=10)
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)
    # A layer that had been called a second time would have no single output any more.
    assert all(layer.output is not None for layer in model.layers)
    dense.save(tmp_path / "dense.keras")
    images = _images(1, 80, 72, 3)
    loaded = keras.models.load_model(tmp_path / "dense.keras")
    np.testing.assert_array_equal(loaded(images), dense(images))


def test_refuses_what_has_no_windows() -> None:
    with pytest.raises(ValueError, match=r"exactly one SpatialPyramid.* prelu_net_a, which has 0"):
        models.dense_evaluation(models.prelu_net_a(include_top=False, width_multiplier=0.0625))
    model = models.prelu_net_a(**{**SMALL, "input_shape": (None, None, 3)})
    with pytest.raises(ValueError, match=r"images of one size.* \(None, None, None, 3\)"):
        models.dense_evaluation(model)
