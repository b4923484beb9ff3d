"""Event files read back, by TensorFlow and by TensorBoard, also after a run was interrupted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import tensorflow as tf

from training.command_line import RunFailed
from training.summaries import Summaries, read_events

from .helpers import disk_full_at


def points(folder: Path) -> list[tuple[int, str, float]]:
    """Step, name and value of all scalars, in the order of the files' names and their records."""
    found = []
    for path in sorted(folder.iterdir()):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def begin(folder: Path, last_step: int, monkeypatch: pytest.MonkeyPatch, pid: int) -> Summaries:
    """As a process of another number does, of which some may begin within a second."""
    monkeypatch.setattr(os, "getpid", lambda: pid)
    return Summaries(str(folder), last_step)


def test_scalars_come_back(tmp_path: Path) -> None:
    summaries = Summaries(str(tmp_path / "tensorboard"), 0)
    summaries.write(10, {"loss": 2.5, "accuracy": 0.25})
    summaries.write(20, {"loss": float("inf"), "learning_rate": 1e-7})
    summaries.sync()
    expected = [
        (10, "loss", 2.5),
        (10, "accuracy", 0.25),
        (20, "loss", float("inf")),
        (20, "learning_rate", pytest.approx(1e-7)),
    ]
    # Before the file is closed, too: somebody watches.
    assert points(tmp_path / "tensorboard") == expected
    summaries.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    events = list(tf.compat.v1.train.summary_iterator(str(path)))
    assert events[0].file_version == "brain.Event:2"
    assert all(event.wall_time > 1.6e9 for event in events)
    assert points(tmp_path / "tensorboard") == expected


def test_what_is_done_again_is_not_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begin(tmp_path, 0, monkeypatch, 1)
    for step in (10, 20, 30):
        first.write(step, {"loss": step})
    first.flush()
    # Killed as it wrote, after the checkpoint of step 20.
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + b"\x18\x00\x00")
    second = begin(tmp_path, 20, monkeypatch, 2)
    second.write(30, {"loss": 30.5})
    second.flush()
    assert points(tmp_path) == [(10, "loss", 10), (20, "loss", 20), (30, "loss", 30.5)]
    # A TensorBoard that has read the first file is told to forget.
    (path,) = set(tmp_path.iterdir()) - {path}
    start = next(event for event in read_events(str(path)) if event.HasField("session_log"))
    assert (start.step, start.session_log.status) == (21, tf.compat.v1.SessionLog.START)
    # A run that has no checkpoint yet starts anew; files of no use do not pile up.
    third = begin(tmp_path, 0, monkeypatch, 3)
    assert points(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 1
    third.close()


def test_a_process_that_goes_on_in_the_same_second_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tests do, and containers, in which each process has the same number."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    for number in range(4):
        summaries = begin(tmp_path, number, monkeypatch, 1)
        summaries.write(number + 1, {"loss": number})
        summaries.close()
    assert points(tmp_path) == [(number + 1, "loss", number) for number in range(4)]


def test_tensorboard_shows_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing import event_accumulator as accumulation

    first = begin(tmp_path, 0, monkeypatch, 1)
    watcher = accumulation.EventAccumulator(str(tmp_path))
    for step in (10, 20, 30):
        first.write(step, {"loss": step})
    first.flush()
    watcher.Reload()
    assert [point.step for point in watcher.Scalars("loss")] == [10, 20, 30]
    second = begin(tmp_path, 20, monkeypatch, 2)
    second.write(25, {"loss": 25.5})
    second.flush()
    for reader in (watcher, accumulation.EventAccumulator(str(tmp_path))):
        reader.Reload()
        assert [(point.step, point.value) for point in reader.Scalars("loss")] == [
            (10, 10),
            (20, 20),
            (25, 25.5),
        ]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(RunFailed, match=r"tensorboard cannot be written: .*exists"):
        Summaries(str(tmp_path / "tensorboard"), 0)
    with pytest.raises(RunFailed, match=r"cannot be written: "):
        Summaries("/dev/full/tensorboard", 0)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1.host.1").mkdir()
    with pytest.raises(RunFailed) as caught:
        Summaries(str(tmp_path), 10)
    told = str(caught.value)
    assert told.startswith(f"{tmp_path}/events.out.tfevents.1.host.1 cannot be read: ")
    assert told.endswith(" the same command goes on")
    assert "\n" not in told


def test_a_full_disk_leaves_the_files_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summaries = begin(tmp_path, 0, monkeypatch, 1)
    for step in range(200):
        summaries.write(step, {"loss": step})
    summaries.close()
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with (
        disk_full_at(2000),
        pytest.raises(RunFailed, match=r"\.1 cannot be written: .*File too large"),
    ):
        begin(tmp_path, 150, monkeypatch, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
