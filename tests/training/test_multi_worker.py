"""Two processes of bnzoo-train: one result, one report; stopped, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from training import evaluate

from .helpers import read_metrics, train_argv
from .processes import Program, cluster, kill, tf_configs

FLAGS = (
    "--strategy=multi_worker",
    "--batch_size=50",
    "--momentum=0.9",
    "--population_batches=3",
    "--checkpoint_every=50",
    "--log_every=40",
    "--evaluate_every=1000",
    "--cluster_timeout=120",
)


def command(run_dir: Path, *flags: str) -> list[str]:
    return ["-m", "training.train", *train_argv(run_dir, *FLAGS, *flags)[1:]]


@pytest.fixture
def started() -> Iterator[list[Program]]:
    """Programs that are put in here end with the test."""
    programs: list[Program] = []
    yield programs
    kill(programs)


def newest(run_dir: Path) -> int:
    steps = [int(path.stem.split("-")[1]) for path in (run_dir / "checkpoints").glob("*.index")]
    return max(steps, default=0)


def outputs(runs: list[Program]) -> str:
    return "\n".join(run.text for run in runs)


def test_both_end_with_one_checksum_and_the_chief_reports(tmp_path: Path) -> None:
    """Case 17: 4 steps, within 120 s."""
    start = time.monotonic()
    runs = cluster(tmp_path, command(tmp_path / "run", "--steps=4"))
    assert [run.wait(120) for run in runs] == [0, 0], outputs(runs)
    assert time.monotonic() - start < 120
    checksums = [run.lines("checksum ") for run in runs]
    assert checksums[0] == checksums[1]
    assert len(checksums[0][0]) == len("checksum ") + 64
    for beginning in ("mnist_mlp by recipe", "step 4/4", f"{tmp_path}/run: held-out accuracy"):
        assert [len(run.lines(beginning)) for run in runs] == [1, 0]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == ["4"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["flags"]["steps"] == 4
    assert os.listdir(tmp_path / "run" / "checkpoints")
    assert evaluate.main(["bnzoo-evaluate", str(tmp_path / "run")]) == 0


def test_stopped_and_killed_the_run_ends_as_an_unbroken_one(
    tmp_path: Path, started: list[Program]
) -> None:
    """SIGTERM to one; SIGKILL of the one and of the other; a torn checkpoint; then to the end."""
    folder = tmp_path / "run"
    flags = ("--steps=1500",)
    whole = cluster(tmp_path, command(tmp_path / "whole", *flags))
    started += whole
    assert [run.wait() for run in whole] == [0, 0], outputs(whole)

    runs = cluster(tmp_path, command(folder, *flags))
    started += runs
    runs[0].until(lambda: newest(folder) >= 100)
    runs[1].process.send_signal(signal.SIGTERM)
    assert [run.wait(120) for run in runs] == [143, 143], outputs(runs)
    step = newest(folder)
    for run in runs:
        assert run.lines(f"bnzoo-train: stopped by SIGTERM; step {step} is saved, and the same ")

    for victim in (1, 0):
        before = newest(folder)
        runs = cluster(tmp_path, command(folder, *flags))
        started += runs
        runs[0].until(lambda before=before: newest(folder) >= before + 100)
        assert runs[0].lines(f"continuing at step {before}"), runs[0].text
        runs[victim].process.kill()
        survivor = runs[1 - victim]
        assert survivor.wait(120) == 1, survivor.text
        address = json.loads(tf_config_of(runs[victim]))["cluster"]["worker"][victim]
        assert survivor.lines(f"bnzoo-train: worker {victim} at {address} is gone; "), survivor.text

    torn = newest(folder)
    data = next((folder / "checkpoints").glob(f"ckpt-{torn}.data*"))
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    runs = cluster(tmp_path, command(folder, *flags))
    started += runs
    assert [run.wait() for run in runs] == [0, 0], outputs(runs)
    assert runs[0].lines(f"the checkpoint {folder}/checkpoints/ckpt-{torn} is damaged: ")
    assert runs[0].lines(f"continuing at step {torn - 50}")
    assert runs[0].lines("checksum ") == runs[1].lines("checksum ") == whole[0].lines("checksum ")
    expected, found = (
        keras.models.load_model(path / "model.keras").get_weights()
        for path in (tmp_path / "whole", folder)
    )
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, two)
    assert [row["step"] for row in read_metrics(folder)] == [
        row["step"] for row in read_metrics(tmp_path / "whole")
    ]
    # Only the chief's files, and none that are temporary.
    names = {path.name.partition("-")[0] for path in (folder / "checkpoints").iterdir()}
    assert names == {"checkpoint", "ckpt"}
    assert tf.train.latest_checkpoint(str(folder / "checkpoints")).endswith("ckpt-1500")


def test_nobody_is_done_before_the_network_is_written(tmp_path: Path) -> None:
    """Else the chief, started again without the others, could not make up for it."""
    (tmp_path / "run" / ".partial.model.keras").mkdir(parents=True)
    runs = cluster(tmp_path, command(tmp_path / "run", "--steps=2"))
    assert [run.wait(120) for run in runs] == [1, 1], outputs(runs)
    assert f"{tmp_path}/run/model.keras cannot be written: Is a directory" in runs[0].text
    assert runs[1].lines("bnzoo-train: worker 0 at "), runs[1].text


def tf_config_of(program: Program) -> str:
    return program.environment["TF_CONFIG"]


def test_others_flags_are_refused_and_a_missing_process_is_named(
    tmp_path: Path, started: list[Program]
) -> None:
    first, second = tf_configs(2)
    argv = command(tmp_path / "run", "--steps=4")
    other = command(tmp_path / "other", "--steps=4", "--learning_rate=0.3")
    lonely = command(tmp_path / "lonely", "--steps=4", "--cluster_timeout=2")
    alone = tf_configs(2)[0]
    address = json.loads(alone)["cluster"]["worker"]
    runs = [
        Program(tmp_path / "0.log", argv, {"TF_CONFIG": first}),
        Program(tmp_path / "1.log", other, {"TF_CONFIG": second}),
        Program(tmp_path / "2.log", lonely, {"TF_CONFIG": alone}),
    ]
    started += runs
    assert [run.wait(120) for run in runs] == [2, 2, 1], outputs(runs)
    for run in runs[:2]:
        assert (
            "does not run the same as worker 0: flag learning_rate (0.1 and 0.3), flag run_dir "
            f"({tmp_path}/run and {tmp_path}/other). All processes must be started alike\n"
        ) in run.text
    assert f"no answer within 2 s from worker 1 at {address[1]} (" in runs[2].text
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "lonely").exists()
