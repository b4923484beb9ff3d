"""What is said of damaged images, of memory that is out and of disks that are full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from bnzoo.preprocessing import Preprocessing
from training import data, evaluate, failures, running, sources, train
from training.checkpoints import Checkpoints
from training.command_line import RunFailed
from training.examples import write_examples
from training.finish import write_model
from training.metrics import MetricsFile
from training.networks import build_model

from .helpers import disk_full_at, image_folder, read_metrics, settings, train_argv

RGB = Preprocessing(image_size=(8, 8))
COUNTS = {"train": {"a": 6, "b": 6}, "test": {"a": 3, "b": 2}}


def damage(path: Path, how: str) -> Path:
    """Makes the image `path` one that cannot be decoded, and returns its new path."""
    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut off":
        path.write_bytes(path.read_bytes()[:60])
    elif how == "cut off JPEG":
        jpeg = path.with_suffix(".jpg")
        Image.open(path).resize((40, 40)).save(jpeg)
        jpeg.write_bytes(jpeg.read_bytes()[:-200])
        path.unlink()
        return jpeg
    elif how == "text":
        path.write_text("<html>not found</html>")
    return path


DAMAGES = {
    "empty": "Input is empty",
    "cut off": "Invalid PNG data, size 60",
    "cut off JPEG": "jpeg::Uncompress failed. Invalid JPEG data or crop window",
    "text": "Unknown image file format. One of JPEG, ",
}

CUT_OFF = "cannot be read: Invalid PNG data, size 60. Replace the file or remove it"


@pytest.mark.parametrize("how", DAMAGES)
def test_the_first_damaged_image_is_named_with_what_is_wrong(how: str, tmp_path: Path) -> None:
    root = image_folder(tmp_path, COUNTS)
    split = sources.folder(str(root)).open_split("train")
    assert failures.first_damaged(split, RGB) is None
    bad = damage(root / "train" / "a" / "4.png", how)
    damage(root / "train" / "b" / "1.png", "empty")
    line = failures.first_damaged(sources.folder(str(root)).open_split("train"), RGB)
    assert line is not None
    assert line.startswith(f"{bad} cannot be read: {DAMAGES[how]}")
    assert line.endswith(". Replace the file or remove it")
    assert "\n" not in line


@pytest.mark.parametrize(("split", "augmentation"), [("train", "shift"), ("test", "none")])
def test_train_ends_with_one_line_that_names_the_file(
    split: str, augmentation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = image_folder(tmp_path / "data", COUNTS)
    path = damage(root / split / "b" / "1.png", "cut off")
    flags = ("--batch_size=4", "--steps=3", f"--augmentation={augmentation}")
    assert train.main(train_argv(tmp_path / "run", f"--dataset=folder:{root}", *flags)) == 1
    assert capsys.readouterr().err == f"bnzoo-train: {path} {CUT_OFF}\n"
    assert not (tmp_path / "run" / "model.keras").exists()


def test_evaluate_ends_with_one_line_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = image_folder(tmp_path / "data", COUNTS)
    argv = train_argv(tmp_path / "run", f"--dataset=folder:{root}", "--batch_size=4", "--steps=1")
    assert train.main(argv) == 0
    path = damage(root / "test" / "b" / "1.png", "cut off")
    capsys.readouterr()
    assert evaluate.main(["bnzoo-evaluate", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == f"bnzoo-evaluate: {path} {CUT_OFF}\n"


def failing(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            tf.errors.ResourceExhaustedError(
                None,
                None,
                "Graph execution error:\n\nDetected at node add defined at (most recent call "
                "last):\n<stack traces unavailable>\nOOM when allocating tensor with shape[9,9]\n"
                "\t [[{{node add}}]]\nHint: If you want to see a list of\n [Op:__inference_x_1]",
            ),
            "out of memory: OOM when allocating tensor with shape[9,9]. "
            "A smaller --batch_size may help",
        ),
        (
            tf.errors.InternalError(
                None, None, "{{function_node __wrapped__X}} cuDNN broke. [Op:X] name: \nmore"
            ),
            "TensorFlow failed: cuDNN broke",
        ),
    ],
)
def test_other_errors_of_a_step_are_one_line_too(
    error: tf.errors.OpError,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(running, "make_train_steps", lambda *_: failing(error))
    assert train.main(train_argv(tmp_path / "run", "--steps=3")) == 1
    assert capsys.readouterr().err == f"bnzoo-train: {message}\n"


def test_weights_beyond_the_memory_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = train_argv(tmp_path / "run", "--image_size=2000000")  # 1.6e15 bytes.
    assert train.main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("bnzoo-train: out of memory for the weights: OOM when allocating")
    assert error.count("\n") == 1


RUN = ("--batch_size=100", "--steps=8", "--population_batches=1")


def test_full_disk_keeps_the_checkpoint_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second checkpoint does not fit; with room again the run ends as an unbroken one."""
    flags = (*RUN, "--checkpoint_every=4", "--momentum=0.9")
    assert train.main(train_argv(tmp_path / "whole", *flags)) == 0
    save = Checkpoints.save

    def full(self: Any) -> None:
        if int(self._step) == 8:
            with disk_full_at(50_000):
                save(self)
        else:
            save(self)

    monkeypatch.setattr(Checkpoints, "save", full)
    argv = train_argv(tmp_path / "full", *flags)
    checkpoints = tmp_path / "full" / "checkpoints"
    for _ in range(2):
        assert train.main(argv) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert error.startswith(
            f"bnzoo-train: checkpoint 8 in {checkpoints} cannot be written: {checkpoints}/ckpt-8"
        )
        assert "File too large. What was saved before is kept; once there is room" in error
        assert sorted(path.name for path in checkpoints.iterdir()) == [
            "checkpoint",
            "ckpt-4.data-00000-of-00001",
            "ckpt-4.index",
        ]
    monkeypatch.setattr(Checkpoints, "save", save)
    assert train.main(argv) == 0
    assert "continuing at step 4" in capsys.readouterr().out
    assert [row["loss"] for row in read_metrics(tmp_path / "full")] == [
        row["loss"] for row in read_metrics(tmp_path / "whole")
    ]


