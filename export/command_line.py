"""The flags of bnzoo-export."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from .settings import MAX_MEGAPIXELS, STEP, TOP_K, Settings
from .versions import NEXT, is_version
from .warmup import read_batch_sizes

USAGE = """bnzoo-export [FLAGS] RUN [RUN ...] OUT
bnzoo-export [FLAGS] --keras_model=FILE OUT

Writes OUT/<version>/, a SavedModel of the network in the run directory RUN with Batch
Normalization folded away, for TensorFlow Serving or any other program on TensorFlow. Several
runs become one model, their ensemble. It is loaded back and compared with the trained network
before it gets its name.
"""
# As literals, since the modules that know them import TensorFlow, which takes seconds; that they
# are the same is tested.
OUTPUTS = ("probabilities", "logits", "independent", "any")
CROPS = ("1", "10", "144")
VARIABLES = ("variables", "constants")
PRECISIONS = ("float32", "bfloat16")
LITERT = ("float32", "int8")
# TensorFlow decodes no image of more than 2^29 pixels.
_MOST_MEGAPIXELS = 2**29 / 1e6
# Far from where TensorFlow's count of images, in 32 bits, would overflow.
_MOST_STEP = 2**20
_OF_PATTERNS = "*?[]\\"

_STRINGS = {
    "version": (
        "Version to write: a whole number that OUT does not have, or next for one above the "
        "highest, the default."
    ),
    "examples": (
        "Folder of JPEG or PNG images to compare on. Default: RUN/examples, the held-out images "
        "that training leaves there; without them, noise."
    ),
    "keras_model": (
        "A .keras or .h5 file to export in place of a run. Without --preprocessing it has "
        "serving_default only."
    ),
    "preprocessing": "With --keras_model: the preprocessing.json of the network.",
    "labels": "With --keras_model: a text file with the name of one class a line.",
    "warmup": "Batch sizes of warm-up records for TensorFlow Serving, such as 1,8,32.",
}
_CHOICES = {
    "outputs": (
        OUTPUTS,
        "What the network gives: class probabilities, which sum to 1; logits, behind which a "
        "softmax is put; independent probabilities of each class, as of a sigmoid; or any.",
    ),
    "crops": (
        CROPS,
        "Crops of an image whose outputs are averaged by serving_bytes and serving_uint8.",
    ),
    "variables": (
        VARIABLES,
        "Where weights are: variables beside the graph, or constants in it, which runtimes "
        "optimize further; those are read into memory anew by each signature that is used.",
    ),
    "precision": (
        PRECISIONS,
        "What weights are stored as and layers compute in; inputs and outputs are float32, and so "
        "is the classifier.",
    ),
}
_LISTS = {
    "features": (
        "Layers, or endpoints of the papers, whose outputs are served as features; pooled is what "
        "the classifier sees."
    ),
    "litert": "LiteRT files to write into assets.extra: float32, int8 (dynamic range) or both.",
}


class BadFlags(Exception):
    """What is wrong with the command line, in one line."""


def make_flags() -> flags.FlagValues:
    """Flag values of this command's own, so that two commands can be imported into one process."""
    values = flags.FlagValues()
    for name, text in _STRINGS.items():
        flags.DEFINE_string(name, None, text, flag_values=values)
    flags.DEFINE_float(
        "max_difference",
        None,
        "Largest difference of a probability to that of the unfolded network, as a fraction of "
        "the image's largest probability, and of another output as a fraction of its largest "
        "value; beyond it nothing is published. Default: what rounding explains, 1e-4 in float32, "
        "1e-2 in float16, 8e-2 in bfloat16 and 0.2 for --litert=int8.",
        flag_values=values,
    )
    for name, (choices, text) in _CHOICES.items():
        flags.DEFINE_enum(name, choices[0], choices, text, flag_values=values)
    for name, text in _LISTS.items():
        flags.DEFINE_list(name, [], text, flag_values=values)
    flags.DEFINE_integer(
        "top_k", TOP_K, "How many classes and scores to serve, best first.", flag_values=values
    )
    flags.DEFINE_integer(
        "step",
        None,
        "Images that run at a time; a larger batch runs in steps. Default: as many as have the "
        f"pixels of {STEP} images of 224x224, for processors; more is faster on accelerators.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "max_megapixels",
        MAX_MEGAPIXELS,
        "The largest image that serving_bytes decodes, in millions of pixels; a request with a "
        "larger one is refused, since a file of some kilobytes may need gigabytes.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "onnx", False, "Write an ONNX file into assets.extra, too.", flag_values=values
    )
    return values


