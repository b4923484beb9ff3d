"""The network of Ioffe & Szegedy 2015, Section 4.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from bnzoo.checks import check_bool, check_number, check_whole
from bnzoo.layers.batch_normalization import BatchNormalization

from .arguments import (
    build_model,
    check_weights,
    classifier,
    image_input,
)

_HIDDEN = (100, 100, 100)


def mnist_mlp(
    include_top: bool = True,
    weights: str | None = None,
    input_tensor: Any = None,
    input_shape: Sequence[int] | None = None,
    classes: int = 10,
    classifier_activation: Any = "softmax",
    name: str = "mnist_mlp",
    *,
    batch_norm: bool = True,
    initial_stddev: float = 0.1,
    epsilon: float = 1e-3,
    momentum: float | None = 0.99,
) -> keras.Model:
    """The network of Ioffe & Szegedy 2015, Section 4.1: three layers of 100 sigmoids.

    With BN each hidden layer is z = sigmoid(BN(Wu)), without a bias, which BN would take away
    (Section 3.2); without, z = sigmoid(Wu + b). The paper's input is binary, 28x28.

    Args:
        include_top: whether to end with the linear layer and softmax, `predictions`.
        weights: None for random weights, or the path of a Keras file (.weights.h5 or .keras) of
            this network.
        input_tensor: a Keras tensor to start from instead of a new input.
        input_shape: shape of one image, without the batch. Default: (28, 28, 1).
        classes: number of classes.
        classifier_activation: activation of the top; None gives logits.
        name: name of the model.
        batch_norm: whether each hidden layer is normalised.
        initial_stddev: standard deviation of the Gaussian that the weights of the hidden layers
            start from. "Small" is all that the paper says.
        epsilon: of BN, added to the variance.
        momentum: of BN, the weight of the old moving statistics; None averages all batches.

    Returns:
        A functional `keras.Model` from images [N, 28, 28, 1] to class probabilities [N, classes],
        or, without the top, to the last hidden layer [N, 100].

    Raises:
        ValueError: for an argument outside its range.

    Example:

    >>> mnist_mlp().count_params() - mnist_mlp(batch_norm=False).count_params()
    900
    """
    check_whole("classes", classes)
    check_weights(weights)
    check_bool("batch_norm", batch_norm)
    check_number("initial_stddev", initial_stddev, 0, open_ends=True)
    gaussian = keras.initializers.RandomNormal
    if input_tensor is None and input_shape is None:
        input_shape = (28, 28, 1)
    image = image_input(input_tensor, input_shape, None, 1, "channels_last")
    if None in image.shape[1:]:
        raise ValueError(
            "`input_shape` must be known in full for fully connected layers. "
            f"Received: input_shape={tuple(image.shape[1:])}"
        )
    x = keras.layers.Flatten(name="flatten")(image)  # 784
    for number, units in enumerate(_HIDDEN, start=1):
        x = keras.layers.Dense(
            units,
            use_bias=not batch_norm,
            kernel_initializer=gaussian(stddev=initial_stddev),
            name=f"fc{number}",
        )(x)
        if batch_norm:
            x = BatchNormalization(epsilon=epsilon, momentum=momentum, name=f"fc{number}_bn")(x)
        x = keras.layers.Activation("sigmoid", name=f"fc{number}_sigmoid")(x)
    if include_top:
        x = classifier(x, classes, classifier_activation)
    return build_model(input_tensor, image, x, name, weights)