def test_model_that_does_not_fit_leaves_nothing_half(tmp_path: Path) -> None:
    chosen = settings()
    model = build_model(chosen, data.open_inputs(chosen))
    path = tmp_path / "model.keras"
    path.write_text("old")
    with (
        disk_full_at(20_000),
        pytest.raises(RunFailed, match=r"model\.keras cannot be written: .*File too large"),
    ):
        write_model(str(tmp_path), model, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.keras"]
    assert path.read_text() == "old"


def test_metrics_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    metrics = MetricsFile(str(tmp_path / "metrics.csv"), 0)
    metrics.write({"step": 1})
    match = r"metrics\.csv cannot be written: File too large\. What"
    with disk_full_at(120), pytest.raises(RunFailed, match=match):
        metrics.write({"step": 2, "loss": 0.123456, "accuracy": 0.234567})


def test_examples_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    match = "examples cannot be written: File too"
    with disk_full_at(10), pytest.raises(RunFailed, match=match):
        write_examples(str(tmp_path), data.open_inputs(settings()))
    assert list(tmp_path.iterdir()) == []


def test_run_dir_below_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    assert train.main(train_argv(tmp_path / "file" / "run", *RUN)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"bnzoo-train: {tmp_path}/file/run cannot be written: Not a directory")
    assert error.count("\n") == 1


def test_damaged_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = train_argv(tmp_path, *RUN)
    assert train.main(argv) == 0
    (tmp_path / "model.keras").unlink()
    for path in (tmp_path / "checkpoints").glob("*.data*"):
        path.write_bytes(path.read_bytes()[:100])
    capsys.readouterr()
    assert train.main(argv) == 1
    error = capsys.readouterr().err
    assert f"the checkpoint {tmp_path}/checkpoints/ckpt-8 cannot be restored: " in error
    assert error.endswith(". --overwrite begins the run anew\n")
    assert error.count("\n") == 1


def tfrecords(path: Path, payloads: list[bytes]) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for payload in payloads:
            writer.write(payload)


def test_a_damaged_record_is_named_by_its_position(tmp_path: Path) -> None:
    """Images as records, as TFDS keeps them: one that is no image, then a file that is cut off."""
    png = tf.io.encode_png(np.zeros((4, 4, 3), np.uint8)).numpy()
    path = tmp_path / "records"

    def split() -> sources.Split:
        return sources.Split(
            examples=4,
            shuffled=lambda seed: tf.data.TFRecordDataset(str(path)),
            ordered=lambda: tf.data.TFRecordDataset(str(path)),
            read=lambda raw, preprocessing: (preprocessing.decode(raw), tf.constant(0)),
            locate="example {} of x".format,
            remedy="Prepare it again",
        )

    tfrecords(path, [png, png, b"no image", png])
    match = r"^example 2 of x cannot be read: Unknown image file .*"
    with pytest.raises(RunFailed, match=match), failures.explained(split(), RGB):
        list(data.evaluation_batches(split(), RGB, 2))
    tfrecords(path, [png] * 4)
    path.write_bytes(path.read_bytes()[:-20])
    match = r"^example 3 of x .*truncated.*\. Prepare it again$"
    with pytest.raises(RunFailed, match=match), failures.explained(split(), RGB):
        list(data.evaluation_batches(split(), RGB, 2))


def test_of_several_errors_the_first_is_told() -> None:
    text = "2 root error(s) found.\n  (0) UNAVAILABLE: Socket closed\n\t [[{{node a}}]]\n (1) B:"
    error = tf.errors.UnavailableError(None, None, text)
    assert failures.reason(error) == "(0) UNAVAILABLE: Socket closed"
