"""bnzoo-launch with small scripts in place of training: names, logs, exit codes, and no orphans."""

from __future__ import annotations

import json
import signal
import time

import pytest

from .launcher import Launcher


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
