"""bnzoo-launch with small scripts in place of training: who is started again, and who is not."""

from __future__ import annotations

import os
import signal

import pytest

from .launcher import Launcher

# The chief waits until the file `go` is there; workers and servers wait to be ended.
SERVES = """
go = os.path.join(os.environ["FOUND"], "..", "go")
while not (task["type"] == "chief" and os.path.exists(go)):
    time.sleep(0.05)
"""


def test_the_chief_goes_on_without_a_worker(launcher: Launcher) -> None:
    process = launcher.start(SERVES, "--workers=2", "--ps=1")
    launcher.wait_for(4)
    os.kill(launcher.pids("worker_1")[0], signal.SIGKILL)
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(2)]
    assert lines == [
        "bnzoo-launch: worker 1 was killed by SIGKILL\n",
        "bnzoo-launch: the others go on\n",
    ]
    (launcher.folder / "go").touch()
    assert process.wait(timeout=30) == 0
    assert launcher.left() == []


def test_a_dead_worker_is_started_again_as_often_as_restart_says(launcher: Launcher) -> None:
    process = launcher.start(SERVES, "--workers=1", "--ps=1", "--restart=1")
    launcher.wait_for(3)
    first = launcher.pids("worker_0")[0]
    os.kill(first, signal.SIGKILL)
    launcher.wait_for(4)
    (second,) = set(launcher.pids("worker_0")) - {first}
    os.kill(second, signal.SIGKILL)
    # None is left, and none may be started: the chief would wait for ever.
    assert process.wait(timeout=30) == 137
    assert process.stderr is not None
    assert process.stderr.read().splitlines() == [
        "bnzoo-launch: worker 0 was killed by SIGKILL",
        "bnzoo-launch: worker 0 is started again",
        "bnzoo-launch: worker 0 was killed by SIGKILL",
        "bnzoo-launch: ending the others",
    ]
    assert launcher.left() == []


@pytest.mark.parametrize("victim", ["chief_0", "ps_0"])
def test_the_death_of_chief_or_ps_ends_all_or_starts_all_again(
    victim: str, launcher: Launcher
) -> None:
    process = launcher.start(SERVES, "--workers=1", "--ps=1", "--restart=1", "--grace=5")
    launcher.wait_for(3)
    first = launcher.pids(victim)[0]
    os.kill(first, signal.SIGKILL)
    launcher.wait_for(6)
    (second,) = set(launcher.pids(victim)) - {first}
    os.kill(second, signal.SIGKILL)
    assert process.wait(timeout=30) == 137
    assert launcher.left() == []


def test_a_failure_that_would_come_again_is_not_started_again(launcher: Launcher) -> None:
    code, _, err = launcher.run("sys.exit(2)", "--workers=1", "--restart=5")
    assert code == 2
    assert "started again" not in err
    assert len(launcher.pids()) == 1
