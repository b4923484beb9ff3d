"""What the commands share: flags in groups, one line for each mistake, and the exit codes."""

from __future__ import annotations

import dataclasses
import io
import os
import select
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

EXIT_FAILED = 1
EXIT_BAD_FLAGS = 2
EXIT_UNREAD = 141  # What a shell reports of a program that SIGPIPE ended.
EXIT_INTERRUPTED = 130  # What a shell reports of a program that Ctrl-C ended.
# What it reports of one that SIGTERM ended; job schedulers start such a one again.
EXIT_STOPPED = 143


class BadFlags(Exception):
    """What is wrong with the flags: one line for each problem."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RunFailed(Exception):
    """Why a run cannot go on, in one line."""


class RunStopped(Exception):
    """That a run was told to stop and can be started again, in one line."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag: its name, its type ("string", "integer", "float", "boolean" or "list") and help.

    Where `default` is None the command finds the value itself, as `help` says.
    """

    name: str
    kind: str
    help: str
    default: Any = None


FlagGroups = Mapping[str, Sequence[Flag]]

_DEFINE: dict[str, Callable[..., Any]] = {
    "string": flags.DEFINE_string,
    "integer": flags.DEFINE_integer,
    "float": flags.DEFINE_float,
    "boolean": flags.DEFINE_boolean,
    "list": flags.DEFINE_list,
}


def parse(groups: FlagGroups, argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """The flags' values and the arguments that are no flags.

    Each command has flag values of its own, not absl's global ones, so that two commands can be
    imported into one process though they share names of flags.

    Raises:
        BadFlags: an unknown flag, or a value of another type.
    """
    values = flags.FlagValues()
    for group in groups.values():
        for flag in group:
            _DEFINE[flag.kind](flag.name, flag.default, flag.help, flag_values=values)
    try:
        arguments = values(list(argv))
    except (flags.Error, ValueError) as error:  # The latter of --noNAME=VALUE.
        raise BadFlags(" ".join(str(error).split())) from error
    return values, arguments[1:]


def help_text(usage: str, groups: FlagGroups) -> str:
    """The help of a command: `usage`, then the flags by area."""
    lines = [usage]
    for area, group in groups.items():
        lines += ["", f"{area}:"]
        for flag in group:
            name = f"--[no]{flag.name}" if flag.kind == "boolean" else f"--{flag.name}"
            default = "" if flag.default is None else f" Default: {flag.default}."
            text = textwrap.fill(flag.help + default, width=72)
            lines += [f"  {name}", textwrap.indent(text, "      ")]
    return "\n".join(lines)


def run_command(
    program: str,
    usage: str,
    groups: FlagGroups,
    command: Callable[[flags.FlagValues, list[str]], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Parses `argv`, runs `command`, and turns how it ends into an exit code.

    Args:
        program: the name before each message.
        usage: the first lines of the help.
        groups: the flags.
        command: gets the flags' values and the other arguments.
        argv: as sys.argv, which is the default.

    Returns:
        0; 2 for bad flags; 1 for a run that failed, after one line that says why; 130 for Ctrl-C;
        143 for a run that SIGTERM stopped and that the same command continues; 141, without a
        word, where nobody reads what it prints, such as `| head -1`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal cannot show, such as the name of a folder that is no UTF-8, ends no run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _ended(program, usage, groups, command, sys.argv if argv is None else argv)
        # Now and not when Python ends, which would tell of it.
        sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise  # It was another pipe.
        return EXIT_UNREAD
    return code


def _nobody_reads() -> bool:
    """Whether the reader of stdout is gone; then what is still to come goes nowhere."""
    # Asked, and not tried: after a failure Python may have thrown away what it was to write.
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in pipe.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def _ended(
    program: str,
    usage: str,
    groups: FlagGroups,
    command: Callable[[flags.FlagValues, list[str]], None],
    argv: Sequence[str],
) -> int:
    """How the command ended, as an exit code."""
    if any(argument in ("-h", "--help", "--helpfull", "--helpshort") for argument in argv[1:]):
        print(help_text(usage, groups))
        return 0
    # TensorFlow's C++ part tells of its kernels and missing accelerators on stderr at import.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        values, arguments = parse(groups, argv)
        command(values, arguments)
    except BadFlags as error:
        for problem in error.problems:
            print(f"{program}: {problem}", file=sys.stderr)
        return EXIT_BAD_FLAGS
    except RunFailed as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except RunStopped as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_STOPPED
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0
