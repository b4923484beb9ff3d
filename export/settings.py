"""How a network is exported."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

TOP_K = 5
# Images of 224x224 in a step: a compromise. Without oneDNN each step's memory comes anew from the
# system, and small steps are the fastest; with it, large ones are for weights that are variables,
# which it packs at each step. Measured in docs/results/serving.md.
STEP = 16
# What a large camera gives. While it is resized, such an image takes 1.6 GB.
MAX_MEGAPIXELS = 64.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that bnzoo-export is told.

    Attributes:
        runs: run directories: one, or the members of an ensemble; none with `keras_model`.
        out: the folder of the versions.
        version: None or "next" for one above the highest, or a number.
        examples_dir: encoded images to compare on. Default: those in the first run directory.
        max_difference: see `verify.Comparison.largest`; beyond it nothing is published. Default:
            what rounding explains.
        keras_model: a file that Keras wrote, in place of a run.
        preprocessing: the JSON of a `Preprocessing`, for `keras_model`.
        labels: a class a line, for `keras_model`.
        outputs: one of `served.KINDS`.
        features: see `served.served_network`.
        top_k: how many classes and scores.
        crops: one of `crops.CROPS`.
        variables: "variables" or "constants".
        precision: one of `forms.PRECISIONS`.
        step: images that run at a time; None for `chunks.step_size`.
        max_megapixels: the largest image that `serving_bytes` decodes, in millions of pixels.
        litert: "float32", "int8" or both.
        onnx: whether there is an ONNX file.
        warmup: the batch sizes of warm-up records.
    """

    runs: tuple[Path, ...]
    out: Path
    version: str | None = None
    examples_dir: Path | None = None
    max_difference: float | None = None
    keras_model: Path | None = None
    preprocessing: Path | None = None
    labels: Path | None = None
    outputs: str = "probabilities"
    features: tuple[str, ...] = ()
    top_k: int = TOP_K
    crops: int = 1
    variables: str = "variables"
    precision: str = "float32"
    step: int | None = None
    max_megapixels: float = MAX_MEGAPIXELS
    litert: tuple[str, ...] = ()
    onnx: bool = False
    warmup: tuple[int, ...] = ()

    def form(self) -> dict[str, Any]:
        """Those that decide what the export computes, for its provenance."""
        names = (
            *("outputs", "features", "top_k", "crops", "variables", "precision", "step"),
            "max_megapixels",
        )
        return {name: getattr(self, name) for name in names}

    def runtimes(self) -> list[str]:
        """The names in `other_runtimes.RUNTIMES` that are asked for."""
        return [f"litert_{precision}" for precision in self.litert] + ["onnx"] * self.onnx
