"""Asynchronous training: nothing is lost, whatever happens to the processes."""

from __future__ import annotations

import functools
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from training import task_server
from training.atomic_optimizer import AtomicSGD
from training.cluster import Task
from training.command_line import EXIT_STOPPED, RunFailed

from .helpers import read_metrics, train_argv
from .processes import REPOSITORY, ClusterProcesses

# For a machine that does much else: alone each of these takes some seconds.
PATIENCE = 180.0


def _apply(optimizer: Any, variables: list[keras.Variable], gradients: tuple[Any, ...]) -> None:
    optimizer.apply(list(gradients), variables)


def test_atomic_sgd_has_the_numbers_of_keras_sgd() -> None:
    random = np.random.default_rng(0)
    values = [random.normal(size=shape).astype(np.float32) for shape in ((5, 7), (100,), ())]
    gradients = [
        [random.normal(size=value.shape).astype(np.float32) for value in values] for _ in range(30)
    ]
    results = []
    for kind in (keras.optimizers.SGD, AtomicSGD):
        for momentum in (0.0, 0.9):
            variables = [keras.Variable(value) for value in values]
            schedule = keras.optimizers.schedules.ExponentialDecay(0.3, 5, 0.7)
            optimizer = kind(schedule, momentum=momentum, global_clipnorm=5.0)
            optimizer.build(variables)
            apply = tf.function(functools.partial(_apply, optimizer, variables))
            for step in gradients:
                apply(tuple(map(tf.constant, step)))
            results.append([v.numpy() for v in (*variables, *optimizer.variables)] + [momentum])
            assert int(optimizer.iterations) == 30
    for mine, theirs in zip(results[:2], results[2:], strict=True):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            # A fused multiply-add may round once where two operations round twice.
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "value"),
    [("nesterov", True), ("use_ema", True), ("gradient_accumulation_steps", 2)],
)
def test_atomic_sgd_refuses_what_loses_updates(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must not be given.*Received: {name}={value}"):
        AtomicSGD(0.1, momentum=0.9, **{name: value})


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, Any]]:
    """What parameter_server_program found, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.parameter_server_program"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["test"]: line for line in lines}


def test_no_update_of_momentum_is_lost(told: dict[str, dict[str, Any]]) -> None:
    found = told["momentum"]
    # With gradients of 1, momentum and rate 1: velocity -n, weight -n (n + 1) / 2 after n updates.
    assert found["velocities"] == [[-400.0] * 3, [-800.0] * 3]
    assert found["weights"] == [[-80_200.0] * 3, [-160_400.0] * 3]
    assert found["iterations"] == 400


def test_n_scheduled_steps_count_n(told: dict[str, dict[str, Any]]) -> None:
    found = told["steps"]
    assert found["step"] == found["iterations"] == 300
    # Each of them moved the statistics.
    assert found["batches_seen"] == [300.0, 300.0]
    assert found["lengths"] == [20] * 4 + [80] * 4 + [200] * 4
    assert found["report"] == "300 steps scheduled, 300 executed"
    # Ahead of what was asked for, no more than 5 for each worker.
    assert 0 < found["under_way"] <= 10
    assert found["traces"] == 1
    # Averages over the batches seen, from the first ones on: two at a time would spoil them.
    assert found["lowest"] > 0
    assert found["losses"][1] < 0.5 < 1.0 < found["losses"][0]


def test_a_step_whose_result_is_lost_with_its_worker_is_not_done_again(
    told: dict[str, dict[str, Any]],
) -> None:
    found = told["lost"]
    assert found["report"] == "5 steps scheduled, 5 executed"
    columns = found["columns"]
    assert columns["losses"] == [0.5] * 5
    assert columns["accuracies"] == [0.25] * 5
    assert columns["gradient_norms"] == [2.0] * 5


def test_learning_rate_follows_the_steps(told: dict[str, dict[str, Any]]) -> None:
    positions = np.arange(300)
    steps = np.log(np.array(told["steps"]["rates"]) / 0.1) / np.log(0.5) * 50
    # A step reads the count while the other worker's is under way.
    assert np.abs(steps - positions).max() <= 10.01
    assert np.abs(np.sort(steps) - positions).max() <= 2.01


def test_evaluation_counts_each_example_once(told: dict[str, dict[str, Any]]) -> None:
    found = told["evaluation"]
    assert found["found"][0] == 360
    np.testing.assert_allclose(found["found"], found["expected"], rtol=1e-5)
    assert found["again"]


def test_one_step_at_a_time_is_one_device(told: dict[str, dict[str, Any]]) -> None:
    found = told["one_at_a_time"]
    assert found["start"] == 0.0
    # The same operations in the same order; convolutions and sums may be split otherwise.
    assert found["results"] < 1e-5
    assert found["variables"] < 1e-5


def test_errors_of_steps_and_other_flags_are_told(told: dict[str, dict[str, Any]]) -> None:
    assert told["error"]["kind"] == "InvalidArgumentError", told["error"]["text"]
    assert "a broken batch" in told["error"]["text"]
    assert "flags batch_size (64 and 32)" in told["facts"]["text"]


@pytest.mark.parametrize(
    ("kind", "text", "lost"),
    [
        (tf.errors.UnavailableError, "Connection reset by peer", True),
        (tf.errors.InvalidArgumentError, "Unable to find a context_id", True),
        (tf.errors.NotFoundError, "Resource localhost/_AnonymousVar3/Var does not exist", True),
        # A server has waited for what the failed step was to send it.
        (tf.errors.InvalidArgumentError, "assertion failed: [a broken batch]", False),
        (tf.errors.NotFoundError, "images.tfrecord; No such file or directory", False),
    ],
)
def test_a_server_is_lost_or_has_passed_on_an_error(
    kind: type[tf.errors.OpError], text: str, lost: bool
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        chief = Task({"chief": ("127.0.0.1:1",), "ps": (address,)}, "chief", 0)
        told = "Additional GRPC error information from remote target /job:ps/replica:0/task:0"
        line = task_server.server_lost(chief, kind(None, None, f"{text}\n{told}"))
        assert line == (task_server.server_lost_line("ps 0", address) if lost else None)
        # As where a checkpoint could not be written for it.
        outer = RunFailed("cannot write")
        outer.__cause__ = kind(None, None, f"{text}\n{told}")
        assert task_server.server_lost(chief, outer) == line
        # Without those words no server has to do with it.
        assert task_server.server_lost(chief, kind(None, None, text)) is None
    assert "ps 0" in (task_server.server_lost(chief, kind(None, None, text)) or "")


def test_servers_end_without_a_chief(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held, socket.socket() as other:
        for one in (held, other):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        chief, worker = (f"127.0.0.1:{one.getsockname()[1]}" for one in (held, other))
        task = Task({"chief": (chief,), "worker": (worker,)}, "worker", 0)
        with pytest.raises(RunFailed, match=f"no answer from the chief at {chief} for"):
            task_server.serve(task, {}, patience=0.5)
        assert f"worker 0 serves at {worker}" in capsys.readouterr().out
        alone = Task({"chief": (worker,), "worker": (chief,), "ps": (chief,)}, "chief", 0)
        with pytest.raises(RunFailed, match=rf"no answer within 0\.5 s from worker 0 at {chief}"):
            task_server.connect(alone, {}, timeout=0.5)


def argv(run_dir: Path, *more: str) -> list[str]:
    command = train_argv(run_dir, "--strategy=parameter_server", "--log_every=10", *more)
    return ["training.train", *command[1:]]


def steps_done(run_dir: Path) -> int:
    """The last step in metrics.csv."""
    try:
        return int(read_metrics(run_dir)[-1]["step"])
    except (OSError, IndexError, TypeError, ValueError):
        return 0


def test_a_killed_worker_loses_no_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ("--steps=300", "--batch_size=2000", "--population_batches=5", "--evaluate_every=300")
    with ClusterProcesses(tmp_path, argv(run_dir, *flags), workers=2, ps=1) as cluster:
        cluster.wait(lambda: steps_done(run_dir) >= 60, "60 steps", PATIENCE)
        cluster.kill("worker 1")
        assert steps_done(run_dir) < 300
        assert cluster.code("chief 0", PATIENCE) == 0
        for name in ("worker 0", "ps 0"):
            assert cluster.code(name, 30) == 0
            assert f"{name} is done" in cluster.output(name)
        output = cluster.output("chief 0")
    counts = re.search(r"300 steps scheduled, (\d+) executed", output)
    assert counts, output
    executed = int(counts[1])
    # One step at a time was under way on it.
    assert executed in (300, 301)
    assert (f"{executed - 300} ran again" in output) == (executed > 300)
    assert "ERROR" not in output
    assert steps_done(run_dir) == 300
    assert (run_dir / "model.keras").exists()
    checkpoint = tf.train.load_checkpoint(str(run_dir / "checkpoints" / "ckpt-300"))
    assert checkpoint.get_tensor("step/.ATTRIBUTES/VARIABLE_VALUE") == 300


def test_workers_return_and_runs_go_on_without_chief_or_server(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ("--steps=1000000", "--checkpoint_every=20", "--evaluate_every=1000000")
    with ClusterProcesses(tmp_path, argv(run_dir, *flags), workers=2, ps=1) as cluster:

        def goes_on(steps: int) -> None:
            start = steps_done(run_dir)
            cluster.wait(lambda: steps_done(run_dir) >= start + steps, "more steps", PATIENCE)

        def told(text: str, times: int = 1) -> None:
            cluster.wait(lambda: cluster.output("chief 0").count(text) >= times, text, PATIENCE)

        goes_on(50)
        cluster.kill("worker 1")
        told("worker 1 at")
        cluster.start("worker 1")
        told("answers again")
        goes_on(50)

        cluster.kill("ps 0")
        assert cluster.code("chief 0", PATIENCE) == EXIT_STOPPED
        assert "ps 0 at" in cluster.output("chief 0")
        assert "is lost" in cluster.output("chief 0")
        cluster.start("ps 0", "chief 0")
        told("continuing at step")
        goes_on(50)

        cluster.kill("chief 0")
        cluster.code("chief 0", 10)
        cluster.start("chief 0")
        told("continuing at step", times=2)
        goes_on(50)

        # To all, as Ctrl-C on bnzoo-launch, Slurm and Kubernetes do; the chief needs the others.
        names = ("ps 0", "worker 0", "worker 1", "chief 0")
        for name in names:
            cluster.kill(name, signal.SIGTERM)
        for name in names:
            assert cluster.code(name, PATIENCE) == EXIT_STOPPED
        output = cluster.output("chief 0")
    assert "WARNING:tensorflow" not in output
    saved = re.search(r"step (\d+) is saved", output)
    assert saved, output
    starts = [int(number) for number in re.findall(r"continuing at step (\d+)", output)]
    assert 0 < starts[0] < starts[1] < int(saved[1])
    checkpoint = tf.train.load_checkpoint(str(run_dir / "checkpoints" / f"ckpt-{saved[1]}"))
    assert checkpoint.get_tensor("step/.ATTRIBUTES/VARIABLE_VALUE") == int(saved[1])
