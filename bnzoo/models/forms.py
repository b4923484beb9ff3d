"""The published forms of BN-Inception: what to build for each family of public weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import keras

from bnzoo.preprocessing import Preprocessing

from .inception import bn_inception


@dataclasses.dataclass(frozen=True)
class Form:
    """One family of published weights: its network, its pixels, its labels, its accuracy.

    Attributes:
        arguments: those of `bn_inception` that differ from its defaults.
        preprocessing: what the network was evaluated with.
        background: whether output 0 is a background class ahead of the labels.
        sorted_synsets: whether the labels are the 1000 of ILSVRC2012 in the order of their WordNet
            identifiers, so that the first is n01440764, tench. Where not, only the file that the
            weights came with tells.
        accuracy: published top-1 and top-5 accuracy in percent on the 50,000 validation images of
            ILSVRC2012, one crop; None where there is none.
        source: who published the weights and the figures.
    """

    arguments: Mapping[str, Any]
    preprocessing: Preprocessing
    background: bool
    sorted_synsets: bool
    accuracy: tuple[float, float] | None
    source: str

    def build(self, **overrides: Any) -> keras.Model:
        """`bn_inception` in this form, with the arguments that are given instead of its own.

        Example:

        >>> FORMS["slim"].build(width_multiplier=0.1).output.shape
        (None, 1001)
        """
        return bn_inception(**{**self.arguments, **overrides})


# Networks that came from Caffe, or follow it: a plain stem, the same zeros on all sides, BN's
# epsilon as cuDNN allows it.
_CAFFE = {"stem": "conv", "padding": "symmetric", "epsilon": 1e-5}
_CAFFE_PIXELS = Preprocessing(
    image_size=(224, 224),
    resize="direct",
    crop_fraction=0.875,
    mean=(104.0, 117.0, 123.0),
    scale=1.0,
    channel_order="bgr",
)

FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "slim": Form(
            {
                "stem_batch_norm": False,
                "batch_norm_scale": False,
                "momentum": 0.9997,
                "dropout": 0.2,
                "classes": 1001,
            },
            Preprocessing(
                image_size=(224, 224),
                resize="central_crop",
                crop_fraction=0.875,
                mean=127.5,
                scale=127.5,
                interpolation="bilinear_corners",
            ),
            background=True,
            sorted_synsets=True,
            accuracy=(73.9, 91.8),
            source="TF-slim, inception_v2_2016_08_28",
        ),
        "torch": Form(
            {**_CAFFE, "pool_projection": 128, "conv_bias": True, "momentum": 0.9},
            Preprocessing(
                image_size=(224, 224),
                resize="short_side",
                crop_fraction=0.875,
                mean=(104.0, 117.0, 128.0),
                scale=1.0,
                channel_order="bgr",
                interpolation="bilinear_antialias",
            ),
            background=False,
            sorted_synsets=True,
            accuracy=(73.524, 91.562),
            source="Cadene's pretrained-models.pytorch, bn_inception",
        ),
        "caffe": Form(
            {**_CAFFE, "momentum": 0.999},
            _CAFFE_PIXELS,
            background=False,
            sorted_synsets=False,
            accuracy=(72.05, 90.87),
            source="lim0606/caffe-googlenet-bn, February 2016",
        ),
        # The network of "caffe", whose exporter lost the count of the zeros in the average pools.
        # The file documents neither its pixels nor its labels: those of "caffe" are likely.
        "onnx": Form(
            {**_CAFFE, "pools": "onnx", "momentum": 0.999},
            _CAFFE_PIXELS,
            background=False,
            sorted_synsets=False,
            accuracy=None,
            source="ONNX model zoo, inception_v2",
        ),
        "mxnet": Form(
            {
                **_CAFFE,
                "pools": "mxnet",
                "pool_projection": 128,
                "conv_bias": True,
                "momentum": 0.9,
                "epsilon": 1e-5 + 1e-10,
            },
            Preprocessing(
                image_size=(224, 224),
                resize="short_side",
                crop_fraction=0.875,
                mean=(123.68, 116.779, 103.939),
                scale=1.0,
            ),
            background=False,
            sorted_synsets=False,
            accuracy=(72.45, 90.79),
            source="MXNet, Inception-BN-0126",
        ),
        "mxnet_21k": Form(
            {
                **_CAFFE,
                "table": "imagenet_21k",
                "pool_projection": 128,
                "conv_bias": True,
                "classes": 21841,
            },
            Preprocessing(
                image_size=(224, 224),
                resize="short_side",
                crop_fraction=0.875,
                mean=117.0,
                scale=1.0,
            ),
            background=False,
            sorted_synsets=False,
            accuracy=None,
            source="MXNet's model gallery, Inception-BN of ImageNet's 21,841 classes",
        ),
    }
)
