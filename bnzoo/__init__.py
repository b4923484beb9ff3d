"""Batch Normalization and rectifier networks for Keras 3 on TensorFlow, exact to the papers."""

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "bnzoo needs Keras' TensorFlow backend: set KERAS_BACKEND=tensorflow before Keras is "
        f"imported. Received: {keras.backend.backend()}"
    )

from . import initializers, layers, models, population, preprocessing, pretrained, surgery

__all__ = [
    "initializers",
    "layers",
    "models",
    "population",
    "preprocessing",
    "pretrained",
    "surgery",
]
__version__ = "0.1.0"
