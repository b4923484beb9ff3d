"""bnzoo-export RUN OUT: a trained network as a SavedModel for TensorFlow Serving."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from .errors import ExportFailed
from .versions import NEXT, choose_version, is_version, written_aside
from .warmup import read_batch_sizes, require_messages, write_warmup

USAGE = """bnzoo-export [FLAGS] RUN OUT

Writes OUT/<version>/, a SavedModel of the network in the run directory RUN with Batch
Normalization folded away, for TensorFlow Serving or any other program on TensorFlow. It is
loaded back and compared with the trained network before it gets its name.
"""
EXAMPLES = "examples"


class BadFlags(Exception):
    """What is wrong with the command line, in one line."""


def export(
    run_dir: Path,
    out: Path,
    *,
    version: str | None = None,
    examples_dir: Path | None = None,
    max_difference: float | None = None,
    warmup: Sequence[int] = (),
) -> Path:
    """Exports a run, and prints what it did.

    Args:
        run_dir: the run directory.
        out: the folder of the versions.
        version: None for the first one, "next" or a number.
        examples_dir: encoded images to compare on. Default: those in the run directory.
        max_difference: see `Comparison.largest`; beyond it nothing is published. Default: what
            rounding explains.
        warmup: the batch sizes of the requests that a server is to send itself first.

    Returns:
        The SavedModel's folder.

    Raises:
        ExportFailed: see the message.
    """
    number = choose_version(out, version)
    if warmup:
        require_messages()
    # Imported here: TensorFlow takes seconds, and most mistakes can be told without it.
    from bnzoo.surgery import fold_batch_norm

    from .run_directory import read_examples, read_run, synthetic_examples
    from .signatures import build_signatures, save_signatures
    from .verify import allowed_difference, compare

    run = read_run(run_dir)
    examples = read_examples(examples_dir or run_dir / EXAMPLES)
    if examples_dir is not None and not examples:
        raise ExportFailed(f"no images in {examples_dir}")
    origin = f"images of {examples_dir or run_dir / EXAMPLES}"
    if not examples:
        examples, origin = synthetic_examples(run.preprocessing), "images of noise"
    try:
        folded, report = fold_batch_norm(run.network, return_report=True)
    except (TypeError, ValueError) as error:
        raise ExportFailed(f"the network of {run_dir} cannot be folded: {error}") from error
    print(report.summary)
    for fate in report.batch_norms:
        if fate.outcome != "folded":
            print(f"  {fate}")
    if max_difference is None:
        max_difference = allowed_difference(run.network)
    with written_aside(out, number) as aside:
        signatures = build_signatures(folded, run.preprocessing, run.labels)
        save_signatures(signatures, run.assets, aside)
        print(f"Difference to the unfolded network on {len(examples)} {origin}:")
        for name, found in compare(aside, run.network, run.preprocessing, examples).items():
            print(f"  {name}: {found.largest:.1e}, same class {found.agreement:.1%}")
            if not found.largest <= max_difference:
                raise ExportFailed(
                    f"{name} differs from the unfolded network by {found.largest:.1e}, more than "
                    f"--max_difference={max_difference:g}: nothing was published"
                )
        if warmup:
            count, sizes = write_warmup(aside, warmup, examples[0]), ", ".join(map(str, warmup))
            print(f"Warm-up: {count} requests, each signature with {sizes} images")
    print(f"Wrote {out / str(number)}")
    return out / str(number)


def run() -> None:
    """The command bnzoo-export."""
    sys.exit(main(sys.argv))


def main(argv: Sequence[str]) -> int:
    """Runs the command with `argv`, as sys.argv.

    Returns:
        0; 2 for bad flags and 1 for an export that failed, each after one line that says why.
    """
    values = _flags()
    if any(argument in ("-h", "--help", "--helpshort", "--helpfull") for argument in argv[1:]):
        print(USAGE + values.get_help())
        return 0
    # TensorFlow's C++ part tells of its kernels and missing accelerators on stderr at import.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        run_dir, out = _parse(values, argv)
        export(
            run_dir,
            out,
            version=values.version,
            examples_dir=Path(values.examples) if values.examples else None,
            max_difference=values.max_difference,
            warmup=_warmup(values),
        )
    except (BadFlags, ExportFailed) as error:
        print(f"bnzoo-export: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadFlags) else 1
    except OSError as error:
        print(f"bnzoo-export: cannot write or read: {error}", file=sys.stderr)
        return 1
    return 0


def _flags() -> flags.FlagValues:
    """Flag values of this command's own, so that two commands can be imported into one process."""
    values = flags.FlagValues()
    flags.DEFINE_string(
        "version",
        None,
        "Version to write: a whole number, or next for one above the highest in OUT. "
        "Needed if OUT has a version already; else 1.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "examples",
        None,
        f"Folder of JPEG or PNG images to compare on. Default: RUN/{EXAMPLES}, the held-out "
        "images that training leaves there; without them, noise.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "max_difference",
        None,
        "Largest difference of a probability to that of the unfolded network, as a fraction of "
        "the image's largest probability; beyond it nothing is published. Default: what rounding "
        "explains, 1e-4 in float32, 1e-2 in float16 and 8e-2 in bfloat16.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "warmup",
        "",
        "Batch sizes, with commas between, of requests that TensorFlow Serving sends itself before "
        "it serves the version: one a size and signature. Default: none.",
        flag_values=values,
    )
    return values


def _warmup(values: flags.FlagValues) -> tuple[int, ...]:
    try:
        return read_batch_sizes(values.warmup)
    except ValueError as error:
        raise BadFlags(f"--warmup {error}") from error


def _parse(values: flags.FlagValues, argv: Sequence[str]) -> tuple[Path, Path]:
    try:
        folders = values(list(argv))[1:]
    except flags.Error as error:
        raise BadFlags(" ".join(str(error).split())) from error
    if len(folders) != 2 or not all(folders):
        received = " ".join(folders) or "none"
        raise BadFlags(f"two folders are needed, RUN and OUT. Received: {received}")
    if values.version is not None and values.version != NEXT and not is_version(values.version):
        raise BadFlags(
            f"--version must be {NEXT} or a whole number. Received: --version={values.version}"
        )
    if values.max_difference is not None and not 0 <= values.max_difference < math.inf:
        raise BadFlags(
            "--max_difference must be a number of at least 0. "
            f"Received: --max_difference={values.max_difference}"
        )
    return Path(folders[0]), Path(folders[1])


if __name__ == "__main__":
    run()
