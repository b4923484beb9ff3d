"""The functions that a served network offers, and their SavedModel.

All of them give the same outputs, each with the batch as its first dimension and of a type that
TensorFlow Serving can write as JSON:

- `probabilities`, float32 [N, classes];
- `scores`, float32 [N, k], and `classes`, string [N, k]: the k most probable classes, best first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing

TOP_K = 5

Outputs = dict[str, tf.Tensor]


def build_signatures(
    network: keras.Model, preprocessing: Preprocessing, labels: Sequence[str]
) -> dict[str, tf.types.experimental.ConcreteFunction]:
    """The signatures of `network`, traced.

    - `serving_default`: `images`, float32 [N, height, width, channels], as the network takes
      them, so after the preprocessing;
    - `serving_uint8`: `images`, uint8 [N, any height, any width, channels], as decoded;
    - `serving_bytes`: `image_bytes`, string [N], each one JPEG or PNG file, of any size.

    Args:
        network: one input [N, height, width, channels], one output [N, classes] of probabilities.
        preprocessing: what the second and the third do to an image before the network sees it.
        labels: the name of each class.
    """
    names = tf.constant(list(labels))

    def classify(images: tf.Tensor) -> Outputs:
        probabilities = tf.cast(network(images, training=False), tf.float32)
        scores, best = tf.math.top_k(probabilities, k=min(TOP_K, len(labels)))
        return {
            "probabilities": probabilities,
            "scores": scores,
            "classes": tf.gather(names, best),
        }

    def classify_decoded(images: tf.Tensor) -> Outputs:
        return classify(preprocessing(images))

    def classify_encoded(image_bytes: tf.Tensor) -> Outputs:
        shape = (*preprocessing.image_size, preprocessing.channels)
        images = tf.map_fn(
            lambda contents: preprocessing(preprocessing.decode(contents)),
            image_bytes,
            fn_output_signature=tf.TensorSpec(shape, tf.float32),
        )
        return classify(images)

    channels = preprocessing.channels
    signatures: Mapping[str, tuple[Callable[[tf.Tensor], Outputs], tf.TensorSpec]] = {
        "serving_default": (
            classify,
            tf.TensorSpec((None, *network.input_shape[1:]), tf.float32, "images"),
        ),
        "serving_uint8": (
            classify_decoded,
            tf.TensorSpec((None, None, None, channels), tf.uint8, "images"),
        ),
        "serving_bytes": (classify_encoded, tf.TensorSpec((None,), tf.string, "image_bytes")),
    }
    return {
        name: tf.function(function, input_signature=[spec]).get_concrete_function()
        for name, (function, spec) in signatures.items()
    }


def save_signatures(
    signatures: Mapping[str, tf.types.experimental.ConcreteFunction],
    assets: Iterable[Path],
    folder: Path,
) -> None:
    """Writes a SavedModel with `signatures` and the files `assets` into `folder`.

    It keeps the variables that the signatures read, each once, and nothing else: no optimizer, no
    seeds, none of Keras' own bookkeeping, which stores every variable a second time.
    """
    root = tf.Module()
    read = {
        id(variable): variable
        for function in signatures.values()
        for variable in function.graph.variables
    }
    root.parameters_read = list(read.values())
    root.assets = [tf.saved_model.Asset(str(path)) for path in assets]
    tf.saved_model.save(root, str(folder), signatures=dict(signatures))
