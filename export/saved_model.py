"""bnzoo-export RUN OUT: a trained network as a SavedModel for TensorFlow Serving."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .command_line import USAGE, BadFlags, make_flags, parse
from .errors import ExportFailed
from .settings import Settings
from .versions import choose_version

EXIT_INTERRUPTED = 130  # What a shell reports of a program that Ctrl-C ended.


def export(
    run_dir: Path | Sequence[Path],
    out: Path,
    *,
    version: str | None = None,
    examples_dir: Path | None = None,
    max_difference: float | None = None,
    **settings: object,
) -> Path:
    """Exports a run, or the ensemble of several, and prints what it did.

    Args:
        run_dir: the run directory, or those of the ensemble's members.
        out: the folder of the versions.
        version, examples_dir, max_difference and others: see `settings.Settings`.

    Returns:
        The SavedModel's folder.

    Raises:
        ExportFailed: see the message.
    """
    runs = (run_dir,) if isinstance(run_dir, Path) else tuple(run_dir)
    return export_with(
        dataclasses.replace(
            Settings(runs, out, version, examples_dir, max_difference),
            **settings,  # type: ignore[arg-type]
        )
    )


def export_with(settings: Settings) -> Path:
    """As `export`, of settings."""
    # What needs no TensorFlow, which takes seconds, is found out first.
    choose_version(settings.out, settings.version)
    from .procedure import run_export

    return run_export(settings)


def run() -> None:
    """The command bnzoo-export."""
    sys.exit(main(sys.argv))


def main(argv: Sequence[str]) -> int:
    """Runs the command with `argv`, as sys.argv.

    Returns:
        0; 2 for bad flags and 1 for an export that failed, each after one line that says why.
    """
    values = make_flags()
    if any(argument in ("-h", "--help", "--helpshort", "--helpfull") for argument in argv[1:]):
        print(USAGE + values.get_help())
        return 0
    # TensorFlow's C++ part tells of its kernels and missing accelerators on stderr at import.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        export_with(parse(values, argv))
    except (BadFlags, ExportFailed) as error:
        print(f"bnzoo-export: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadFlags) else 1
    except OSError as error:
        print(f"bnzoo-export: cannot write or read: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bnzoo-export: interrupted, nothing was published", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    run()
