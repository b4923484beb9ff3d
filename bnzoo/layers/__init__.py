"""Layers of both papers."""

from bnzoo import backend  # noqa: F401 it refuses a backend other than TensorFlow

from .batch_normalization import BatchNormalization
from .channel_affine import ChannelAffine
from .local_response_normalization import LocalResponseNormalization
from .prelu import PReLU
from .spatial_pyramid_pooling import SlidingSpatialPyramidPooling, SpatialPyramidPooling

__all__ = [
    "BatchNormalization",
    "ChannelAffine",
    "LocalResponseNormalization",
    "PReLU",
    "SlidingSpatialPyramidPooling",
    "SpatialPyramidPooling",
]
