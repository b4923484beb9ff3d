"""What building a model again must leave alone; what it makes is tested in test_graph.py."""

from __future__ import annotations

import random
from collections.abc import Callable

import keras
import numpy as np
import pytest

from bnzoo.surgery import convert_batch_norm, fold_batch_norm


@pytest.mark.parametrize("change", [convert_batch_norm, fold_batch_norm])
def test_a_seeded_program_draws_what_it_would_have_drawn(change: Callable) -> None:
    def draw(between: Callable[[keras.Model], object]) -> tuple[float, np.ndarray]:
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.add(keras.layers.Dropout(0.5))
        model.add(keras.layers.BatchNormalization())
        between(model)
        return random.random(), keras.layers.Dense(3, name="next")(np.ones((1, 2))).numpy()

    number, values = draw(change)
    expected_number, expected_values = draw(lambda model: None)
    assert number == expected_number
    np.testing.assert_array_equal(values, expected_values)
