"""provenance.json: where a served model is from, and what was made of it."""

from __future__ import annotations

import csv
import dataclasses
import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bnzoo.surgery import FoldReport
from bnzoo.trained_steps import saved_step

from .verify import Comparison

FILE = Path("assets") / "provenance.json"
FORMAT_VERSION = 1
# They are not quite those of model.keras: what training puts into it at the end decides a little.
METRICS_OF = (
    "the last row of metrics.csv: with BN's moving averages and the weights of that step, before "
    "population statistics and averages of the weights were put in, if they were"
)
_PACKAGES = ("bnzoo", "tensorflow", "keras", "numpy")


def of_run(folder: Path) -> dict[str, Any]:
    """What a run directory tells of itself: name, commit, versions, flags, step and metrics.

    Files that are missing or damaged are left out: they decide nothing.
    """
    found: dict[str, Any] = {"run": folder.resolve().name}
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found |= {key: config[key] for key in ("commit", "seed", "versions") if key in config}
        flags = config.get("flags", {})
        found |= {key: flags[key] for key in ("recipe", "model", "dataset") if flags.get(key)}
    except (OSError, ValueError, AttributeError, TypeError):
        pass
    step = saved_step(folder / "model.keras")
    if step is not None:
        found["step"] = step
    try:
        with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        if step is not None:  # The run may have gone on since.
            rows = [row for row in rows if int(row["step"]) <= step]
        if rows:
            found["metrics"] = {name: _number(text) for name, text in rows[-1].items() if text}
            found["metrics_of"] = METRICS_OF
    except (OSError, ValueError, TypeError):
        pass
    return found


def write(
    folder: Path,
    sources: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    report: FoldReport,
    compared: Mapping[str, Comparison],
    allowed: Mapping[str, float],
    examples: str,
) -> None:
    """Writes the file into the SavedModel in `folder`.

    It has no time and no paths, so that two exports of one run have the same.

    Args:
        folder: a SavedModel.
        sources: what `of_run` gave of each network in it.
        settings: how it was exported.
        report: what was folded.
        compared: how far each form is from the trained network.
        allowed: the difference beyond which each would not have been published.
        examples: on what, in words.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "sources": list(sources),
        "export": dict(settings),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
        "folding": {
            "summary": report.summary,
            "batch_norms": [str(fate) for fate in report.batch_norms],
        },
        "verification": {
            "examples": examples,
            **{
                name: {**_told(found), "max_difference": allowed[name]}
                for name, found in compared.items()
            },
        },
    }
    path = folder / FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _told(comparison: Comparison) -> dict[str, Any]:
    # Sums of threads differ in their last digits, which nobody needs.
    return {
        name: float(f"{value:.1e}") if isinstance(value, float) else value
        for name, value in dataclasses.asdict(comparison).items()
        if name != "worst"  # As those sums, it may be one at one time and another at the next.
    }


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
