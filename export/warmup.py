"""Warm-up records: requests that TensorFlow Serving runs before it serves a version.

The first request of a batch size is slow: kernels are chosen and memory is taken. TensorFlow
Serving sends itself what it finds in assets.extra/tf_serving_warmup_requests while it loads a
version, so that this is over before the version answers anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import ExportFailed

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

    Args:
        folder: the SavedModel; the records become a part of it.
        batch_sizes: those that the server will see: with batching, its allowed_batch_sizes.
        image_bytes: an encoded image of the size that clients send, for `serving_bytes`.

    Returns:
        How many records there are.

    Raises:
        ExportFailed: tensorflow-serving-api is not installed, or there would be too many records.
    """
    predict_pb2, prediction_log_pb2 = require_messages()
    import tensorflow as tf

    from .plain_tensorflow import read_signatures

    signatures = read_signatures(folder)
    count = len(signatures) * len(batch_sizes)
    if count > MOST_RECORDS:
        raise ExportFailed(
            f"{len(batch_sizes)} batch sizes and {len(signatures)} signatures make {count} warm-up "
            f"records, more than TensorFlow Serving's {MOST_RECORDS}"
        )
    (folder / FILE).parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(folder / FILE)) as writer:
        for name, signature in signatures.items():
            for size in batch_sizes:
                # No model is named: the server runs a record on the version that brings it.
                request = predict_pb2.PredictRequest()
                request.model_spec.signature_name = name
                for key, tensor in signature["inputs"].items():
                    request.inputs[key].CopyFrom(_repeated(tensor, size, image_bytes))
                log = prediction_log_pb2.PredictionLog()
                log.predict_log.request.CopyFrom(request)
                writer.write(log.SerializeToString(deterministic=True))
    return count


def _repeated(tensor: dict[str, Any], size: int, image_bytes: bytes) -> Any:
    """A batch of one value: a message with a single value and a shape stands for that."""
    import tensorflow as tf

    dtype = tf.dtypes.as_dtype(tensor["dtype"])
    shape = [size, *(extent or _EXTENT for extent in tensor["shape"][1:])]
    value: Any = image_bytes if dtype == tf.string else 0.5 if dtype.is_floating else 128
    return tf.make_tensor_proto(value, dtype=dtype, shape=shape)
