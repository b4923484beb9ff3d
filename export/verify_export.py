"""bnzoo-verify-export DIR [RUN ...]: is an export right, how fast is it and what does it take?"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from .errors import ExportFailed, one_line
from .verification import Report, verify
from .warmup import read_batch_sizes

USAGE = """bnzoo-verify-export [FLAGS] DIR [RUN ...]

Checks the SavedModel in DIR, a version that bnzoo-export wrote, or the model's folder, of which
the highest version is taken. It is loaded, run and timed in a process where importing Keras or
bnzoo fails, as they are missing on a server. With RUN, the run directory, or those of
an ensemble's members, its answers are compared with those of the trained network, before anything
was folded.
"""


class BadFlags(Exception):
    """What is wrong with the command line, in one line."""


def run() -> None:
    """The command bnzoo-verify-export."""
    sys.exit(main(sys.argv))


def main(argv: Sequence[str]) -> int:
    """Runs the command with `argv`, as sys.argv.

    Returns:
        0; 1 if something is wrong and 2 for bad flags, each after one line that says what.
    """
    values = _flags()
    if any(argument in ("-h", "--help", "--helpshort", "--helpfull") for argument in argv[1:]):
        print(USAGE + values.get_help())
        return 0
    # TensorFlow's C++ part tells of its kernels and missing accelerators on stderr at import.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    report: Report = {}
    problem = None
    try:
        folder, runs, batch_sizes = _parse(values, argv)
        verify(
            folder,
            runs,
            examples_dir=Path(values.examples) if values.examples else None,
            max_difference=values.max_difference,
            batch_sizes=batch_sizes,
            seconds=values.seconds,
            say=(lambda line: None) if values.json else print,
            report=report,
        )
    except BadFlags as error:
        print(f"bnzoo-verify-export: {error}", file=sys.stderr)
        return 2
    except ExportFailed as error:
        problem = str(error)
    except OSError as error:
        problem = f"cannot read: {error}"
    except KeyboardInterrupt:
        problem = "interrupted"
    except Exception as error:
        # The network of a run may have any layer in it, and so fail in any way.
        problem = f"cannot be verified: {one_line(error)}"
    if values.json:
        print(json.dumps({"ok": problem is None, "problem": problem, **report}, indent=2))
    if problem is not None:
        print(f"bnzoo-verify-export: {problem}", file=sys.stderr)
    return int(problem is not None)


def _flags() -> flags.FlagValues:
    """Flag values of this command's own, so that two commands can be imported into one process."""
    values = flags.FlagValues()
    flags.DEFINE_bool("json", False, "Print the report as one JSON object.", flag_values=values)
    flags.DEFINE_string(
        "batch_sizes",
        "1,8,32",
        "Batch sizes to time, with commas between; none if empty.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "seconds",
        2.0,
        "For how many seconds each signature is timed at each batch size; 20 runs at least.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "examples",
        None,
        "Folder of JPEG or PNG images to compare on. Default: RUN/examples; without them, noise.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "max_difference",
        None,
        "Largest difference of a probability to that of the unfolded network, as a fraction of "
        "the image's largest probability, and of another output as a fraction of its largest "
        "value; more is wrong. Default: what rounding explains, 1e-4 in "
        "float32, 1e-2 in float16 and 8e-2 in bfloat16.",
        flag_values=values,
    )
    return values


def _parse(
    values: flags.FlagValues, argv: Sequence[str]
) -> tuple[Path, tuple[Path, ...], tuple[int, ...]]:
    try:
        folders = values(list(argv))[1:]
    except flags.Error as error:
        raise BadFlags(" ".join(str(error).split())) from error
    if not folders or not all(folders):
        received = " ".join(folders) or "none"
        raise BadFlags(f"a folder is needed, DIR, and may be followed by RUN. Received: {received}")
    for name in ("examples", "max_difference"):
        if len(folders) == 1 and values[name].value is not None:
            raise BadFlags(f"--{name} needs RUN, the run directory to compare with")
    for name in ("seconds", "max_difference"):
        value = values[name].value
        if value is not None and not 0 <= value < math.inf:
            raise BadFlags(f"--{name} must be a number of at least 0. Received: --{name}={value}")
    try:
        sizes = read_batch_sizes(values.batch_sizes)
    except ValueError as error:
        raise BadFlags(f"--batch_sizes {error}") from error
    return Path(folders[0]), tuple(map(Path, folders[1:])), sizes


if __name__ == "__main__":
    run()
