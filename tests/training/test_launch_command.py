"""bnzoo-launch: what of it needs no cluster."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from training import launch


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workers=0", "--", "true"], "--workers must be a number of at least 1. Received: --w"),
        (["--ps=-1", "--", "true"], "--ps must be a number of at least 0. Received: --ps=-1"),
        (["--grace=nan", "--", "true"], "--grace must be a number of at least 0. Received"),
        (["--restart=-1", "--", "true"], "--restart must be a number of at least 0. Received"),
        (["true"], "the command must stand behind --. Received: true"),
        ([], "there must be a command behind --, such as"),
        (["--", "no_such_program"], "there is no program to run of the name no_such_program"),
        (["--wrokers=2", "--", "true"], "Unknown command line flag 'wrokers'"),
    ],
)
def test_bad_flags(argv: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["bnzoo-launch", *argv]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"bnzoo-launch: {message}")
    assert error.count("\n") == 1


def test_help_of_the_command_is_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "import sys; print(sys.argv[1])", "--help"]
    assert launch.main(["bnzoo-launch", "--workers=1", "--", *command]) == 0
    assert capfd.readouterr().out == "worker 0 | --help\n"
    assert launch.main(["bnzoo-launch", "--help", "--", "echo"]) == 0
    assert capfd.readouterr().out.startswith("bnzoo-launch [--workers=N] [--ps=N]")


def test_signal_handlers_are_put_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert launch.main(["bnzoo-launch", "--workers=1", "--", "true"]) == 0
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_the_launcher_does_not_wait_for_tensorflow() -> None:
    code = (
        "import sys; from training import launch; launch.main(['x', '--workers=0']);"
        "print(sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n"
