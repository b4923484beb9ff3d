"""Whether an export is right, how fast it is and what it takes: the work of bnzoo-verify-export."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ExportFailed
from .served_checks import wrong_answers, wrong_signatures

_PROGRAM = Path(__file__).with_name("plain_tensorflow.py")

Report = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Reference:
    """What the trained network says of the examples."""

    probabilities: np.ndarray
    examples: dict[str, np.ndarray]
    origin: str
    max_difference: float


def verify(
    folder: Path,
    run_dir: Path | None = None,
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
        run_dir: the run directory that it was exported from, to compare with.
        examples_dir: encoded images to compare on. Default: those in the run directory.
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
    labels = _labels(folder)
    reference = None
    if run_dir is not None:
        reference = _reference(run_dir, examples_dir, max_difference)
    with tempfile.TemporaryDirectory(prefix="bnzoo-verify-") as scratch:
        files = {name: os.path.join(scratch, f"{name}.npz") for name in ("examples", "answers")}
        if reference is not None:
            np.savez(files["examples"], **reference.examples)  # type: ignore[arg-type]
        arguments = [
            *(str(folder), files["examples"] if reference else "", files["answers"]),
            *(",".join(map(str, batch_sizes)), str(seconds)),
        ]
        for event, found in _events(arguments, os.path.join(scratch, "log")):
            _tell(event, found, report, say)
            if event == "signatures":
                _fail_on(wrong_signatures(report["signatures"], labels))
            elif event == "answered":
                _judge(dict(np.load(files["answers"])), report, labels, reference, say)
    return report


def served_version(folder: Path) -> Path:
    """The SavedModel that a server takes from `folder`: itself, or its highest version.

    Raises:
        ExportFailed: there is none.
    """
    if not folder.is_dir():
        raise ExportFailed(f"no folder {folder}")
    if not (folder / "saved_model.pb").is_file():
        versions = [entry for entry in folder.iterdir() if entry.name.isdecimal()]
        if not versions:
            raise ExportFailed(
                f"no SavedModel in {folder}: neither saved_model.pb nor a folder named as a version"
            )
        folder = max(versions, key=lambda entry: int(entry.name))
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
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except UnicodeDecodeError as error:
        raise ExportFailed(f"{path} is no text: {error}") from error


def _reference(
    run_dir: Path, examples_dir: Path | None, max_difference: float | None
) -> _Reference:
    # Imported here: TensorFlow and Keras take seconds, and without RUN they are not needed.
    import tensorflow as tf

    from .run_directory import read_examples, read_run, synthetic_examples
    from .verify import allowed_difference

    run = read_run(run_dir)
    origin = examples_dir or run_dir / "examples"
    encoded = read_examples(origin)
    if examples_dir is not None and not encoded:
        raise ExportFailed(f"no images in {examples_dir}")
    described = f"{len(encoded)} images of {origin}"
    if not encoded:
        encoded = synthetic_examples(run.preprocessing)
        described = f"{len(encoded)} images of noise"
    try:
        decoded = [run.preprocessing.decode(contents) for contents in encoded]
    except tf.errors.InvalidArgumentError as error:
        raise ExportFailed(f"an example is no image: {error.message.splitlines()[0]}") from error
    floats = tf.stack([run.preprocessing(image) for image in decoded])
    examples = {"floats": floats.numpy()}
    for number, (image, contents) in enumerate(zip(decoded, encoded, strict=True)):
        examples[f"decoded_{number}"] = image.numpy()
        examples[f"encoded_{number}"] = np.frombuffer(contents, np.uint8)
    return _Reference(
        tf.cast(run.network(floats, training=False), tf.float32).numpy(),
        examples,
        described,
        allowed_difference(run.network) if max_difference is None else max_difference,
    )


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


def _judge(
    answers: dict[str, np.ndarray],
    report: Report,
    labels: tuple[str, ...] | None,
    reference: _Reference | None,
    say: Callable[[str], object],
) -> None:
    for name in report["signatures"]:
        examples = len(answers[f"{name}/probabilities"])
        if reference is not None:
            examples = len(reference.probabilities)
        _fail_on(wrong_answers(answers, name, examples, labels))
    if reference is None:
        say("Not compared with the trained network: no RUN was given")
        return
    report["difference"] = {}
    say(f"Difference to the unfolded network on {reference.origin}:")
    for name in report["signatures"]:
        found = difference(answers[f"{name}/probabilities"], reference.probabilities)
        report["difference"][name] = found
        say(
            f"  {name}: largest {found['largest']:.1e}, mean {found['mean']:.1e}, "
            f"same class {found['agreement']:.1%}"
        )
    for name, found in report["difference"].items():
        if not found["largest"] <= reference.max_difference:
            raise ExportFailed(
                f"{name} differs from the unfolded network by {found['largest']:.1e}, more than "
                f"--max_difference={reference.max_difference:g}"
            )


def difference(answer: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Largest and mean difference, as `verify.Comparison` has them, and top-1 agreement."""
    if answer.shape != expected.shape:
        raise ExportFailed(
            f"it has {answer.shape[-1]} classes, the network of the run {expected.shape[-1]}"
        )
    relative = np.abs(answer - expected) / expected.max(axis=-1, keepdims=True)
    return {
        "largest": float(relative.max()),
        "mean": float(relative.mean()),
        "agreement": float(np.mean(answer.argmax(-1) == expected.argmax(-1))),
    }


def _fail_on(problems: Iterator[str]) -> None:
    for problem in problems:
        raise ExportFailed(problem)