def parse(values: flags.FlagValues, argv: Sequence[str]) -> Settings:
    """The settings that `argv`, as sys.argv, asks for.

    Raises:
        BadFlags: it makes no sense.
    """
    try:
        folders = values(list(argv))[1:]
    except flags.Error as error:
        raise BadFlags(" ".join(str(error).split())) from error
    _check_folders(values, folders)
    if set(folders[-1]) & set(_OF_PATTERNS):
        raise BadFlags(
            f"OUT must not have any of {' '.join(_OF_PATTERNS)} in it: TensorFlow takes the name "
            "of a SavedModel for a pattern, and would not find its variables. "
            f"Received: {folders[-1]}"
        )
    if values.version is not None and values.version != NEXT and not is_version(values.version):
        raise BadFlags(
            f"--version must be {NEXT} or a whole number of at most 18 digits, without zeros "
            f"before it. Received: --version={values.version}"
        )
    if values.max_difference is not None and not 0 <= values.max_difference < math.inf:
        raise BadFlags(
            "--max_difference must be a number of at least 0. "
            f"Received: --max_difference={values.max_difference}"
        )
    if not 1e-6 <= values.max_megapixels <= _MOST_MEGAPIXELS:
        raise BadFlags(
            f"--max_megapixels must be a number of at least 1e-6, one pixel, and at most "
            f"{_MOST_MEGAPIXELS:g}. Received: --max_megapixels={values.max_megapixels:g}"
        )
    for name in ("top_k", "step"):
        number = getattr(values, name)
        if number is not None and number < 1:
            raise BadFlags(f"--{name} must be at least 1. Received: --{name}={number}")
    if values.step is not None and values.step > _MOST_STEP:
        raise BadFlags(f"--step must be at most {_MOST_STEP}. Received: --step={values.step}")
    return Settings(
        runs=tuple(map(Path, folders[:-1])),
        out=Path(folders[-1]),
        version=values.version,
        examples_dir=_path(values.examples),
        max_difference=values.max_difference,
        keras_model=_path(values.keras_model),
        preprocessing=_path(values.preprocessing),
        labels=_path(values.labels),
        outputs=values.outputs,
        features=_names(values, "features"),
        top_k=values.top_k,
        crops=int(values.crops),
        variables=values.variables,
        precision=values.precision,
        step=values.step,
        max_megapixels=values.max_megapixels,
        litert=_names(values, "litert", LITERT),
        onnx=values.onnx,
        warmup=_sizes(values.warmup or ""),
    )


def _check_folders(values: flags.FlagValues, folders: Sequence[str]) -> None:
    received = " ".join(folders) or "none"
    if values.keras_model == "":
        raise BadFlags("--keras_model must be a .keras or .h5 file. Received: --keras_model=")
    if values.keras_model is not None:
        if len(folders) != 1 or not folders[0]:
            raise BadFlags(f"with --keras_model one folder is needed, OUT. Received: {received}")
        if values.preprocessing is None and (values.examples or values.crops != "1"):
            raise BadFlags("--examples and --crops need --preprocessing where there is no run")
        return
    if len(folders) < 2 or not all(folders):
        raise BadFlags(f"two folders are needed, RUN and OUT. Received: {received}")
    if (Path(folders[-1]) / "model.keras").is_file():
        raise BadFlags(f"the last folder must be OUT, but {folders[-1]} is a run directory")
    for name in ("preprocessing", "labels"):
        if getattr(values, name) is not None:
            raise BadFlags(f"--{name} is for --keras_model: a run has its own")


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _names(values: Any, flag: str, allowed: Sequence[str] | None = None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in getattr(values, flag))
    wrong = [name for name in names if not name or (allowed is not None and name not in allowed)]
    if wrong or len(set(names)) < len(names):
        of = " of " + ", ".join(allowed) if allowed is not None else ""
        raise BadFlags(
            f"--{flag} must be a list{of}, each once. Received: --{flag}={','.join(names)}"
        )
    return names


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return read_batch_sizes(text)
    except ValueError as error:
        raise BadFlags(f"--warmup {error}") from error
