"""BN-Inception (Ioffe & Szegedy 2015) and the Inception network without BN that it started from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from bnzoo.checks import check_bool, check_choice, check_number, check_whole

from .arguments import (
    build_model,
    check_data_format,
    check_weights,
    classifier,
    global_pool,
    image_input,
)
from .auxiliary import AUXILIARY_HEADS, auxiliary_head
from .blocks import InceptionBlocks
from .inception_table import CONTESTED_MODULES, POOLS, POOLS_OF_PADDING, TABLES, InceptionTable

STEMS = ("separable", "conv", "small")
# The stems divide the size of the input by 8 and, for small images, by 2; 3c and 4e by 4 more.
_MINIMAL_SIZE = {"separable": 32, "conv": 32, "small": 8}
# Section 4.2.3 has per-activation BN "in the last hidden layers": here, the last module.
_PER_ACTIVATION_MODULE = "5b"


def bn_inception(
    include_top: bool = True,
    weights: str | None = None,
    input_tensor: Any = None,
    input_shape: Sequence[int | None] | None = None,
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: Any = "softmax",
    name: str = "bn_inception",
    *,
    activation: str = "relu",
    dropout: float = 0.0,
    stem: str = "separable",
    padding: str = "same",
    pools: str | None = None,
    pool_projection: int = 96,
    table: str = "paper",
    width_multiplier: float = 1.0,
    batch_norm: str | None = "channel",
    stem_batch_norm: bool = True,
    batch_norm_scale: bool = True,
    epsilon: float = 1e-3,
    momentum: float | None = 0.99,
    synchronized: bool = False,
    conv_bias: bool = False,
    local_response_normalization: bool = False,
    weight_scale: float = 1.0,
    auxiliary: str | None = None,
    data_format: str | None = None,
) -> keras.Model:
    """BN-Inception, the network of Ioffe & Szegedy 2015, Section 4.2 and appendix (Figure 5).

    Every convolution is followed by batch normalization and the nonlinearity, z = g(BN(Wu)). The
    first arguments are those of `keras.applications`; the keyword-only ones are what the paper
    varies, or what the published weights disagree about. Layers have the paper's names, such as
    `inception_3a_double_3x3_1`, with `_bn` and `_relu` for what follows a convolution; the output
    of a module is the layer `inception_3a`.

    Args:
        include_top: whether to end with global average pooling and the classifier `predictions`.
        weights: None for random weights; the path of a Keras file (.weights.h5 or .keras) of
            this network; or "slim", which downloads TF-slim's into Keras' cache, for a network of
            the form `FORMS["slim"].build(weights="slim")`.
        input_tensor: a Keras tensor to start from instead of a new input.
        input_shape: (height, width, channels) in pixels, or (channels, height, width) for
            channels_first. At least 32x32, or 8x8 with the small stem; any number of channels;
            height and width may be None, except for per-activation BN. Default: (224, 224, 3), and
            (None, None, 3) without the top.
        pooling: without the top: None for the last map, [N, 7, 7, 1024] at 224x224; "avg" or "max"
            for its mean or maximum over positions, [N, 1024].
        classes: number of classes.
        classifier_activation: activation of the top; None gives logits.
        name: name of the model.
        activation: "relu"; "sigmoid" (BN-x5-Sigmoid); or "prelu", one slope per channel (He et al.
            2015).
        dropout: probability that a pooled feature is dropped ahead of the classifier. The paper
            removes it (Section 4.2.1) and has 0.05 or 0.1 in some networks of its ensemble.
        stem: first convolution; "separable", 7x7 of stride 2 with depth multiplier 8 (the paper's),
            "conv", a plain 7x7 of stride 2, or "small", for images of about 32x32: a plain 3x3 of
            stride 2 and no max pool before 3a.
        padding: zeros around the convolutions of stride 2: "same" as TensorFlow pads, or
            "symmetric" as Caffe, PyTorch and MXNet do.
        pools: padding of the pools, "tensorflow", "caffe" (PyTorch's too), "onnx" or "mxnet". None
            is "tensorflow" for same and "caffe" for symmetric padding.
        pool_projection: channels of the pool projections of 4c and 4d. The paper prints 128 in the
            column, and output sizes of 4c, 4d and 4e that need 96.
        table: "paper", or "imagenet_21k" for the wider network of MXNet's 21,841 classes.
        width_multiplier: factor of all channel counts but `classes`.
        batch_norm: "channel" normalises each feature map (Section 3.2); "activation" each
            activation in the convolutions of the last module, 5b, each feature map elsewhere
            (Section 4.2.3); None builds the network without BN, with biases.
        stem_batch_norm: whether BN follows the first convolution; else that has a bias.
        batch_norm_scale: whether BN has a gamma.
        epsilon: of BN, added to the variance.
        momentum: of BN, the weight of the old moving statistics; None averages all batches.
        synchronized: whether BN takes its statistics over all replicas of a tf.distribute strategy.
        conv_bias: whether convolutions have a bias also where BN takes it away.
        local_response_normalization: whether GoogLeNet's two normalisations across channels are in
            the stem, as in the paper's BN-Baseline.
        weight_scale: factor of the standard deviation of the initial weights of the convolutions,
            which are He et al.'s; more than 1 in some networks of the ensemble (Section 4.2.3).
        auxiliary: None, or the form of two more classifiers for training, on the outputs of 4a and
            4d ("googlenet") or 3c and 4e ("caffe", "tensorpack"). The output is then a dict of
            "predictions", "auxiliary_1" and "auxiliary_2"; `without_auxiliary` takes them off, and
            `auxiliary_loss_weights` has the weights of their losses.
        data_format: "channels_last" or "channels_first" (on CPU, TensorFlow runs only the first);
            None is Keras' setting.

    Returns:
        A functional `keras.Model` from images [N, height, width, channels] to class probabilities
        [N, classes].

    Raises:
        ValueError: for an argument outside its range; the message has the value and what is
            allowed.

    Example:

    >>> model = bn_inception(
    ...     input_shape=(32, 32, 3), classes=10, stem="small", width_multiplier=0.25
    ... )
    >>> model.get_layer("inception_5b").output.shape
    (None, 4, 4, 256)
    """
    check_choice("stem", stem, STEMS)
    check_choice("activation", activation, ("relu", "sigmoid", "prelu"))
    check_choice("padding", padding, tuple(POOLS_OF_PADDING))
    check_choice("pools", pools, (None, *POOLS))
    check_choice("pool_projection", pool_projection, (96, 128))
    check_choice("table", table, tuple(TABLES))
    check_choice("batch_norm", batch_norm, ("channel", "activation", None))
    check_choice("auxiliary", auxiliary, (None, *AUXILIARY_HEADS))
    check_choice("pooling", pooling, (None, "avg", "max"))
    check_bool("stem_batch_norm", stem_batch_norm)
    check_bool("batch_norm_scale", batch_norm_scale)
    check_bool("synchronized", synchronized)
    check_bool("conv_bias", conv_bias)
    check_bool("local_response_normalization", local_response_normalization)
    check_number("dropout", dropout, 0, 1)
    check_number("width_multiplier", width_multiplier, 0, open_ends=True)
    check_number("weight_scale", weight_scale, 0, open_ends=True)
    check_whole("classes", classes)
    if auxiliary is not None and not include_top:
        raise ValueError(
            "`auxiliary` heads need the classifier at the top. "
            f"Received: auxiliary={auxiliary!r} with include_top=False"
        )
    check_weights(weights)
    data_format = check_data_format(data_format)

    blocks = InceptionBlocks(
        activation=activation,
        batch_norm=None
        if batch_norm is None
        else {
            "scale": batch_norm_scale,
            "epsilon": epsilon,
            "momentum": momentum,
            "synchronized": synchronized,
        },
        conv_bias=conv_bias,
        padding=padding,
        pools=POOLS[pools or POOLS_OF_PADDING[padding]],
        width_multiplier=width_multiplier,
        weight_scale=weight_scale,
        data_format=data_format,
    )
    widths = _with_projection(TABLES[table], pool_projection)
    image = image_input(
        input_tensor, input_shape, 224 if include_top else None, _MINIMAL_SIZE[stem], data_format
    )
    if batch_norm == "activation" and None in image.shape[1:]:
        raise ValueError(
            "`input_shape` must have a known height and width for per-activation BN. "
            f"Received: input_shape={tuple(image.shape[1:])}"
        )
    x = _stem(blocks, image, stem, widths, stem_batch_norm, local_response_normalization)
    maps = {}
    for row in widths.modules:
        per_activation = batch_norm == "activation" and row.name == _PER_ACTIVATION_MODULE
        x = maps[row.name] = blocks.module(x, row, per_activation=per_activation)

    if include_top:
        x = global_pool(x, "avg", data_format)
        if dropout:
            x = keras.layers.Dropout(dropout, name="dropout")(x)
        x = classifier(x, classes, classifier_activation)
    elif pooling is not None:
        x = global_pool(x, pooling, data_format)
    if auxiliary is not None:
        heads = AUXILIARY_HEADS[auxiliary]
        x = {"predictions": x}
        for number, module in enumerate(heads.modules, start=1):
            x[f"auxiliary_{number}"] = auxiliary_head(
                blocks, maps[module], number, heads, classes, classifier_activation
            )
    return build_model(input_tensor, image, x, name, weights)


def inception(
    include_top: bool = True,
    weights: str | None = None,
    input_tensor: Any = None,
    input_shape: Sequence[int | None] | None = None,
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: Any = "softmax",
    name: str = "inception",
    *,
    dropout: float = 0.4,
    local_response_normalization: bool = True,
    activation: str = "relu",
    stem: str = "separable",
    padding: str = "same",
    pools: str | None = None,
    pool_projection: int = 96,
    table: str = "paper",
    width_multiplier: float = 1.0,
    weight_scale: float = 1.0,
    auxiliary: str | None = None,
    data_format: str | None = None,
) -> keras.Model:
    """The Inception network without BN that Ioffe & Szegedy 2015 compare with (Section 4.2.2).

    The table of `bn_inception`, with what BN made needless: biases, local response normalization
    after the first pool and after the 3x3 convolution of the stem, and dropout ahead of the
    classifier (Szegedy et al. 2014).

    Args:
        include_top: as of `bn_inception`, as are all arguments up to `name`.
        weights: as above.
        input_tensor: as above.
        input_shape: as above.
        pooling: as above.
        classes: as above.
        classifier_activation: as above.
        name: name of the model.
        dropout: probability that a pooled feature is dropped; 0.4 in Szegedy et al. 2014.
        local_response_normalization: whether the two normalisations are there.
        activation: as of `bn_inception`, as are the remaining ones.
        stem: as above.
        padding: as above.
        pools: as above.
        pool_projection: as above.
        table: as above.
        width_multiplier: as above.
        weight_scale: as above.
        auxiliary: as above.
        data_format: as above.

    Returns:
        A functional `keras.Model` from images to class probabilities [N, classes].

    Raises:
        ValueError: for an argument outside its range.

    Example:

    >>> model = inception(input_shape=(32, 32, 3), classes=10, stem="small", width_multiplier=0.25)
    >>> [layer.name for layer in model.layers if "norm" in layer.name]
    ['pool1_norm1', 'conv2_norm2']
    """
    return bn_inception(
        include_top,
        weights,
        input_tensor,
        input_shape,
        pooling,
        classes,
        classifier_activation,
        name,
        dropout=dropout,
        local_response_normalization=local_response_normalization,
        batch_norm=None,
        activation=activation,
        stem=stem,
        padding=padding,
        pools=pools,
        pool_projection=pool_projection,
        table=table,
        width_multiplier=width_multiplier,
        weight_scale=weight_scale,
        auxiliary=auxiliary,
        data_format=data_format,
    )


def _with_projection(table: InceptionTable, projection: int) -> InceptionTable:
    """The table with the pool projection of the contested modules decided."""
    modules = tuple(
        row._replace(projection=projection) if row.name in CONTESTED_MODULES else row
        for row in table.modules
    )
    return table._replace(modules=modules)


def _stem(
    blocks: InceptionBlocks,
    x: Any,
    stem: str,
    widths: InceptionTable,
    normalize_first: bool,
    local_response_norm: bool,
) -> Any:
    """All that comes before 3a; sizes are for an image of 224x224, or 32x32 for small images."""
    if stem == "small":
        x = blocks.conv(x, "conv1_3x3_s2", widths.conv1, 3, 2, normalize=normalize_first)  # 16x16
    else:
        x = blocks.conv(
            x,
            "conv1_7x7_s2",
            widths.conv1,
            7,
            2,
            normalize=normalize_first,
            depth_multiplier=8 if stem == "separable" else None,
        )  # 112x112
        x = blocks.max_pool(x, "pool1_3x3_s2", blocks.pools.stem)  # 56x56
    if local_response_norm:
        x = blocks.local_response_norm(x, "pool1_norm1")
    x = blocks.conv(x, "conv2_3x3_reduce", widths.conv2_reduce, 1)
    x = blocks.conv(x, "conv2_3x3", widths.conv2, 3)  # 56x56, or 16x16
    if local_response_norm:
        x = blocks.local_response_norm(x, "conv2_norm2")
    if stem != "small":
        x = blocks.max_pool(x, "pool2_3x3_s2", blocks.pools.stem)  # 28x28
    return x
