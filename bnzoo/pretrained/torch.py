"""PyTorch's bn_inception: a state dict that torch.save has written."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .names import CLASSIFIER
from .tensors import Family, Part, Tensors

_BATCH_NORM = {
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
# It counts batches for a cumulative average and is no part of what the network computes.
_COUNTER = ".num_batches_tracked"


def _read(path: str) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError as error:
        raise ImportError("source='torch' needs PyTorch: pip install torch") from error
    try:
        # Runs nothing that is in the file.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # What a damaged pickle raises has no common class, and PyTorch's text for one with other
        # objects in it advises to run what is in the file.
        raise ValueError("damaged, or with other objects than tensors in it") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"an object of type {type(state).__name__} instead of a state dict")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"a dict with {name!r} of type {type(tensor).__name__} instead of a state dict"
            )
    return {
        name: _flat(name, tensor.float().numpy())
        for name, tensor in state.items()
        if not name.endswith(_COUNTER)
    }


def _flat(name: str, tensor: np.ndarray) -> np.ndarray:
    """Vectors of BN are (1, channels) in the oldest files, which came from Caffe."""
    return tensor.ravel() if "_bn." in name and tensor.shape[:1] == (1,) else tensor


def _parts(layer: str, tensors: Tensors) -> list[Part]:
    if layer == CLASSIFIER:
        # The file of the network's first author calls it otherwise.
        name = "fc" if "fc.weight" in tensors else "last_linear"
        return [Part("kernel", f"{name}.weight", "OI"), Part("bias", f"{name}.bias")]
    return [
        Part("kernel", f"{layer}.weight", "OIHW"),
        Part("bias", f"{layer}.bias"),
        *(Part(role, f"{layer}_bn.{name}") for role, name in _BATCH_NORM.items()),
    ]


FAMILY = Family(
    format="a state dict of PyTorch's bn_inception",
    read=_read,
    form=lambda tensors: "torch",
    parts=_parts,
)
