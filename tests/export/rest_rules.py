"""How TensorFlow Serving's REST interface reads a predict request and writes its answer.

A model of the rules of tensorflow_serving/util/json_tensor.cc and predict_util.cc, as no server can
be run where the tests run. It knows signatures only by what the SavedModel says of them.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

_WHOLE = (tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64)
_REAL = (tf.float32, tf.float64)
_INT32 = (-(2**31), 2**31 - 1)


class Refused(Exception):
    """The server answers with an error, and this is why."""


class Server:
    """A loaded SavedModel behind the rules."""

    def __init__(self, folder: Path) -> None:
        saved = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
        (graph,) = saved.meta_graphs
        assert "serve" in graph.meta_info_def.tags
        self._definitions = graph.signature_def
        self._model = tf.saved_model.load(str(folder))

    def predict_json(self, body: str) -> str:
        """The answer to POST /v1/models/NAME:predict with `body`."""
        request = json.loads(body)
        if not isinstance(request, dict):
            raise Refused("the request is no object")
        name = request.get("signature_name", "")
        if not isinstance(name, str):
            raise Refused("signature_name must be a string")
        types = self._input_types(name)
        if "instances" in request and "inputs" in request:
            raise Refused("only one of inputs and instances")
        if "instances" in request:
            inputs = _from_rows(request["instances"], types)
        elif "inputs" in request:
            inputs = _from_columns(request["inputs"], types)
        else:
            raise Refused("missing inputs or instances")
        outputs = self.predict(name, inputs)
        return _rows(outputs) if "instances" in request else _columns(outputs)

    def predict(self, name: str, inputs: Mapping[str, tf.Tensor]) -> dict[str, np.ndarray]:
        """What gRPC's Predict does, too: runs the signature `name`, "" for the default."""
        if set(inputs) != set(self._input_types(name)):
            raise Refused(f"inputs must be {set(self._input_types(name))}, are {set(inputs)}")
        function = self._model.signatures[name or "serving_default"]
        return {key: value.numpy() for key, value in function(**inputs).items()}

    def _input_types(self, name: str) -> dict[str, tf.DType]:
        name = name or "serving_default"
        if name not in self._definitions:
            raise Refused(f"serving signature key {name!r} not found")
        definition = self._definitions[name]
        if definition.method_name != "tensorflow/serving/predict":
            raise Refused(f"{name!r} has method {definition.method_name!r}")
        return {key: tf.dtypes.as_dtype(info.dtype) for key, info in definition.inputs.items()}


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["b64"] and isinstance(value["b64"], str)


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and not _is_base64(value)


def _from_rows(instances: Any, types: Mapping[str, tf.DType]) -> dict[str, tf.Tensor]:
    if not isinstance(instances, list) or not instances:
        raise Refused("instances must be a list with at least one element")
    named = _is_named(instances[0])
    if not named and len(types) > 1:
        raise Refused("instances must be objects, as there are several inputs")
    if any(_is_named(element) != named for element in instances):
        raise Refused("instances must be all objects or none")
    rows = instances if named else [{next(iter(types)): element} for element in instances]
    if any(set(row) != set(types) for row in rows):
        raise Refused(f"the keys of each instance must be {sorted(types)}")
    tensors = {}
    for key, dtype in types.items():
        values = [_dense(row[key], dtype) for row in rows]
        if len({value.shape for value in values}) > 1:
            raise Refused(f"instances of different shapes: {[value.shape for value in values]}")
        tensors[key] = tf.constant(np.stack(values), dtype)
    return tensors


def _from_columns(inputs: Any, types: Mapping[str, tf.DType]) -> dict[str, tf.Tensor]:
    if not _is_named(inputs):
        if len(types) > 1:
            raise Refused("inputs must be an object, as there are several inputs")
        inputs = {next(iter(types)): inputs}
    if not set(types) <= set(inputs):
        raise Refused(f"missing named input of {sorted(types)}")
    return {key: tf.constant(_dense(inputs[key], dtype), dtype) for key, dtype in types.items()}


def _dense(value: Any, dtype: tf.DType) -> np.ndarray:
    """A JSON value, lists in lists, as a tensor's values: its shape is that of the first ones."""
    shape: list[int] = []
    first = value
    while isinstance(first, list):
        shape.append(len(first))
        if not first:
            break
        first = first[0]
    values: list[Any] = []
    _fill(value, shape, dtype, values)
    kind = object if dtype == tf.string else dtype.as_numpy_dtype
    filled = np.empty(len(values), kind)
    filled[:] = values
    return filled.reshape(shape)


def _fill(value: Any, shape: list[int], dtype: tf.DType, values: list[Any]) -> None:
    if isinstance(value, list) != bool(shape):
        raise Refused("lists are nested to different depths")
    if not shape:
        values.append(_scalar(value, dtype))
        return
    if len(value) != shape[0]:
        raise Refused(f"a list of {len(value)} where the first has {shape[0]}")
    for element in value:
        _fill(element, shape[1:], dtype, values)


def _scalar(value: Any, dtype: tf.DType) -> Any:
    if dtype == tf.string:
        if isinstance(value, str):
            return value.encode()
        if not _is_base64(value):
            raise Refused("a string must be text or an object with the key b64 alone")
        try:
            return base64.b64decode(value["b64"], validate=True)
        except binascii.Error as error:
            raise Refused("unable to base64 decode") from error
    if dtype == tf.bool and isinstance(value, bool):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if dtype in _REAL and number:
        return value
    if dtype in _WHOLE and number and isinstance(value, int):
        # The narrow ones travel as int32 and are cut to their width on arrival.
        low, high = (dtype.min, dtype.max) if dtype.size > 2 else _INT32
        if low <= value <= high:
            return np.array(value).astype(dtype.as_numpy_dtype)
    raise Refused(f"{value!r} is not of expected type {dtype.name}")


def _rows(outputs: Mapping[str, np.ndarray]) -> str:
    if any(value.ndim == 0 for value in outputs.values()):
        raise Refused("an output has no batch dimension")
    if len({len(value) for value in outputs.values()}) > 1:
        raise Refused("outputs of inconsistent batch size")
    columns = {key: _listed(key, value) for key, value in outputs.items()}
    if len(columns) == 1:
        (predictions,) = columns.values()
    else:
        predictions = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
    return json.dumps({"predictions": predictions})


def _columns(outputs: Mapping[str, np.ndarray]) -> str:
    columns = {key: _listed(key, value) for key, value in outputs.items()}
    (only,) = columns.values() if len(columns) == 1 else (columns,)
    return json.dumps({"outputs": only})


def _listed(key: str, value: np.ndarray) -> Any:
    """An output as lists; its numbers as the shortest text that gives the same number again."""
    dtype = tf.dtypes.as_dtype(value.dtype)
    if dtype == tf.string:
        if key.endswith("_bytes"):
            return _mapped(value, lambda item: {"b64": base64.b64encode(item).decode()})
        return _mapped(value, lambda item: item.decode())
    if dtype not in (*_REAL, *_WHOLE, tf.bool):
        raise Refused(f"failed to write a JSON value for tensor type {dtype.name}")
    if dtype in _REAL:
        return _mapped(value, lambda item: float(str(item)) if math.isfinite(item) else float(item))
    return value.tolist()


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, np.ndarray) and value.ndim:
        return [_mapped(row, function) for row in value]
    return function(value[()] if isinstance(value, np.ndarray) else value)
