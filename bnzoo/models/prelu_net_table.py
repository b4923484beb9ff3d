"""The networks of He et al. 2015 as rows of data (Tables 1 and 3)."""

from __future__ import annotations

from typing import NamedTuple


class Stage(NamedTuple):
    """Convolutions of one size between two pools.

    Attributes:
        convs: how many there are.
        size: side of their kernels.
        filters: of each of them.
    """

    convs: int
    size: int
    filters: int


class PReLUNetTable(NamedTuple):
    """One network: conv1 7x7 of stride 2, a max pool, stages, the pyramid, three dense layers.

    Stages are called conv2, conv3 and so on; a max pool 2x2 of stride 2 stands between two of them.

    Attributes:
        conv1_filters: of the first convolution.
        conv1_padding: zeros on all sides of the image, in pixels.
        pool1: side and stride of the max pool after conv1.
        stages: the stages from conv2 on.
        bins: bins of a side in each level of the pyramid.
    """

    conv1_filters: int
    conv1_padding: int
    pool1: int
    stages: tuple[Stage, ...]
    bins: tuple[int, ...]

    def map_size(self, image_size: int) -> int:
        """Side of the map that the pyramid pools, for an image of `image_size` pixels a side."""
        conv1 = (image_size + 2 * self.conv1_padding - 7) // 2 + 1
        return (conv1 // self.pool1) // 2 ** (len(self.stages) - 1)

    def minimal_image_size(self) -> int:
        """The smallest side of an image, in pixels, that leaves something of the last map."""
        size = 1
        while self.map_size(size) < 1:
            size += 1
        return size


# Table 1. Neither this paper nor Table 1 gives the padding. With conv1 and pool1 unpadded the maps
# are 36x36 and 18x18, the sizes of its source (He & Sun 2015, Table 1), of which 18 is a multiple
# of all bins.
_SMALL = PReLUNetTable(
    conv1_filters=64,
    conv1_padding=0,
    pool1=3,
    stages=(Stage(4, 2, 128), Stage(6, 2, 256)),
    bins=(6, 3, 2, 1),
)
# Table 3.
_LARGE = PReLUNetTable(
    conv1_filters=96,
    conv1_padding=3,
    pool1=2,
    stages=(Stage(5, 3, 256), Stage(5, 3, 512), Stage(5, 3, 512)),
    bins=(7, 3, 2, 1),
)

TABLES = {
    "14": _SMALL,
    # Section 2.2, "up to sixteen" more 2x2 convolutions of 256 filters. Where they go is not said;
    # the last stage is the one that has such layers.
    "30": _SMALL._replace(stages=(Stage(4, 2, 128), Stage(22, 2, 256))),
    "a": _LARGE,
    "b": _LARGE._replace(stages=(Stage(6, 3, 256), Stage(6, 3, 512), Stage(6, 3, 512))),
    "c": _LARGE._replace(stages=(Stage(6, 3, 384), Stage(6, 3, 768), Stage(6, 3, 896))),
}
