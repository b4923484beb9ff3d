"""Small run directories, as training leaves them."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import bnzoo
from bnzoo.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(image_size=(12, 10), channels=3, mean=(120, 110, 100), scale=60)
LABELS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")


def small_network(classes: int = len(LABELS)) -> keras.Model:
    """Two convolutions with BN and a classifier, with statistics as after training."""
    image = keras.Input((12, 10, 3), name="image")
    x = image
    for number, channels in enumerate((6, 8)):
        x = keras.layers.Conv2D(channels, 3, use_bias=False, name=f"conv_{number}")(x)
        x = bnzoo.layers.BatchNormalization(name=f"bn_{number}")(x)
        x = keras.layers.ReLU(name=f"relu_{number}")(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    x = keras.layers.Dropout(0.4, name="dropout")(x)
    x = keras.layers.Dense(classes, activation="softmax", name="predictions")(x)
    network = keras.Model(image, x, name="small")
    random = np.random.default_rng(7)
    for layer in network.layers:
        if isinstance(layer, bnzoo.layers.BatchNormalization):
            count = layer.gamma.shape[0]
            layer.gamma.assign(random.uniform(0.5, 2.0, count))
            layer.beta.assign(random.normal(size=count))
            layer.moving_mean.assign(random.normal(size=count))
            layer.moving_variance.assign(random.uniform(0.2, 3.0, count))
    return network


def encoded_image(seed: int, height: int = 20, width: int = 16, channels: int = 3) -> bytes:
    """A PNG of seeded blobs; neighbouring pixels are alike, as in a photograph."""
    coarse = np.random.default_rng(seed).uniform(0, 255, (4, 4, channels)).astype(np.float32)
    image = tf.cast(tf.image.resize(coarse, (height, width)), tf.uint8)
    return tf.io.encode_png(image).numpy()


def write_run(folder: Path, network: keras.Model | None = None, examples: int = 3) -> Path:
    """A finished run in `folder`."""
    folder.mkdir(parents=True)
    (network or small_network()).save(folder / "model.keras")
    (folder / "preprocessing.json").write_text(PREPROCESSING.to_json())
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    (folder / "config.json").write_text('{"seed": 1}\n')
    if examples:
        (folder / "examples").mkdir()
    for number in range(examples):
        (folder / "examples" / f"{number:02d}-0.png").write_bytes(
            encoded_image(number, 20 + number)
        )
    return folder
