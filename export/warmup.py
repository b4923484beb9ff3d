"""Warm-up records: requests that TensorFlow Serving runs before it serves a version.

The first request of a batch size is slow: kernels are chosen and memory is taken. TensorFlow
Serving sends itself what it finds in assets.extra/tf_serving_warmup_requests while it loads a
version, so that this is over before the version answers anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import ExportFailed
from .plain_tensorflow import read_signatures, reason

FILE = Path("assets.extra") / "tf_serving_warmup_requests"
# TensorFlow Serving refuses to load a version with more.
MOST_RECORDS = 1000
# Of a batch: more rows than TensorFlow counts in 32 bits no batch can have.
MOST_ROWS = 2**31 - 1
# Extent of an image where the signature takes any, in pixels.
_EXTENT = 256


def read_batch_sizes(text: str) -> tuple[int, ...]:
    """The batch sizes in a flag's `text`, whole numbers above 0 with commas between.

    Raises:
        ValueError: it is something else.
    """
    sizes = [size.strip() for size in text.split(",")] if text else []
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"must be whole numbers above 0 with commas between. Received: {text}")
    if any(int(size) > MOST_ROWS for size in sizes):
        raise ValueError(f"must be at most {MOST_ROWS}. Received: {text}")
    return tuple(dict.fromkeys(map(int, sizes)))


def require_messages() -> Any:
    """TensorFlow Serving's messages.

    Raises:
        ExportFailed: tensorflow-serving-api is not installed.
    """
    try:
        from tensorflow_serving.apis import predict_pb2, prediction_log_pb2
    except ImportError as error:
        raise ExportFailed(
            "--warmup needs tensorflow-serving-api: pip install 'bnzoo[serving]'"
        ) from error
    return predict_pb2, prediction_log_pb2


def write_warmup(folder: Path, batch_sizes: Sequence[int], image_bytes: bytes) -> int:
    """Writes one record for each signature of a SavedModel and each batch size.

    A record has one image, as many times as the batch has rows; TensorFlow's message of a tensor
    stores it once. What the image shows is of no consequence: a network does the same work for any.
    Whole numbers are 0, which every table has. A row of each is run before anything is written,
    since a server refuses a version whose records fail.

    Args:
        folder: the SavedModel; the records become a part of it.
        batch_sizes: those that the server will see: with batching, its allowed_batch_sizes.
        image_bytes: an encoded image of the size that clients send, for `serving_bytes`.

    Returns:
        How many records there are.

    Raises:
        ExportFailed: tensorflow-serving-api is not installed, there would be too many records, or a
            signature fails for what they hold.
    """
    predict_pb2, prediction_log_pb2 = require_messages()
    import tensorflow as tf

    signatures = read_signatures(folder)
    count = len(signatures) * len(batch_sizes)
    if count > MOST_RECORDS:
        raise ExportFailed(
            f"{len(batch_sizes)} batch sizes and {len(signatures)} signatures make {count} warm-up "
            f"records, more than TensorFlow Serving's {MOST_RECORDS}"
        )

    def request_of(name: str, size: int) -> Any:
        # No model is named: the server runs a record on the version that brings it.
        request = predict_pb2.PredictRequest()
        request.model_spec.signature_name = name
        for key, tensor in signatures[name]["inputs"].items():
            text = image_bytes if name == "serving_bytes" else b""
            request.inputs[key].CopyFrom(_repeated(tensor, size, text))
        return request

    model = tf.saved_model.load(str(folder))
    for name in signatures:
        _run(model.signatures, request_of(name, 1), "a warm-up record")
    (folder / FILE).parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(folder / FILE)) as writer:
        for name in signatures:
            for size in batch_sizes:
                log = prediction_log_pb2.PredictionLog()
                log.predict_log.request.CopyFrom(request_of(name, size))
                writer.write(log.SerializeToString(deterministic=True))
    return count


def check_warmup(folder: Path) -> str:
    """What the warm-up records of a SavedModel are, in a line; "" if it has none.

    A server refuses a version if one fails. Of each signature the record of the smallest batch is
    run, if tensorflow-serving-api is installed, which knows how to read it.

    Args:
        folder: the SavedModel, which can be loaded.

    Raises:
        ExportFailed: they are damaged, too many, or fail.
    """
    import tensorflow as tf

    path = folder / FILE
    if not path.is_file():
        return ""
    try:
        records = [record.numpy() for record in tf.data.TFRecordDataset(str(path))]
    except tf.errors.DataLossError:
        records = []
    # What is cut short TensorFlow takes for the end. A record has 16 bytes around it.
    if path.stat().st_size != sum(16 + len(record) for record in records):
        raise ExportFailed(f"{path} is damaged: it does not hold TFRecords alone")
    if len(records) > MOST_RECORDS:
        raise ExportFailed(
            f"{path} has {len(records)} records, and TensorFlow Serving takes {MOST_RECORDS}"
        )
    try:
        _, prediction_log_pb2 = require_messages()
    except ExportFailed:
        return f"{len(records)} warm-up records, not run: they need pip install 'bnzoo[serving]'"
    from google.protobuf.message import DecodeError

    try:
        logs = [prediction_log_pb2.PredictionLog.FromString(record) for record in records]
    except DecodeError as error:
        raise ExportFailed(f"{path} is damaged: a record is no PredictionLog") from error
    smallest: dict[str, Any] = {}
    for log in logs:
        if log.WhichOneof("log_type") == "predict_log":
            request = log.predict_log.request
            name = request.model_spec.signature_name or "serving_default"
            if name not in smallest or _rows(request) < _rows(smallest[name]):
                smallest[name] = request
    model = tf.saved_model.load(str(folder))
    for request in smallest.values():
        _run(model.signatures, request, f"a record of {path}")
    return f"{len(records)} warm-up records; of each signature the smallest was run"


def _rows(request: Any) -> int:
    return min(
        (tensor.tensor_shape.dim[0].size for tensor in request.inputs.values() if _ranked(tensor)),
        default=0,
    )


def _ranked(tensor: Any) -> bool:
    return len(tensor.tensor_shape.dim) > 0


def _run(signatures: Mapping[str, Any], request: Any, what: str) -> None:
    """Runs a request as a server does: TensorFlow reads the message."""
    import tensorflow as tf

    name = request.model_spec.signature_name or "serving_default"
    if name not in signatures:
        raise ExportFailed(f"{what} is for {name}, which the model has not")
    try:
        inputs = {
            key: tf.io.parse_tensor(tensor.SerializeToString(), tensor.dtype)
            for key, tensor in request.inputs.items()
        }
        signatures[name](**inputs)
    except (tf.errors.OpError, TypeError, ValueError) as error:
        raise ExportFailed(
            f"{what} for {name} fails, so that a server would refuse the version: {reason(error)}"
        ) from error


def _repeated(tensor: dict[str, Any], size: int, image_bytes: bytes) -> Any:
    """A batch of one value: a message with a single value and a shape stands for that."""
    import tensorflow as tf

    dtype = tf.dtypes.as_dtype(tensor["dtype"])
    shape = [size, *(extent or _EXTENT for extent in tensor["shape"][1:])]
    # Of a type of its own: TensorFlow makes no bool of 0.
    other = False if dtype == tf.bool else 0
    value: Any = image_bytes if dtype == tf.string else 0.5 if dtype.is_floating else other
    return tf.make_tensor_proto(value, dtype=dtype, shape=shape)
