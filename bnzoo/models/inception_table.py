"""The appendix table of Ioffe & Szegedy 2015 (Figure 5) and what its builders vary, as data."""

from __future__ import annotations

from typing import NamedTuple


class InceptionModule(NamedTuple):
    """One row of the table: the widths of one Inception module, in channels.

    A row without a projection is a module of stride 2: its 3x3 convolution, the second of its
    double 3x3 convolutions and its pool have stride 2, the pooled input passes through to the
    concatenation, and there is no 1x1 branch.
    """

    name: str
    conv_1x1: int
    reduce_3x3: int
    conv_3x3: int
    reduce_double: int
    conv_double: int
    pool: str
    projection: int

    @property
    def stride(self) -> int:
        return 1 if self.projection else 2


class InceptionTable(NamedTuple):
    """The widths of a whole network: the stem, the second convolution, ten modules."""

    conv1: int
    conv2_reduce: int
    conv2: int
    modules: tuple[InceptionModule, ...]


# The two rows whose printed width of the pool projection (128) contradicts their printed output
# size (576, which needs 96). bn_inception's argument `pool_projection` decides.
CONTESTED_MODULES = ("4c", "4d")

TABLES = {
    # Ioffe & Szegedy 2015, Figure 5. Output sizes are for an input of 224x224.
    "paper": InceptionTable(
        conv1=64,  # 7x7/2: 112x112x64, then max pool 3x3/2: 56x56x64
        conv2_reduce=64,  # 1x1: 56x56x64
        conv2=192,  # 3x3: 56x56x192, then max pool 3x3/2: 28x28x192
        modules=(
            #               1x1  3x3 red.  dbl red.  pool       proj.
            InceptionModule("3a", 64, 64, 64, 64, 96, "average", 32),  # 28x28x256
            InceptionModule("3b", 64, 64, 96, 64, 96, "average", 64),  # 28x28x320
            InceptionModule("3c", 0, 128, 160, 64, 96, "max", 0),  # 14x14x576, printed 28x28
            InceptionModule("4a", 224, 64, 96, 96, 128, "average", 128),  # 14x14x576
            InceptionModule("4b", 192, 96, 128, 96, 128, "average", 128),  # 14x14x576
            InceptionModule("4c", 160, 128, 160, 128, 160, "average", 96),  # 14x14x576
            InceptionModule("4d", 96, 128, 192, 160, 192, "average", 96),  # 14x14x576
            InceptionModule("4e", 0, 128, 192, 192, 256, "max", 0),  # 7x7x1024, printed 14x14
            InceptionModule("5a", 352, 192, 320, 160, 224, "average", 128),  # 7x7x1024
            InceptionModule("5b", 352, 192, 320, 192, 224, "max", 128),  # 7x7x1024
        ),
    ),
    # The wider network that MXNet's authors trained on the 21,841 classes of all of ImageNet.
    "imagenet_21k": InceptionTable(
        conv1=96,
        conv2_reduce=128,
        conv2=288,
        modules=(
            InceptionModule("3a", 96, 96, 96, 96, 144, "average", 48),  # 28x28x384
            InceptionModule("3b", 96, 96, 144, 96, 144, "average", 96),  # 28x28x480
            InceptionModule("3c", 0, 192, 240, 96, 144, "max", 0),  # 14x14x864
            InceptionModule("4a", 224, 64, 96, 96, 128, "average", 128),  # 14x14x576
            InceptionModule("4b", 192, 96, 128, 96, 128, "average", 128),  # 14x14x576
            InceptionModule("4c", 160, 128, 160, 128, 160, "average", 128),  # 14x14x608
            InceptionModule("4d", 96, 128, 192, 160, 96, "average", 128),  # 14x14x512
            InceptionModule("4e", 0, 128, 192, 192, 256, "max", 0),  # 7x7x960
            InceptionModule("5a", 352, 192, 320, 160, 224, "average", 128),  # 7x7x1024
            InceptionModule("5b", 352, 192, 320, 192, 224, "max", 128),  # 7x7x1024
        ),
    ),
}


class Pools(NamedTuple):
    """How one family of implementations pads its 3x3 pools.

    `stem` and `module` are the max pools of stride 2 behind the stem's convolutions and in 3c and
    4e: "same" (TensorFlow's), "valid", or (before, after), the rows and columns that are added on
    either side and that never win the maximum. `count_padding`: whether the zeros around the map
    count in the average pools, which then divide by 9 at the border too.
    """

    stem: str | tuple[int, int]
    module: str | tuple[int, int]
    count_padding: bool


# (0, 1) is Caffe's and PyTorch's rounding up of the output size: the last window may hang over.
POOLS = {
    "tensorflow": Pools(stem="same", module="same", count_padding=False),
    "caffe": Pools(stem=(0, 1), module=(0, 1), count_padding=True),
    "onnx": Pools(stem=(0, 1), module=(0, 1), count_padding=False),
    "mxnet": Pools(stem="valid", module=(1, 1), count_padding=True),
}
# The pools that go with a padding of the convolutions unless one says otherwise.
POOLS_OF_PADDING = {"same": "tensorflow", "symmetric": "caffe"}
