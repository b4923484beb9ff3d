"""Loads, runs and times a SavedModel with nothing but TensorFlow, as a server does.

`python -P export/plain_tensorflow.py SAVED_MODEL EXAMPLES.npz ANSWERS.npz SIZES SECONDS`, run by
its path: a process in which importing bnzoo or Keras fails. It judges nothing; `verification`
does. What it finds goes to stdout, one JSON object a line, each with its `event`:

- `started`: the version of TensorFlow and the memory that it takes by itself;
- `signatures`: their inputs and outputs, as saved_model.pb has them;
- `loaded`: how long that took;
- `answered`: the outputs of each signature on the examples are in ANSWERS.npz, `signature/output`;
- `latency`: of one signature at one batch size of SIZES, timed for SECONDS;
- `failed`: why there is no more, in one line.

Memory is the most that this process held so far, in MiB.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ABSENT = ("bnzoo", "keras", "tf_keras")
NOISE = 8
_UNTIMED_RUNS = 3
_LEAST_RUNS = 20
# What the loader adds for itself; no client can call it.
_INTERNAL = "__saved_model_init_op"


def tell(event: str, **found: Any) -> None:
    """One line of what was found."""
    print(json.dumps({"event": event, **found}), flush=True)


def reason(error: Exception) -> str:
    """The line of an error that says what happened.

    It is the first; when a graph ran it is the last, behind where the nodes come from.
    """
    before = str(error).partition("\n\t [[")[0]
    lines = [line.strip() for line in before.splitlines() if line.strip()]
    if not lines:
        return "no more is known"
    return lines[-1] if lines[0].startswith("Graph execution error") else lines[0]


def peak_memory() -> float:
    """The most memory that this process held, in MiB."""
    try:
        # getrusage would count what the process was before it became this program.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024
    except (OSError, IndexError):
        import resource

        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def read_signatures(folder: Path) -> dict[str, Any]:
    """The signatures of the graph that a server loads, as saved_model.pb has them."""
    import tensorflow as tf
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    served = [graph for graph in saved.meta_graphs if "serve" in graph.meta_info_def.tags]
    if len(served) != 1:
        raise ValueError(f"{len(served)} graphs with the tag serve in saved_model.pb, must be one")

    def tensors(infos: Any) -> dict[str, Any]:
        return {
            name: {
                "dtype": tf.dtypes.as_dtype(info.dtype).name,
                "shape": None
                if info.tensor_shape.unknown_rank
                else [None if dim.size < 0 else dim.size for dim in info.tensor_shape.dim],
            }
            for name, info in sorted(infos.items())
        }

    return {
        name: {
            "method": signature.method_name,
            "inputs": tensors(signature.inputs),
            "outputs": tensors(signature.outputs),
        }
        for name, signature in sorted(served[0].signature_def.items())
        if name != _INTERNAL
    }


def noise(signatures: dict[str, Any]) -> dict[str, np.ndarray]:
    """Seeded examples of the shape that the network takes, as `verification` writes them."""
    import tensorflow as tf

    images = next(iter(signatures["serving_default"]["inputs"].values()))
    shape = _extents(images["shape"], NOISE)
    random = np.random.default_rng(0)
    examples = {"floats": random.normal(size=shape).astype(np.float32)}
    if len(shape) != 4 or shape[-1] not in (1, 3):
        return examples
    for number, image in enumerate(random.integers(0, 256, shape, dtype=np.uint8)):
        examples[f"decoded_{number}"] = image
        png = tf.io.encode_png(image).numpy()
        examples[f"encoded_{number}"] = np.frombuffer(png, np.uint8)
    return examples


def answer(function: Any, examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of one signature on all examples."""
    import tensorflow as tf

    specs = function.structured_input_signature[1]
    if [spec.dtype for spec in specs.values()] == [tf.uint8]:
        # They may differ in size, so each is a batch of its own.
        (key,) = specs
        decoded = [examples[f"decoded_{number}"] for number in range(len(examples["floats"]))]
        rows = [function(**{key: tf.constant(image[None])}) for image in decoded]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    outputs = function(**batch(function, examples, len(examples["floats"])))
    return {name: value.numpy() for name, value in outputs.items()}


def batch(function: Any, examples: dict[str, np.ndarray], size: int) -> dict[str, Any]:
    """As many examples as asked for, over again where there are fewer, of one size."""
    import tensorflow as tf

    order = [number % len(examples["floats"]) for number in range(size)]

    def values(spec: Any) -> Any:
        if spec.dtype == tf.string:
            return [examples[f"encoded_{number}"].tobytes() for number in order]
        if spec.dtype == tf.uint8:
            return np.stack([examples["decoded_0"]] * size)
        floats = examples["floats"]
        if spec.shape.is_compatible_with((size, *floats.shape[1:])):
            return floats[order]
        # The second and further inputs of a network that has them.
        return np.random.default_rng(0).normal(size=_extents(spec.shape.as_list(), size))

    specs = function.structured_input_signature[1]
    # A cast, as NumPy's noise is float64; to their own type a cast leaves tensors as they are.
    return {key: tf.cast(tf.constant(values(spec)), spec.dtype) for key, spec in specs.items()}


def _extents(shape: list[int | None], size: int) -> list[int]:
    """A shape for a batch of `size`, with 64 wherever it is open."""
    return [size, *(extent or 64 for extent in shape[1:])]


def latencies(function: Any, inputs: dict[str, Any], seconds: float) -> list[float]:
    """How long each run took, in seconds, after a few that are not timed."""
    taken: list[float] = []
    while len(taken) < _UNTIMED_RUNS + _LEAST_RUNS or sum(taken[_UNTIMED_RUNS:]) < seconds:
        started = time.perf_counter()
        for output in function(**inputs).values():
            output.numpy()
        taken.append(time.perf_counter() - started)
    return taken[_UNTIMED_RUNS:]


def main(saved_model: str, examples: str, answers: str, sizes: str, seconds: str) -> None:
    """See the module. EXAMPLES.npz is "" for noise, SIZES a list with commas or ""."""
    import tensorflow as tf

    tell("started", tensorflow=tf.__version__, memory=peak_memory())
    signatures = read_signatures(Path(saved_model))
    tell("signatures", signatures=signatures)
    started = time.perf_counter()
    model = tf.saved_model.load(saved_model)
    tell("loaded", seconds=time.perf_counter() - started, memory=peak_memory())
    images = dict(np.load(examples)) if examples else noise(signatures)
    found: dict[str, np.ndarray] = {}
    functions = {name: model.signatures[name] for name in signatures}
    for name, function in functions.items():
        for output, value in answer(function, images).items():
            # NumPy stores bytes of one length, without the zeros at their end.
            found[f"{name}/{output}"] = value.astype(bytes) if value.dtype == object else value
    np.savez(answers, **found)  # type: ignore[arg-type]
    tell("answered", examples=len(images["floats"]), memory=peak_memory())
    for name, function in functions.items():
        for size in map(int, filter(None, sizes.split(","))):
            taken = latencies(function, batch(function, images, size), float(seconds))
            tell(
                "latency",
                signature=name,
                batch=size,
                runs=len(taken),
                median=float(np.median(taken)),
                p95=float(np.percentile(taken, 95)),
                memory=peak_memory(),
            )


if __name__ == "__main__":
    # What Python finds as None in this table it refuses to import.
    sys.modules.update(dict.fromkeys(ABSENT))  # type: ignore[arg-type]
    try:
        main(*sys.argv[1:])
    except Exception as error:
        tell("failed", why=f"{type(error).__name__}: {reason(error)}")
        sys.exit(1)
