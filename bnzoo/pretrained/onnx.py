"""The ONNX model zoo's inception_v2: the initializers of its graph."""

from __future__ import annotations

import numpy as np

from .names import CLASSIFIER, CONVOLUTIONS
from .tensors import Family, Part, Tensors

_BATCH_NORM = {
    "batch_norm_scale": "bn_scale_0",
    "batch_norm_offset": "bn_bias_0",
    "moving_mean": "bn_mean_0",
    "moving_variance": "bn_var_0",
    "scale": "bn/sc_w_0",
    "offset": "bn/sc_b_0",
}


def _read(path: str) -> dict[str, np.ndarray]:
    try:
        import onnx
    except ImportError as error:
        raise ImportError("source='onnx' needs ONNX: pip install onnx") from error
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(path).graph
        tensors = {item.name: onnx.numpy_helper.to_array(item) for item in graph.initializer}
    except (DecodeError, ValueError, TypeError) as error:
        raise ValueError(f"no ONNX model: {error}") from error
    # Those of integers are shapes that the graph computes with.
    return {name: tensor for name, tensor in tensors.items() if tensor.dtype.kind == "f"}


def _parts(layer: str, tensors: Tensors) -> list[Part]:
    if layer == CLASSIFIER:
        name = "loss3/classifier"
        return [Part("kernel", f"{name}_w_0", "OI"), Part("bias", f"{name}_b_0")]
    name = CONVOLUTIONS[layer].onnx
    batch_norm = [Part(role, f"{name}/{tensor}") for role, tensor in _BATCH_NORM.items()]
    return [Part("kernel", f"{name}_w_0", "OIHW"), *batch_norm]


def _compose(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Caffe has no affine map in BN and another layer for it; the file has both, one after another:

    (gamma x + beta) scale + offset = (gamma scale) x + (beta scale + offset)
    """
    values = dict(values)
    if "scale" in values:
        scale, offset = values.pop("scale"), values.pop("offset")
        values["gamma"] = values.pop("batch_norm_scale") * scale
        values["beta"] = values.pop("batch_norm_offset") * scale + offset
    return values


FAMILY = Family(
    format="the ONNX model inception_v2",
    read=_read,
    form=lambda tensors: "onnx",
    parts=_parts,
    compose=_compose,
)
