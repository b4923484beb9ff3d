from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing
from training.command_line import RunFailed
from training.data import Inputs
from training.examples import COUNT, write_examples
from training.sources import Source, digits, folder

from .helpers import image_folder


def inputs_of(source: Source, channels: int) -> Inputs:
    preprocessing = Preprocessing(image_size=(32, 32), channels=channels)
    splits = source.open_split("train"), source.open_split("test")
    return Inputs(source.labels, *splits, preprocessing, "none", 0.0)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "examples").iterdir())


def test_writes_held_out_images_with_their_class(tmp_path: Path) -> None:
    inputs = inputs_of(digits(), 1)
    (tmp_path / ".partial.examples").mkdir()  # Of a process that was killed.
    (tmp_path / ".partial.examples" / "99-0.png").write_text("half")
    write_examples(str(tmp_path), inputs)
    assert [path.name for path in tmp_path.iterdir()] == ["examples"]
    assert len(names(tmp_path)) == COUNT
    for number, name in enumerate(names(tmp_path)):
        position = number * (360 // COUNT)
        raw = tf.constant(position, tf.int64)
        image, label = inputs.evaluation.read(raw, inputs.preprocessing)
        assert name == f"{number:02d}-{label}.png"
        contents = (tmp_path / "examples" / name).read_bytes()
        np.testing.assert_array_equal(inputs.preprocessing.decode(contents), image)


def test_of_a_folder_all_classes_and_what_is_there_is_kept(tmp_path: Path) -> None:
    classes = dict.fromkeys("abcd", 9)
    root = image_folder(tmp_path / "images", {"train": classes, "test": classes})
    write_examples(str(tmp_path), inputs_of(folder(str(root)), 3))
    # 36 images, every second one.
    assert [name[3:4] for name in names(tmp_path)] == list("0000011112222233")
    (tmp_path / "examples" / names(tmp_path)[0]).unlink()
    write_examples(str(tmp_path), inputs_of(folder(str(root)), 3))
    assert len(names(tmp_path)) == COUNT - 1


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "images", {"train": {"a": 2}, "test": {"a": 2}})
    (root / "test" / "a" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    with pytest.raises(RunFailed, match=r"test/a/1\.png cannot be read: .*Replace the file"):
        write_examples(str(tmp_path), inputs_of(folder(str(root)), 3))
    assert [path.name for path in tmp_path.iterdir()] == ["images"]
