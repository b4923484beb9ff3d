"""Evaluation of every window of a larger image, the convolutions running once."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from bnzoo.layers.spatial_pyramid_pooling import (
    SlidingSpatialPyramidPooling,
    SpatialPyramidPooling,
)


@keras.saving.register_keras_serializable(package="bnzoo")
class MeanOverWindows(keras.layers.Layer):
    """Mean of the scores of each image's windows.

    Called with [scores, images]: scores [N W, classes], W rows for each of the N images in turn, as
    `bnzoo.layers.SlidingSpatialPyramidPooling` orders them; images [N, ...], which tell N only.
    Returns [N, classes].

    Example:

    >>> import numpy as np
    >>> scores = np.array([[1.0], [3.0], [5.0], [6.0]])
    >>> MeanOverWindows()([scores, np.zeros((2, 1))]).numpy().tolist()
    [[2.0], [5.5]]
    """

    def call(self, inputs: list[tf.Tensor]) -> tf.Tensor:
        scores, images = inputs
        by_image = tf.reshape(scores, [tf.shape(images)[0], -1, scores.shape[1]])
        return tf.reduce_mean(by_image, axis=1)

    def compute_output_shape(
        self, input_shape: list[tuple[int | None, ...]]
    ) -> tuple[int | None, ...]:
        scores, images = input_shape
        return (images[0], scores[1])


def dense_evaluation(model: keras.Model, mirror: bool = True) -> keras.Model:
    """The network that scores every window of a larger image (He et al. 2015, "Testing").

    The convolutions run once over the whole image. Every window of the last map that has the size
    of the map in training, 14x14 for models A, B and C at 224 pixels, goes through the pyramid and
    the fully connected layers; the scores of all windows, and of those of the mirrored image, are
    averaged. The paper averages over several sizes of the same image as well: call the model on
    each and average its outputs.

    This is not the scores of crops of the image: near its border, a crop's convolutions see zeros
    where these see the image go on.

    Args:
        model: a network with one `bnzoo.layers.SpatialPyramidPooling`, such as
            `bnzoo.models.prelu_net_a` makes, built for images of the size of training. It is left
            as it is.
        mirror: whether the mirrored image counts too, as in the paper.

    Returns:
        A `keras.Model` with weights of its own from images [N, height, width, channels] of any
        size, at least that of training, to [N, classes]: the mean of what `model` gives for each
        window, so of probabilities where its top is a softmax.

    Raises:
        ValueError: for a model without exactly one pyramid, or built for no one size of image.

    Example:

    >>> import bnzoo, numpy as np
    >>> model = bnzoo.models.prelu_net_a(
    ...     input_shape=(64, 64, 3), classes=10, width_multiplier=0.0625
    ... )
    >>> dense_evaluation(model)(np.zeros((1, 96, 80, 3))).shape.as_list()
    [1, 10]
    """
    pyramids = [layer for layer in model.layers if isinstance(layer, SpatialPyramidPooling)]
    if len(pyramids) != 1:
        raise ValueError(
            "`model` must have exactly one SpatialPyramidPooling layer. "
            f"Received: {model.name}, which has {len(pyramids)}"
        )
    pyramid = pyramids[0]
    last = pyramid.data_format == "channels_last"
    window = pyramid.input.shape[1:3] if last else pyramid.input.shape[2:4]
    if None in window:
        raise ValueError(
            "`model` must be built for images of one size, which says how large a window is. "
            f"Received: {model.name}, built for {tuple(model.input.shape)}"
        )

    def sliding(layer: keras.Layer) -> keras.Layer:
        if layer is not pyramid:
            return layer.__class__.from_config(layer.get_config())
        return SlidingSpatialPyramidPooling(
            window, layer.bins, layer.data_format, name=layer.name, dtype=layer.dtype_policy
        )

    channels = model.input.shape[-1 if last else 1]
    shape = (None, None, channels) if last else (channels, None, None)
    windows = keras.models.clone_model(
        model, input_tensors=keras.Input(shape, name="image"), clone_function=sliding
    )
    windows.set_weights(model.get_weights())

    image = keras.Input(shape, name="image")
    views: list[Any] = [image]
    if mirror:
        views.append(keras.ops.flip(image, axis=2 if last else 3))
    scores = [MeanOverWindows(name=f"view_{i}")([windows(v), v]) for i, v in enumerate(views)]
    outputs = keras.layers.Average(name="mean")(scores) if mirror else scores[0]
    return keras.Model(image, outputs, name=f"{model.name}_dense")
