"""Flags, messages and exit codes that the commands share."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from training import evaluate
from training.command_line import BadFlags, Flag, RunFailed, help_text, parse, run_command
from training.train_flags import TRAIN_FLAGS

GROUPS = {
    "One": (Flag("count", "integer", "How many, in pieces.", 3),),
    "Two": (Flag("names", "list", "Names."), Flag("loud", "boolean", "Whether loud.", False)),
}


def test_parse_returns_values_and_arguments() -> None:
    values, arguments = parse(GROUPS, ["program", "--count=4", "there", "--names=a,b", "--loud"])
    assert (values.count, values.names, values.loud, arguments) == (4, ["a", "b"], True, ["there"])


def test_two_commands_may_share_the_names_of_flags() -> None:
    first, _ = parse(GROUPS, ["program", "--count=4"])
    second, _ = parse(GROUPS, ["program"])
    assert (first.count, second.count) == (4, 3)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--coumt=4", "Unknown command line flag 'coumt'"),
        ("--count=four", "four"),
        ("--noloud=3", "--noloud=3"),
    ],
)
def test_bad_flag_is_one_line_and_exit_code_2(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("program", "", GROUPS, lambda values, arguments: None, ["x", argument]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("program: ")
    assert message in error


def test_each_problem_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def command(values: object, arguments: object) -> None:
        raise BadFlags("first is wrong", "second is wrong")

    assert run_command("program", "", GROUPS, command, ["x"]) == 2
    assert capsys.readouterr().err == "program: first is wrong\nprogram: second is wrong\n"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [(RunFailed("no disk"), 1, "program: no disk\n"), (KeyboardInterrupt(), 130, "interrupted\n")],
)
def test_exit_codes(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(values: object, arguments: object) -> None:
        raise error

    assert run_command("program", "", GROUPS, command, ["x"]) == code
    assert capsys.readouterr().err.endswith(text)


PRINTS = """
import sys, time
from training.command_line import run_command
from training.progress import Progress
def command(values, arguments):
    for step in range(3000):
        Progress(3000, 0).update(step, 0.5, 0.5, 0.1, 100.0)
        time.sleep(0.01)
sys.exit(run_command("program", "What for.", {}, command))
"""


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_nobody_reads_the_output(arguments: list[str]) -> None:
    """As in `bnzoo-train ... | head -1`, but that the reader is gone already."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", PRINTS, *arguments]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_names_that_the_terminal_cannot_show_end_no_run() -> None:
    code = (
        "import os, sys; from training.command_line import run_command;"
        "command = lambda values, arguments: print(os.fsdecode(b'caf\\xe9'), '\u0416');"
        "sys.exit(run_command('program', '', {}, command))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"caf\\udce9 \\u0416\n"


def test_another_broken_pipe_is_not_taken_for_that() -> None:
    def command(values: object, arguments: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "of a socket")

    with pytest.raises(BrokenPipeError, match="of a socket"):
        run_command("program", "", GROUPS, command, ["x"])


def test_success_is_0() -> None:
    assert run_command("program", "", GROUPS, lambda values, arguments: None, ["x"]) == 0


@pytest.mark.parametrize("groups", [TRAIN_FLAGS, evaluate.FLAGS])
def test_help_has_each_flag_in_its_area_with_a_text(groups: dict[str, tuple[Flag, ...]]) -> None:
    text = help_text("usage", groups)
    places = []
    for area, flags in groups.items():
        places.append(text.index(f"\n{area}:\n"))
        for flag in flags:
            assert len(flag.help) > 20
            places.append(text.index(f"{flag.name}\n", places[-1]))
    assert places == sorted(places)


def test_help_flag_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("program", "What for.", GROUPS, None, ["x", "--help"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("What for.\n\nOne:\n  --count\n      How many, in pieces. Default: 3.")
    assert "--[no]loud" in output
