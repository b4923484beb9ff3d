"""What is wrong with an export: its signatures by TensorFlow Serving's rules, and its answers.

Each check returns the problems that it finds, one line each; none is a good export.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# What TensorFlow Serving can read from JSON and write as JSON.
REST_TYPES = {
    *("bool", "string", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
}
PREDICT = "tensorflow/serving/predict"
DEFAULT = "serving_default"
# The outputs that every signature has: their types and ranks.
OUTPUTS = {"probabilities": ("float32", 2), "scores": ("float32", 2), "classes": ("string", 2)}
# How far from 1 probabilities may add up: a softmax in bfloat16 is right to 1/256 each.
_SUM = 0.02


def wrong_signatures(
    signatures: Mapping[str, Mapping[str, Any]], labels: Sequence[str] | None, ours: bool = False
) -> Iterator[str]:
    """Problems of the signatures, as `plain_tensorflow.read_signatures` gives them.

    Args:
        signatures: by name; each with `method`, `inputs` and `outputs`, which have a `dtype` and
            a `shape`, None where it is open.
        labels: the name of each class, or None if the export has no labels.txt.
        ours: whether bnzoo is known to have made it, so that it may have other outputs than a
            classifier's.
    """
    if DEFAULT not in signatures:
        yield f"no signature {DEFAULT}, has {_names(signatures)}: no export of bnzoo"
    for name, signature in signatures.items():
        if signature["method"] != PREDICT:
            yield f"signature {name} has the method {signature['method']!r} instead of {PREDICT}"
        missing = [output for output in OUTPUTS if output not in signature["outputs"]]
        shape = signature["outputs"].get("probabilities", {}).get("shape")
        if ours and ("probabilities" in missing or (shape is not None and len(shape) != 2)):
            # Something else, which bnzoo-export --outputs=any serves as it is.
            missing = list(OUTPUTS)
        elif missing:
            yield (
                f"signature {name} has no output {missing[0]}, has {_names(signature['outputs'])}: "
                "no export of bnzoo"
            )
        if not signature["inputs"]:
            yield f"signature {name} has no input"
        for kind in ("inputs", "outputs"):
            for key, tensor in signature[kind].items():
                yield from _wrong_tensor(f"{kind[:-1]} {key} of {name}", tensor)
        for key, (dtype, rank) in OUTPUTS.items():
            if key in missing:
                continue
            tensor = signature["outputs"][key]
            shape = tensor["shape"] or [None] * rank
            if tensor["dtype"] != dtype or len(shape) != rank:
                yield f"output {key} of {name} is {_described(tensor)}, not {dtype} of rank {rank}"
            elif key == "probabilities" and labels and shape[1] not in (None, len(labels)):
                yield f"{name} has {shape[1]} classes, but labels.txt has {len(labels)} lines"


def _wrong_tensor(what: str, tensor: Mapping[str, Any]) -> Iterator[str]:
    if tensor["dtype"] not in REST_TYPES:
        yield f"{what} is {tensor['dtype']}, which cannot travel by REST"
    shape = tensor["shape"]
    if shape is not None and (not shape or shape[0] is not None):
        yield f"{what} is {_described(tensor)}: its first dimension must be the batch, of any size"


def wrong_answers(
    outputs: Mapping[str, np.ndarray],
    signature: str,
    examples: int,
    labels: Sequence[str] | None,
    kind: str = "probabilities",
) -> Iterator[str]:
    """Problems of the outputs of one signature.

    Args:
        outputs: by name.
        signature: its name.
        examples: how many there were.
        labels: the name of each class, or None if the export has no labels.txt.
        kind: "independent" if the probabilities need not add up to 1; "any" if they may be any
            numbers that are called so.
    """
    for key, value in outputs.items():
        if value.shape[:1] != (examples,):
            yield f"output {key} of {signature} has shape {value.shape} for a batch of {examples}"
            return
    if "probabilities" not in outputs or "scores" not in outputs:
        return
    probabilities, scores = outputs["probabilities"], outputs["scores"]
    if not np.isfinite(probabilities).all():
        rows = ~np.isfinite(probabilities).all(axis=-1)
        yield f"{signature} gives probabilities that are no numbers for {rows.sum()} of {examples}"
        return
    sums = probabilities.sum(axis=-1)
    if kind != "any" and probabilities.min() < 0:
        yield f"{signature} gives a probability of {probabilities.min():.4g}"
    elif kind not in ("independent", "any") and np.abs(sums - 1).max() > _SUM:
        worst = sums[np.abs(sums - 1).argmax()]
        yield f"{signature} gives probabilities that add up to {worst:.4g} instead of 1"
    if not np.array_equal(scores, -np.sort(-probabilities, axis=-1)[:, : scores.shape[1]]):
        yield f"the scores of {signature} are not its highest probabilities, best first"
    elif labels is not None and not _named(outputs["classes"], scores, probabilities, labels):
        yield f"the classes of {signature} are not those of its scores in labels.txt"


def _named(
    classes: np.ndarray, scores: np.ndarray, probabilities: np.ndarray, labels: Sequence[str]
) -> bool:
    """Whether each score is the probability of a class of that name; names may occur twice."""
    places: dict[bytes, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label.encode(), []).append(place)
    return all(
        score in row[places.get(bytes(name), [])]
        for row, names, best in zip(probabilities, classes, scores, strict=True)
        for name, score in zip(names, best, strict=True)
    )


def _described(tensor: Mapping[str, Any]) -> str:
    shape = tensor["shape"]
    extents = "any shape" if shape is None else str(["any" if e is None else e for e in shape])
    return f"{tensor['dtype']} {extents}".replace("'", "")


def _names(named: Collection[str]) -> str:
    return ", ".join(named) or "none"
