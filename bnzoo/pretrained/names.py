"""What each family of published weights calls the convolutions of BN-Inception, as rows of data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Names(NamedTuple):
    """The names of one convolution; PyTorch's are those of `bnzoo.models`.

    Attributes:
        slim: TF-slim, behind `InceptionV2/`.
        onnx: the ONNX file, which has them from Caffe.
        mxnet: MXNet's 1,000 classes, behind `conv_` or `bn_`.
        mxnet_21k: MXNet's 21,841 classes, likewise.
    """

    slim: str
    onnx: str
    mxnet: str
    mxnet_21k: str


CLASSIFIER = "predictions"

_STEM = {
    "conv1_7x7_s2": Names("Conv2d_1a_7x7", "conv1/7x7_s2", "1", "conv1"),
    "conv2_3x3_reduce": Names("Conv2d_2b_1x1", "conv2/3x3_reduce", "2_red", "conv2red"),
    "conv2_3x3": Names("Conv2d_2c_3x3", "conv2/3x3", "2", "conv2"),
}

# TF-slim counts its pools as the first of a group: its letters are shifted by one.
_SLIM_MODULES = {
    "3a": "Mixed_3b",
    "3b": "Mixed_3c",
    "3c": "Mixed_4a",
    "4a": "Mixed_4b",
    "4b": "Mixed_4c",
    "4c": "Mixed_4d",
    "4d": "Mixed_4e",
    "4e": "Mixed_5a",
    "5a": "Mixed_5b",
    "5b": "Mixed_5c",
}
_STRIDE_2 = ("3c", "4e")


class _Branch(NamedTuple):
    """The names of one convolution inside a module; `slim_stride_2`: in 3c and 4e, if there."""

    bnzoo: str
    slim: str
    slim_stride_2: str | None
    onnx: str
    mxnet: str


# The two 3x3 of the double branch are counted 1, 2 in PyTorch, a, b in Caffe and 0, 1 in MXNet.
_BRANCHES = (
    _Branch("1x1", "Branch_0/Conv2d_0a_1x1", None, "1x1", "1x1"),
    _Branch(
        "3x3_reduce",
        "Branch_1/Conv2d_0a_1x1",
        "Branch_0/Conv2d_0a_1x1",
        "3x3_reduce",
        "3x3_reduce",
    ),
    _Branch("3x3", "Branch_1/Conv2d_0b_3x3", "Branch_0/Conv2d_1a_3x3", "3x3", "3x3"),
    _Branch(
        "double_3x3_reduce",
        "Branch_2/Conv2d_0a_1x1",
        "Branch_1/Conv2d_0a_1x1",
        "double3x3_reduce",
        "double_3x3_reduce",
    ),
    _Branch(
        "double_3x3_1",
        "Branch_2/Conv2d_0b_3x3",
        "Branch_1/Conv2d_0b_3x3",
        "double3x3a",
        "double_3x3_0",
    ),
    _Branch(
        "double_3x3_2",
        "Branch_2/Conv2d_0c_3x3",
        "Branch_1/Conv2d_1a_3x3",
        "double3x3b",
        "double_3x3_1",
    ),
    _Branch("pool_proj", "Branch_3/Conv2d_0b_1x1", None, "pool_proj", "proj"),
)


def _modules() -> dict[str, Names]:
    names = {}
    for module, slim_module in _SLIM_MODULES.items():
        for branch in _BRANCHES:
            slim = branch.slim_stride_2 if module in _STRIDE_2 else branch.slim
            if slim is not None:
                mxnet = f"{module}_{branch.mxnet}"
                names[f"inception_{module}_{branch.bnzoo}"] = Names(
                    f"{slim_module}/{slim}", f"inception_{module}/{branch.onnx}", mxnet, mxnet
                )
    return names


# The 69 convolutions by their names in bnzoo.models, in the order of the network.
CONVOLUTIONS: Mapping[str, Names] = MappingProxyType({**_STEM, **_modules()})
