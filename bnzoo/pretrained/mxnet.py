"""MXNet's Inception-BN: a .params file, of the network of 1,000 or that of 21,841 classes."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from .names import CLASSIFIER, CONVOLUTIONS
from .tensors import Family, Part, Tensors

# A file is, little-endian: the list's magic number and 8 bytes 0; the number of arrays and the
# arrays; the number of names, and for each its length and its bytes.
_LIST_MAGIC = 0x112
# An array is: a magic number; from version 2 on the kind of storage, 0 for dense; the number of
# dimensions and each of them, int64; the device's type and number; the type of the elements; the
# elements. Before version 1 there is no magic number, and dimensions are uint32.
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_DENSE = 0
_LARGEST_RANK = 32
_TYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "u1", 4: "<i4", 5: "i1", 6: "<i8"}

_BATCH_NORM = {
    "gamma": "arg:bn_{}_gamma",
    "beta": "arg:bn_{}_beta",
    "moving_mean": "aux:bn_{}_moving_mean",
    "moving_variance": "aux:bn_{}_moving_var",
}


class _Reader:
    """Takes a file's content from its start to its end."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self._position = 0

    @property
    def left(self) -> int:
        return len(self._content) - self._position

    def take(self, size: int) -> memoryview:
        if size > self.left:
            raise ValueError(
                f"cut off: {size} bytes expected at {self._position}, {self.left} left"
            )
        self._position += size
        return self._content[self._position - size : self._position]

    def numbers(self, layout: str) -> tuple[Any, ...]:
        """Little-endian numbers, in the notation of `struct`."""
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}")))


def _read(path: str) -> dict[str, np.ndarray]:
    with open(path, "rb") as file:
        reader = _Reader(file.read())
    magic, _, count = reader.numbers("QQQ")
    if magic != _LIST_MAGIC:
        raise ValueError(
            f"no list of MXNet arrays: it starts with {magic:#x}, not {_LIST_MAGIC:#x}"
        )
    arrays = [_read_array(reader) for _ in range(count)]
    (named,) = reader.numbers("Q")
    names = [bytes(reader.take(*reader.numbers("Q"))).decode() for _ in range(named)]
    if len(set(names)) != count or reader.left:
        raise ValueError(f"{count} arrays, {len(set(names))} names, {reader.left} bytes left over")
    return dict(zip(names, arrays, strict=True))


def _read_array(reader: _Reader) -> np.ndarray:
    (magic,) = reader.numbers("I")
    if magic in (_V2, _V3):
        (storage,) = reader.numbers("i")
        if storage != _DENSE:
            raise ValueError(f"an array of storage type {storage}; only dense ones, 0, can be read")
    if magic in (_V1, _V2, _V3):
        (rank,), dimension = reader.numbers("I"), "q"
    else:
        rank, dimension = magic, "I"
    if not 1 <= rank <= _LARGEST_RANK:
        raise ValueError(f"an array of {rank} dimensions")
    shape = reader.numbers(f"{rank}{dimension}")
    _, _, kind = reader.numbers("iii")
    if min(shape) < 0 or kind not in _TYPES:
        raise ValueError(f"an array of shape {shape} and type {kind}")
    dtype = np.dtype(_TYPES[kind])
    return np.frombuffer(reader.take(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def _form(tensors: Tensors) -> str:
    return "mxnet_21k" if "arg:conv_conv1_weight" in tensors else "mxnet"


def _parts(layer: str, tensors: Tensors) -> list[Part]:
    if layer == CLASSIFIER:
        name = _classifier(tensors)
        return [Part("kernel", f"arg:{name}_weight", "OI"), Part("bias", f"arg:{name}_bias")]
    name = getattr(CONVOLUTIONS[layer], _form(tensors))
    return [
        Part("kernel", f"arg:conv_{name}_weight", "OIHW"),
        Part("bias", f"arg:conv_{name}_bias"),
        *(Part(role, tensor.format(name)) for role, tensor in _BATCH_NORM.items()),
    ]


def _classifier(tensors: Tensors) -> str:
    """Newer definitions leave its name to MXNet: it is the layer whose weight is a matrix."""
    weights = [
        name
        for name, tensor in tensors.items()
        if name.startswith("arg:") and name.endswith("_weight") and tensor.ndim == 2
    ]
    return weights[0][len("arg:") : -len("_weight")] if len(weights) == 1 else "fc1"


FAMILY = Family(
    format="a params file of MXNet's Inception-BN",
    read=_read,
    form=_form,
    parts=_parts,
    # With fix_gamma in the symbol file MXNet computes with 1, whatever is stored.
    gamma_optional=True,
)
