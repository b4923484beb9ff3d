"""bnzoo-launch with small scripts in place of training: names, logs, exit codes, and no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Each process writes its own id into the folder FOUND, so that the tests can tell who is left.
PRELUDE = """
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}_{task['index']}"
found = os.environ["FOUND"]
with open(os.path.join(found, f"{name}.{os.getpid()}"), "w"):
    pass

def ready():
    with open(os.path.join(found, "..", f"ready_{name}"), "w"):
        pass

def until(holds):
    deadline = time.monotonic() + 50
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def wait_for(*names):
    until(lambda: all(os.path.exists(os.path.join(found, "..", f"ready_{one}")) for one in names))
"""


class Launcher:
    """Runs bnzoo-launch on a script; `pids` are those of the processes that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found = folder / "found"
        self.found.mkdir()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str, *flags: str) -> subprocess.Popen[str]:
        path = self.folder / "script.py"
        path.write_text(PRELUDE + script)
        process = subprocess.Popen(
            [sys.executable, "-m", "training.launch", *flags, "--", sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FOUND": str(self.found)},
            # Where the tests run in the background of a shell, Ctrl-C is ignored, and by all that
            # they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def run(self, script: str, *flags: str) -> tuple[int, list[str], str]:
        """The exit code, the lines of stdout and stderr."""
        process = self.start(script, *flags)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.splitlines(), err

    def pids(self, name: str = "") -> list[int]:
        return [int(path.suffix[1:]) for path in self.found.iterdir() if path.name.startswith(name)]

    def wait_for(self, count: int) -> None:
        self.until(lambda: len(self.pids()) == count)

    def until(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def left(self) -> list[int]:
        return [pid for pid in self.pids() if alive(pid)]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but that nobody has waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    one = Launcher(tmp_path)
    yield one
    for process in one.started:
        process.kill()
        process.communicate()


def test_each_process_gets_its_tf_config(launcher: Launcher) -> None:
    code, lines, err = launcher.run(
        """
print(os.environ["TF_CONFIG"])
ready()
if task["type"] == "ps" or task["type"] == "worker":
    time.sleep(60)  # As servers do, they do not end by themselves.
wait_for("ps_0", "worker_0", "worker_1")
""",
        "--workers=2",
        "--ps=1",
    )
    # The chief was done: so is the cluster.
    assert (code, err) == (0, "")
    configs = dict(line.split(" | ") for line in lines)
    assert sorted(configs) == ["chief 0 ", "ps 0    ", "worker 0", "worker 1"]
    clusters = [json.loads(text)["cluster"] for text in configs.values()]
    assert all(cluster == clusters[0] for cluster in clusters)
    assert {job: len(found) for job, found in clusters[0].items()} == {
        "chief": 1,
        "worker": 2,
        "ps": 1,
    }
    every = [address for found in clusters[0].values() for address in found]
    assert len(set(every)) == 4
    assert all(address.startswith("127.0.0.1:") for address in every)
    for name, text in configs.items():
        job, index = name.split()
        assert json.loads(text)["task"] == {"type": job, "index": int(index)}
    assert launcher.left() == []


def test_without_parameter_servers_all_workers_must_be_done(launcher: Launcher) -> None:
    code, lines, err = launcher.run(
        """
assert set(json.loads(os.environ["TF_CONFIG"])["cluster"]) == {"worker"}
def leader_is_gone():
    pids = [one.partition(".")[2] for one in os.listdir(found) if one.startswith("worker_0.")]
    return pids and not os.path.exists(f"/proc/{pids[0]}")
# The leading one is not waited for alone: the launcher knows of its end, and goes on.
if task["index"] == 1:
    until(leader_is_gone)
print("done", task["index"])
sys.stderr.write("no end of line")
""",
        "--workers=2",
    )
    assert (code, err) == (0, "")
    assert lines == [
        "worker 0 | done 0",
        "worker 0 | no end of line",
        "worker 1 | done 1",
        "worker 1 | no end of line",
    ]


def test_the_port_is_kept_until_the_process_takes_it(launcher: Launcher) -> None:
    code, _, err = launcher.run(
        """
import socket
host, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].split(":")
one = socket.socket()
one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
one.bind(("", int(port)))  # As TensorFlow's server does.
one.listen()
with socket.create_connection((host, int(port)), timeout=5):
    pass
""",
        "--workers=1",
    )
    assert (code, err) == (0, "")


def test_much_output_is_whole_and_in_order(launcher: Launcher) -> None:
    _, lines, _ = launcher.run(
        """
for number in range(3000):
    print(number, "x" * 100)
print("y" * 100_000, end="", flush=True)
os._exit(0)
""",
        "--workers=2",
    )
    for name in ("worker 0 | ", "worker 1 | "):
        mine = [line.removeprefix(name) for line in lines if line.startswith(name)]
        assert mine[:3000] == [f"{number} {'x' * 100}" for number in range(3000)]
        assert "".join(mine[3000:]) == "y" * 100_000


@pytest.mark.parametrize(
    ("ending", "code", "how"),
    [
        ("sys.exit(7)", 7, "worker 1 ended with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "worker 1 was killed by SIGKILL"),
    ],
)
def test_one_failure_ends_all(ending: str, code: int, how: str, launcher: Launcher) -> None:
    script = f"""
if task["index"] == 1:
    {ending}
time.sleep(60)
"""
    found, _, err = launcher.run(script, "--workers=3")
    assert found == code
    assert err == f"bnzoo-launch: {how}\nbnzoo-launch: ending the others\n"
    assert launcher.left() == []


def test_a_process_that_does_not_heed_sigterm_is_killed(launcher: Launcher) -> None:
    started = time.monotonic()
    code, lines, _ = launcher.run(
        """
signal.signal(signal.SIGTERM, lambda *_: print("not yet"))
if task["index"] == 1:
    wait_for("worker_0")
    sys.exit(3)
ready()
while True:
    time.sleep(1)
""",
        "--grace=2",
    )
    assert (code, lines) == (3, ["worker 0 | not yet"])
    assert launcher.left() == []
    assert time.monotonic() - started < 30


def test_what_the_processes_started_is_ended_too(launcher: Launcher) -> None:
    code, _, _ = launcher.run(
        """
import subprocess
child = subprocess.Popen(["sleep", "60"])
with open(os.path.join(os.environ["FOUND"], f"sleep.{child.pid}"), "w"):
    pass
sys.exit(5)
""",
        "--workers=1",
    )
    assert code == 5
    assert len(launcher.pids()) == 2
    # It is not the launcher's own child, so the launcher cannot wait until it is gone.
    launcher.until(lambda: not launcher.left(), seconds=30)


WAITS = """
def save(*_):
    print("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, save if task["index"] == 0 else signal.SIG_DFL)
print("ready")
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(
    ("number", "flags", "code"),
    [
        (signal.SIGINT, ["--workers=2"], 130),
        # The code of the leading process, which tells whether to run it again.
        (signal.SIGTERM, ["--workers=2", "--ps=1"], 75),
    ],
)
def test_ctrl_c_and_sigterm_end_all(
    number: signal.Signals, flags: list[str], code: int, launcher: Launcher
) -> None:
    process = launcher.start(WAITS, *flags)
    count = 2 if len(flags) == 1 else 4
    seen = [process.stdout.readline() for _ in range(count)]
    assert all(line.endswith("| ready\n") for line in seen)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert "0  | saved" in out or "0 | saved" in out
    assert err == f"bnzoo-launch: {number.name}: ending {count} processes\n"
    assert launcher.left() == []


def test_sigterm_to_what_does_not_answer_it_is_143(launcher: Launcher) -> None:
    process = launcher.start("print('ready')\ntime.sleep(60)", "--workers=1")
    assert process.stdout is not None
    assert process.stdout.readline() == "worker 0 | ready\n"
    process.terminate()
    assert process.wait(timeout=30) == 143
    assert launcher.left() == []


def test_a_second_signal_kills_at_once(launcher: Launcher) -> None:
    process = launcher.start(
        "signal.signal(signal.SIGTERM, lambda *_: print('no'))\nprint('ready')\n"
        "while True:\n    time.sleep(1)",
        "--workers=1",
        "--grace=1000",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "worker 0 | ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "worker 0 | no\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert launcher.left() == []


def test_no_orphans_when_the_launcher_is_killed(launcher: Launcher) -> None:
    process = launcher.start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)", "--workers=2", "--ps=1"
    )
    launcher.wait_for(4)
    assert len(launcher.left()) == 4
    process.kill()
    launcher.until(lambda: not launcher.left())
    assert launcher.left() == []


def test_the_cluster_ends_when_nobody_reads_its_output(launcher: Launcher) -> None:
    process = launcher.start("while True:\n    print('x')\n    time.sleep(0.01)", "--workers=2")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 128 + signal.SIGPIPE
    assert process.stderr is not None
    assert process.stderr.read() == "bnzoo-launch: SIGPIPE: ending 2 processes\n"
    assert launcher.left() == []


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
