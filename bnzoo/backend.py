"""Keras, on the backend that bnzoo is made for."""

from __future__ import annotations

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "bnzoo needs Keras' TensorFlow backend: set KERAS_BACKEND=tensorflow before Keras is "
        f"imported. Received: {keras.backend.backend()}"
    )
