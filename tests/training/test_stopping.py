"""SIGTERM, and the loss of another process."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from training import peers, progress, train
from training.cluster import Task
from training.peers import Peers
from training.stopping import StopRequest

from .helpers import read_metrics, train_argv

FLAGS = ("--steps=30", "--momentum=0.9", "--population_batches=2", "--augmentation=shift")


def test_sigterm_saves_and_the_same_command_ends_as_an_unbroken_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(train_argv(tmp_path / "whole", *FLAGS)) == 0
    update = progress.Progress.update
    stopped_at = []

    def stopping(self: progress.Progress, step: int, *figures: float) -> None:
        update(self, step, *figures)
        if not stopped_at:
            os.kill(os.getpid(), signal.SIGTERM)
            stopped_at.append(step)

    monkeypatch.setattr(progress.Progress, "update", stopping)
    before = signal.getsignal(signal.SIGTERM)
    capsys.readouterr()
    assert train.main(train_argv(tmp_path / "run", *FLAGS)) == 143
    assert signal.getsignal(signal.SIGTERM) == before
    newest = tf.train.latest_checkpoint(str(tmp_path / "run" / "checkpoints"))
    step = int(newest.rpartition("-")[2])
    # The signal comes behind the first call, and is seen behind the next one.
    assert stopped_at[0] < step < 30
    assert capsys.readouterr().err == (
        f"bnzoo-train: stopped by SIGTERM; step {step} is saved, and the same command goes on "
        "from it\n"
    )
    assert not (tmp_path / "run" / "model.keras").exists()
    assert train.main(train_argv(tmp_path / "run", *FLAGS)) == 0
    assert f"continuing at step {step}" in capsys.readouterr().out
    whole, found = (
        keras.models.load_model(tmp_path / name / "model.keras").get_weights()
        for name in ("whole", "run")
    )
    for expected, value in zip(whole, found, strict=True):
        np.testing.assert_array_equal(value, expected)
    rows = [
        [(row["step"], row["loss"]) for row in read_metrics(tmp_path / name)]
        for name in ("whole", "run")
    ]
    assert rows[0] == rows[1]


def test_sigterm_is_noted_and_no_more() -> None:
    with StopRequest() as stop:
        assert not stop.came
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.came


def test_the_peer_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LOOK_EVERY", 0.05)
    with socket.socket() as there, socket.socket() as gone:
        for one in (there, gone):
            one.bind(("127.0.0.1", 0))
            one.listen()
        addresses = tuple(f"127.0.0.1:{one.getsockname()[1]}" for one in (there, gone))
        task = Task({"worker": ("127.0.0.1:1", *addresses)}, "worker", 0)
        watching = Peers(task, "bnzoo-train")
        assert not watching.lost()
        gone.close()
        assert watching.lost()
        assert str(watching.error()).startswith(f"worker 2 at {addresses[1]} is gone; what it ")
        # Before it ends this process.
        watching.stop()
