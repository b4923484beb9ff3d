"""The network as a file for another runtime, beside the SavedModel: LiteRT and ONNX.

The files lie in `assets.extra` of the SavedModel, which TensorFlow Serving leaves alone. Each takes
`images`, or the network's inputs by their names, as `serving_default` does, with a batch of any
size, computes in float32 and gives the same floating point outputs.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .errors import ExportFailed
from .forms import CONSTANTS, build_form, in_float32
from .reproducible_onnx import make_reproducible

FOLDER = Path("assets.extra")
# The newest that tf2onnx 1.17 writes.
_OPSET = 18

Inputs = Mapping[str, tf.Tensor]
Answers = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Runtime:
    """A kind of file.

    Attributes:
        file: its name.
        precision: what `verify.ROUNDING` says of it.
        convert: from a form with constants to the file's content.
        run: from the content and inputs to outputs.
    """

    file: str
    precision: str
    convert: Callable[[tf.types.experimental.ConcreteFunction], bytes]
    run: Callable[[bytes, Inputs], Answers]


def float32_form(network: keras.Model) -> tf.types.experimental.ConcreteFunction:
    """What the files are made of: the weights as constants, and all of it in float32, as the
    runtimes lack most operations in other types.

    Raises:
        ExportFailed: a layer of another type cannot be copied.
    """
    try:
        return build_form(in_float32(network), CONSTANTS)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ExportFailed(f"the network cannot be had in float32: {reason}") from error


def write(
    runtime: Runtime, form: tf.types.experimental.ConcreteFunction, folder: Path
) -> Callable[[Inputs], Answers]:
    """Writes the file into the SavedModel in `folder`.

    Args:
        runtime: one of `RUNTIMES`.
        form: what `float32_form` made.
        folder: a SavedModel.

    Returns:
        What runs the file as it was written.

    Raises:
        ExportFailed: the network cannot be converted, or what converts it is not installed.
    """
    try:
        content = runtime.convert(form)
    except ExportFailed:
        raise
    # Converters raise whatever they meet; the first line says which operation it was.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportFailed(f"{runtime.file} cannot be made of this network: {reason}") from error
    path = folder / FOLDER / runtime.file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return lambda inputs: runtime.run(path.read_bytes(), inputs)


def _litert(*optimizations: tf.lite.Optimize) -> Callable[..., bytes]:
    def convert(form: tf.types.experimental.ConcreteFunction) -> bytes:
        # With a module it goes by way of a SavedModel, and so keeps the names.
        converter = tf.lite.TFLiteConverter.from_concrete_functions([form], tf.Module())
        converter.optimizations = list(optimizations)
        return converter.convert()

    return convert


def _run_litert(content: bytes, inputs: Inputs) -> Answers:
    run = _litert_interpreter()(model_content=content).get_signature_runner("serving_default")
    # Its arrays are views of memory that goes with the interpreter.
    answers = run(**{name: value.numpy() for name, value in inputs.items()})
    return {name: np.array(value) for name, value in answers.items()}


def _litert_interpreter() -> Any:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:

        def Interpreter(**arguments: Any) -> Any:
            with warnings.catch_warnings():
                # It is TensorFlow's own copy, which announces that it is to move.
                warnings.simplefilter("ignore", UserWarning)
                return tf.lite.Interpreter(**arguments)

    return Interpreter


def require_onnx() -> tuple[Any, Any]:
    """The modules tf2onnx and onnxruntime.

    Raises:
        ExportFailed: one is not installed.
    """
    try:
        import onnxruntime
        import tf2onnx
    except ImportError as error:
        raise ExportFailed(
            "--onnx needs tf2onnx and onnxruntime: pip install 'bnzoo[onnx]'"
        ) from error
    return tf2onnx, onnxruntime


def _onnx(form: tf.types.experimental.ConcreteFunction) -> bytes:
    tf2onnx, _ = require_onnx()
    names = list(form.structured_input_signature[1])
    specs = [form.structured_input_signature[1][name] for name in names]
    function = tf.function(lambda *inputs: form(**dict(zip(names, inputs, strict=True))))
    model, _ = tf2onnx.convert.from_function(
        function,
        input_signature=specs,
        opset=_OPSET,
        custom_op_handlers={"Erfc": (_complement_of_erf, [])},
    )
    make_reproducible(model)
    return model.SerializeToString(deterministic=True)


def _complement_of_erf(graph: Any, node: Any, name: str, arguments: Any) -> None:
    """Writes erfc(x), of a GELU, which neither ONNX nor tf2onnx knows, as 1 - erf(x)."""
    (output,) = node.output
    shapes, types = node.output_shapes, node.output_dtypes
    graph.remove_node(name)
    one = graph.make_const(f"{name}_one", np.ones((), np.float32)).output[0]
    erf = graph.make_node("Erf", node.input, shapes=shapes, dtypes=types).output[0]
    graph.make_node("Sub", [one, erf], outputs=[output], shapes=shapes, dtypes=types)


def _run_onnx(content: bytes, inputs: Inputs) -> Answers:
    _, onnxruntime = require_onnx()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return dict(zip((output.name for output in session.get_outputs()), found, strict=True))


RUNTIMES = {
    "litert_float32": Runtime("model.tflite", "float32", _litert(), _run_litert),
    "litert_int8": Runtime(
        "model_int8.tflite", "int8", _litert(tf.lite.Optimize.DEFAULT), _run_litert
    ),
    "onnx": Runtime("model.onnx", "float32", _onnx, _run_onnx),
}
