"""Whether an export is right, how fast it is and what it takes: the work of bnzoo-verify-export."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bnzoo.class_names import class_names

from .errors import ExportFailed
from .served_checks import DEFAULT, wrong_answers, wrong_signatures
from .versions import served_as
from .warmup import FILE, check_warmup

_PROGRAM = Path(__file__).with_name("plain_tensorflow.py")

Report = dict[str, Any]
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Reference:
    """What the trained network says of the examples.

    Attributes:
        alone: its outputs by name, for its own inputs.
        of_images: the same for images, which may be averages over crops.
        arrays: the examples, as `plain_tensorflow` reads them.
        origin: where they are from, in words.
        max_difference: what is allowed.
    """

    alone: Arrays
    of_images: Arrays
    arrays: Arrays
    origin: str
    max_difference: float


def verify(
    folder: Path,
    runs: Sequence[Path] = (),
    *,
    examples_dir: Path | None = None,
    max_difference: float | None = None,
    batch_sizes: Sequence[int] = (1, 8, 32),
    seconds: float = 2.0,
    say: Callable[[str], object] = print,
    report: Report | None = None,
) -> Report:
    """Checks and measures an export.

    Args:
        folder: the folder of a version, or of all.
        runs: the run directories that it was exported from, to compare with; several are the
            members of an ensemble.
        examples_dir: encoded images to compare on. Default: those in the first run directory.
        max_difference: see `verify.Comparison.largest`. Default: what rounding explains.
        batch_sizes: those to time.
        seconds: for how long each signature is timed at each batch size, at least.
        say: gets the report for a reader, line by line, as it comes.
        report: filled as far as it gets, also where this fails.

    Returns:
        The report for a program: `folder`, `size`, `signatures`, `difference`, `latency`, ...

    Raises:
        ExportFailed: something is wrong with the export; the first thing that is.
    """
    report = {} if report is None else report
    folder = served_version(folder)
    report.update(folder=str(folder), size=_sizes(folder))
    say(f"{folder}: {_size_line(report['size'])}")
    labels, settings = _labels(folder), _settings(folder)
    reference = _reference(runs, settings, examples_dir, max_difference) if runs else None
    with tempfile.TemporaryDirectory(prefix="bnzoo-verify-") as scratch:
        files = {name: os.path.join(scratch, f"{name}.npz") for name in ("examples", "answers")}
        if reference is not None:
            np.savez(files["examples"], **reference.arrays)  # type: ignore[arg-type]
        arguments = [
            *(str(folder), files["examples"] if reference else "", files["answers"]),
            *(",".join(map(str, batch_sizes)), str(seconds)),
        ]
        for event, found in _events(arguments, os.path.join(scratch, "log")):
            _tell(event, found, report, say)
            if event == "signatures":
                _fail_on(wrong_signatures(report["signatures"], labels, bool(settings)))
                if reference is not None:
                    _check_input(report["signatures"][DEFAULT]["inputs"], reference)
            elif event == "answered":
                answers = dict(np.load(files["answers"]))
                kind = settings.get("outputs", "probabilities")
                for name in report["signatures"]:
                    own = _of_signature(answers, name)
                    _fail_on(wrong_answers(own, name, found["examples"], labels, kind))
                _compare(answers, report, reference, say)
    # After what is timed. Without records TensorFlow is not imported here.
    if (folder / FILE).is_file():
        report["warmup"] = check_warmup(folder)
        say(report["warmup"])
    return report


def served_version(folder: Path) -> Path:
    """The SavedModel that a server takes from `folder`: itself, or its highest version.

    Raises:
        ExportFailed: there is none.
    """
    if not folder.is_dir():
        raise ExportFailed(f"no folder {folder}")
    if not (folder / "saved_model.pb").is_file():
        named = ((served_as(entry.name), entry) for entry in folder.iterdir())
        versions = {number: entry for number, entry in named if number is not None}
        if not versions:
            raise ExportFailed(
                f"no SavedModel in {folder}: neither saved_model.pb nor a folder named as a version"
            )
        folder = versions[max(versions)]
        if not (folder / "saved_model.pb").is_file():
            raise ExportFailed(f"no saved_model.pb in {folder}, the highest version")
    return folder


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes on disk of all and of each part."""
    parts = {
        entry.name: sum(
            file.stat().st_size for file in [entry, *entry.rglob("*")] if file.is_file()
        )
        for entry in sorted(folder.iterdir())
    }
    return {"all": sum(parts.values()), **parts}


