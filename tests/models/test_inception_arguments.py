"""bn_inception: arguments that cannot be, each with the line that says so."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from bnzoo.models import bn_inception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"stem": "deep"},
            "`stem` must be one of 'separable', 'conv', 'small'. Received: stem='deep'",
        ),
        (
            {"activation": "tanh"},
            "`activation` must be one of 'relu', 'sigmoid', 'prelu'. Received: activation='tanh'",
        ),
        (
            {"padding": "valid"},
            "`padding` must be one of 'same', 'symmetric'. Received: padding='valid'",
        ),
        (
            {"pools": "torch"},
            "`pools` must be one of None, 'tensorflow', 'caffe', 'onnx', 'mxnet'. "
            "Received: pools='torch'",
        ),
        (
            {"pool_projection": 64},
            "`pool_projection` must be one of 96, 128. Received: pool_projection=64",
        ),
        (
            {"table": "v3"},
            "`table` must be one of 'paper', 'imagenet_21k'. Received: table='v3'",
        ),
        (
            {"batch_norm": True},
            "`batch_norm` must be one of 'channel', 'activation', None. Received: batch_norm=True",
        ),
        (
            {"auxiliary": "vgg"},
            "`auxiliary` must be one of None, 'googlenet', 'caffe', 'tensorpack'. "
            "Received: auxiliary='vgg'",
        ),
        (
            {"auxiliary": "caffe", "include_top": False},
            "`auxiliary` heads need the classifier at the top. "
            "Received: auxiliary='caffe' with include_top=False",
        ),
        (
            {"pooling": "mean"},
            "`pooling` must be one of None, 'avg', 'max'. Received: pooling='mean'",
        ),
        *(
            ({name: "no"}, f"`{name}` must be True or False. Received: {name}='no'")
            for name in (
                "stem_batch_norm",
                "batch_norm_scale",
                "synchronized",
                "conv_bias",
                "local_response_normalization",
            )
        ),
        ({"dropout": 1.5}, "`dropout` must be a number in [0, 1]. Received: dropout=1.5"),
        (
            {"width_multiplier": 0},
            "`width_multiplier` must be a finite number > 0. Received: width_multiplier=0",
        ),
        (
            {"weight_scale": -1.0},
            "`weight_scale` must be a finite number > 0. Received: weight_scale=-1.0",
        ),
        (
            {"momentum": 1.5},
            "`momentum` must be None or a number in [0, 1]. Received: momentum=1.5",
        ),
        ({"classes": 0}, "`classes` must be a whole number >= 1. Received: classes=0"),
        (
            {"data_format": "NHWC"},
            "`data_format` must be one of 'channels_last', 'channels_first'. "
            "Received: data_format='NHWC'",
        ),
        (
            {"weights": "imagenet"},
            "`weights` must be None, 'slim' or the path of an existing weights file. "
            "Received: weights='imagenet'",
        ),
        (
            {"weights": __file__},
            "`weights` must be a file of Keras' that ends in .weights.h5 or .keras. "
            f"Received: weights='{__file__}'",
        ),
        (
            {"input_shape": (31, 224, 3)},
            "`input_shape` must have a height and width of at least 32 pixels. "
            "Received: input_shape=(31, 224, 3)",
        ),
        (
            {"input_shape": (7, 7, 3), "stem": "small"},
            "`input_shape` must have a height and width of at least 8 pixels. "
            "Received: input_shape=(7, 7, 3)",
        ),
        (
            {"input_shape": (224, 224)},
            "`input_shape` must be (height, width, channels), whole numbers or, for height and "
            "width, None. Received: input_shape=(224, 224)",
        ),
        (
            {"input_shape": (224, 224, None)},
            "`input_shape` must be (height, width, channels), whole numbers or, for height and "
            "width, None. Received: input_shape=(224, 224, None)",
        ),
        (
            {"input_tensor": np.zeros((1, 32, 32, 3))},
            "`input_tensor` must be a Keras tensor, such as keras.Input() returns. "
            "Received: input_tensor of type ndarray",
        ),
        (
            {"input_tensor": keras.Input((64, 64, 3)), "input_shape": (32, 32, 3)},
            "`input_shape` must be None or the shape of `input_tensor` without the batch, "
            "(64, 64, 3). Received: input_shape=(32, 32, 3)",
        ),
        (
            {"input_shape": (299, 299, 3), "padding": "symmetric"},
            "`input_shape` must give the modules of stride 2 maps of even height and width where "
            "`pools` are padded as in Caffe; multiples of 32 do. Received: a map of (37, 37) at "
            "inception_3c",
        ),
        (
            {"batch_norm": "activation", "include_top": False},
            "`input_shape` must have a known height and width for per-activation BN. "
            "Received: input_shape=(None, None, 3)",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
        bn_inception(**arguments)
    assert str(error.value) == message
