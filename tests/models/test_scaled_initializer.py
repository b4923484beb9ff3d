from __future__ import annotations

import keras
import numpy as np

from bnzoo.initializers import HeNormal
from bnzoo.models.scaled_initializer import Scaled


def test_values_and_config():
    scaled = Scaled(HeNormal(seed=3), 2.5)
    plain = HeNormal(seed=3)((3, 3, 4, 5)).numpy()
    np.testing.assert_allclose(scaled((3, 3, 4, 5)), 2.5 * plain, rtol=1e-6)
    copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(scaled))
    np.testing.assert_allclose(copy((3, 3, 4, 5)), 2.5 * plain, rtol=1e-6)
