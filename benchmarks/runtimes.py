"""One network in each runtime that can serve it on a CPU: the rows of `benchmarks.serving`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from bnzoo.surgery import fold_batch_norm
from export.forms import build_form
from export.served import PROBABILITIES
from export.signatures import build_signatures, save_signatures

# From images [N, height, width, channels] to outputs [N, classes], both float32.
Run = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass
class Network:
    """What the runtimes are given.

    Attributes:
        model: the network as trained, Batch Normalization in.
        threads: how many threads a runtime may use.
    """

    model: keras.Model
    threads: int

    @functools.cached_property
    def folded(self) -> keras.Model:
        return fold_batch_norm(self.model)

    @functools.cached_property
    def form(self) -> tf.types.experimental.ConcreteFunction:
        """The folded network, its weights constants: what all peers but (a) are made of."""
        return build_form(self.folded, "constants")

    def form_of_batch(self, batch: int) -> tf.types.experimental.ConcreteFunction:
        """The same for one batch size, which is kinder to runtimes that plan for their shapes."""
        spec = tf.TensorSpec((batch, *self.model.input_shape[1:]), tf.float32, "images")
        form = self.form  # Made before the tracing, in which the weights could not be read.
        function = tf.function(lambda images: form(images=images), autograph=False)
        return function.get_concrete_function(spec)


def keras_export(network: Network, batch: int) -> Run:
    """Keras' own SavedModel of the network as trained: its weights are variables."""
    folder = _scratch()
    network.model.export(str(folder), verbose=False)
    return _saved_model(folder)


def exported(form: str, precision: str) -> Callable[[Network, int], Run]:
    """The SavedModel of the folded network that bnzoo-export writes."""

    def make(network: Network, batch: int) -> Run:
        folder = _scratch()
        signatures = build_signatures(network.folded, form=form, precision=precision)
        save_signatures(signatures, (), folder)
        return _saved_model(folder)

    return make


def _saved_model(folder: Path) -> Run:
    loaded = tf.saved_model.load(str(folder))
    signature = loaded.signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]

    def run(images: np.ndarray) -> np.ndarray:
        outputs = signature(**{name: tf.constant(images)})
        # What is bnzoo's has a name; Keras' export has one output.
        return outputs.get(PROBABILITIES, next(iter(outputs.values()))).numpy()

    run.keep = loaded  # type: ignore[attr-defined]  # A signature holds its variables weakly.
    return run


def onnxruntime(network: Network, batch: int) -> Run:
    """onnxruntime, from tf2onnx."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = network.threads
    session = onnxruntime.InferenceSession(_onnx(network, batch), options)
    name = session.get_inputs()[0].name
    return lambda images: session.run(None, {name: images})[0]


def _onnx(network: Network, batch: int) -> bytes:
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    form = network.form
    (spec,) = form.structured_input_signature[1].values()
    proto, _ = tf2onnx.convert.from_function(
        tf.function(lambda images: form(images=images)), [spec]
    )
    return proto.SerializeToString()


def openvino(**settings: str) -> Callable[[Network, int], Run]:
    """OpenVINO, from a SavedModel, for the batch size alone; by default in bfloat16 if it can."""

    def make(network: Network, batch: int) -> Run:
        import openvino

        folder = _scratch()
        save_signatures({"serving_default": network.form}, (), folder)
        model = openvino.convert_model(str(folder))
        model.reshape([batch, *network.model.input_shape[1:]])
        threads = {"INFERENCE_NUM_THREADS": network.threads, "PERFORMANCE_HINT": "LATENCY"}
        compiled = openvino.Core().compile_model(model, "CPU", {**threads, **settings})
        return lambda images: compiled(images)[0]

    return make


def litert(network: Network, batch: int) -> Run:
    """LiteRT, with its XNNPACK kernels, for the batch size alone."""
    from ai_edge_litert.interpreter import Interpreter

    # The converter tells about its passes on stderr.
    with contextlib.redirect_stderr(io.StringIO()):
        converter = tf.lite.TFLiteConverter.from_concrete_functions([network.form_of_batch(batch)])
        content = converter.convert()
    interpreter = Interpreter(model_content=content, num_threads=network.threads)
    interpreter.allocate_tensors()
    taken = interpreter.get_input_details()[0]["index"]
    given = interpreter.get_output_details()[0]["index"]

    def run(images: np.ndarray) -> np.ndarray:
        interpreter.set_tensor(taken, images)
        interpreter.invoke()
        return interpreter.get_tensor(given)

    return run


def _scratch() -> Path:
    return Path(tempfile.mkdtemp(dir=SCRATCH.name))


# Goes with the process.
SCRATCH = tempfile.TemporaryDirectory(prefix="bnzoo_serving_")

BASELINE = "Keras export"
# How each is made ready for a batch size, and the modules that it needs.
RUNTIMES: dict[str, tuple[Callable[[Network, int], Run], tuple[str, ...]]] = {
    BASELINE: (keras_export, ()),
    "bnzoo variables": (exported("variables", "float32"), ()),
    "bnzoo constants": (exported("constants", "float32"), ()),
    "bnzoo bfloat16": (exported("constants", "bfloat16"), ()),
    "onnxruntime": (onnxruntime, ("onnxruntime", "tf2onnx")),
    "OpenVINO float32": (openvino(INFERENCE_PRECISION_HINT="f32"), ("openvino",)),
    "OpenVINO default": (openvino(), ("openvino",)),
    "LiteRT": (litert, ("ai_edge_litert",)),
}
# Ready for any batch size once they are made.
ANY_BATCH = (BASELINE, "bnzoo variables", "bnzoo constants", "bnzoo bfloat16", "onnxruntime")