def _size_line(sizes: dict[str, int]) -> str:
    parts = sorted(((size, name) for name, size in sizes.items() if name != "all"), reverse=True)
    largest = ", ".join(f"{name} {_size(size)}" for size, name in parts[:3])
    return f"{_size(sizes['all'])} on disk ({largest})"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _labels(folder: Path) -> tuple[str, ...] | None:
    path = folder / "assets" / "labels.txt"
    if not path.is_file():
        return None
    try:
        return class_names(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ExportFailed(f"{path} is no text: {error}") from error


def _settings(folder: Path) -> dict[str, Any]:
    """How the export was made, by its provenance; nothing if it has none."""
    path = folder / "assets" / "provenance.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["export"])
    except (ValueError, KeyError, TypeError) as error:
        raise ExportFailed(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _reference(
    runs: Sequence[Path],
    settings: dict[str, Any],
    examples_dir: Path | None,
    max_difference: float | None,
) -> _Reference:
    # Imported here: TensorFlow and Keras take seconds, and without a run they are not needed.
    from .served import served_network
    from .sources import examples_of, of_runs
    from .verify import allowed_difference, expected_outputs

    source = of_runs(runs)
    # Exports of before there was a limit have none.
    limit = settings.get("max_megapixels", math.inf)
    examples = examples_of(source, examples_dir, limit)
    kind, features = settings.get("outputs", "probabilities"), settings.get("features", ())
    network = served_network(source.network, kind, features)
    alone, of_images = expected_outputs(network, examples, settings.get("crops", 1))
    arrays = {"floats": next(iter(examples.inputs.values())).numpy()}
    for number, (image, contents) in enumerate(
        zip(examples.decoded, examples.encoded, strict=True)
    ):
        arrays[f"decoded_{number}"] = image.numpy()
        arrays[f"encoded_{number}"] = np.frombuffer(contents, np.uint8)
    if max_difference is None:
        max_difference = allowed_difference(network, settings.get("precision", "float32"))
    origin = f"{len(examples)} {examples.origin}"
    return _Reference(alone, of_images, arrays, origin, max_difference)


def _events(arguments: Sequence[str], log: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events that `plain_tensorflow` tells; it ends with this generator, if not before.

    Raises:
        ExportFailed: it could not do its work.
    """
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    # -P: this folder's modules are not to be taken for others of the same name.
    command = [sys.executable, "-P", str(_PROGRAM), *arguments]
    with open(log, "w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            event = found.pop("event")
            if event == "failed":
                raise ExportFailed(
                    f"{arguments[0]} is damaged or no SavedModel that TensorFlow alone can run: "
                    f"{found['why']}"
                )
            yield event, found
        if process.wait():
            last = Path(log).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise ExportFailed(
                f"the process that runs {arguments[0]} ended with {process.returncode}: "
                f"{last[-1] if last else 'it said nothing'}"
            )
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def _tell(event: str, found: dict[str, Any], report: Report, say: Callable[[str], object]) -> None:
    """Puts what an event found into the report, and says it."""
    if event == "started":
        report.update(tensorflow=found["tensorflow"], memory={"tensorflow": found["memory"]})
    elif event == "signatures":
        report["signatures"] = found["signatures"]
        for name, signature in found["signatures"].items():
            say(f"  {name}: {_tensors(signature['inputs'])}")
            say(f"    -> {_tensors(signature['outputs'])}")
    elif event == "loaded":
        report["load_seconds"] = found["seconds"]
        report["memory"]["loaded"] = found["memory"]
        say(
            f"Loaded in {found['seconds']:.2f} s by TensorFlow {report['tensorflow']} without "
            f"Keras and bnzoo; memory {report['memory']['tensorflow']:.0f} MiB before, "
            f"{found['memory']:.0f} after"
        )
    elif event == "latency":
        if "latency" not in report:
            report["latency"] = []
            say(f"  {'ms a batch':<24}{'median':>9}{'p95':>9}{'images/s':>10}{'peak MiB':>10}")
        report["latency"].append(found)
        report["memory"]["peak"] = found["memory"]
        median, p95 = 1e3 * found["median"], 1e3 * found["p95"]
        say(
            f"  {found['signature']:<19}{found['batch']:>5}{median:>9.2f}{p95:>9.2f}"
            f"{found['batch'] / found['median']:>10.1f}{found['memory']:>10.0f}"
        )


def _tensors(tensors: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {tensor['dtype']}"
        + ("" if tensor["shape"] is None else f" {_extents(tensor['shape'])}")
        for name, tensor in tensors.items()
    )


def _extents(shape: Iterable[int | None]) -> str:
    return "[" + ", ".join("any" if extent is None else str(extent) for extent in shape) + "]"


def _check_input(inputs: dict[str, Any], reference: _Reference) -> None:
    """Whether the export takes what the network of the run does; without it nothing would run."""
    takes = next(iter(inputs.values()))["shape"]
    given = reference.arrays["floats"].shape
    if takes is not None and (
        len(takes) != len(given)
        or any(extent not in (None, own) for extent, own in zip(takes, given, strict=True))
    ):
        raise ExportFailed(
            f"{DEFAULT} takes {_extents(takes)}, but the network of the run "
            f"{_extents([None, *given[1:]])}: it was not exported from this run"
        )


def _of_signature(answers: Arrays, signature: str) -> Arrays:
    """The outputs of one signature by their own names."""
    parts = {key: key.partition("/") for key in answers}
    return {parts[key][2]: value for key, value in answers.items() if parts[key][0] == signature}


def _compare(
    answers: Arrays, report: Report, reference: _Reference | None, say: Callable[[str], object]
) -> None:
    if reference is None:
        say("Not compared with the trained network: no RUN was given")
        return
    from .verify import compared

    report["difference"] = {}
    say(f"Difference to the unfolded network on {reference.origin}:")
    for name in report["signatures"]:
        expected = reference.alone if name == DEFAULT else reference.of_images
        own = _of_signature(answers, name)
        for output, wanted in expected.items():
            given = own[output].shape if output in own else None
            if given != wanted.shape:
                raise ExportFailed(
                    f"output {output} of {name} has shape {given}, but {wanted.shape} by the run"
                )
        comparison = compared(own, expected)
        report["difference"][name] = dataclasses.asdict(comparison)
        say(f"  {name}: {comparison}")
    for name, found in report["difference"].items():
        if not found["largest"] <= reference.max_difference:
            what = f"output {found['worst']} of {name}" if found["worst"] else name
            raise ExportFailed(
                f"{what} differs from the unfolded network by {found['largest']:.1e}, more than "
                f"--max_difference={reference.max_difference:g}"
            )


def _fail_on(problems: Iterator[str]) -> None:
    for problem in problems:
        raise ExportFailed(problem)
