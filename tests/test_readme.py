"""What README.md and docs/serving.md tell the reader to run."""

from __future__ import annotations

import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import bnzoo
from bnzoo.preprocessing import Preprocessing
from export.signatures import build_signatures, save_signatures
from training.command_line import parse
from training.recipes import RECIPES
from training.settings import resolve
from training.train_flags import TRAIN_FLAGS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a Markdown text in one language; "" are those without."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [code for name, code in found if name == language]


@pytest.mark.data
def test_the_fine_tuning_code_runs_on_cifar_10(
    data_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow_datasets as tfds

    (code,) = blocks(README, "python")
    # What `make demo` leaves: the network, of digits.
    (tmp_path / "runs" / "demo" / "bn_x5").mkdir(parents=True)
    digits = bnzoo.models.bn_inception(
        input_shape=(32, 32, 1), classes=10, stem="small", width_multiplier=0.25
    )
    digits.save(tmp_path / "runs" / "demo" / "bn_x5" / "model.keras")
    monkeypatch.chdir(tmp_path)

    load = tfds.load

    def load_few(name: str, split: list[str], **options: Any) -> Any:
        few = [f"{part}[:128]" for part in split]
        folder = os.path.join(data_folder, "tensorflow_datasets")
        return load(name, split=few, data_dir=folder, **options)

    monkeypatch.setattr(tfds, "load", load_few)
    names: dict[str, Any] = {}
    exec(compile(code.replace("epochs=3", "epochs=1"), "README.md", "exec"), names)
    history = names["model"].history.history
    assert names["model"].output_shape == (None, 10)
    assert all(math.isfinite(history[name][-1]) for name in ("loss", "val_loss"))
    # Two steps of training: the shared layers have moved away from the source.
    tuned = names["model"].get_layer("inception_5b_1x1").kernel
    assert not np.allclose(tuned, digits.get_layer("inception_5b_1x1").kernel)


def test_the_fine_tuning_code_is_about_ten_lines() -> None:
    (code,) = blocks(README, "python")
    assert len([line for line in code.splitlines() if line]) <= 16


def test_the_training_commands_are_right() -> None:
    lines = [line for block in blocks(README, "") for line in block.splitlines()]
    starts = (
        line.partition(" -- ")[2] if line.startswith("bnzoo-launch ") else line for line in lines
    )
    commands = [shlex.split(line) for line in starts if line.startswith("bnzoo-train ")]
    assert len(commands) == 5
    for command in commands:
        values, arguments = parse(TRAIN_FLAGS, command)
        assert not arguments
        assert resolve(values.flag_values_dict()).recipe == "bn_x5"


def test_every_recipe_is_named() -> None:
    paragraph = README[README.index("A recipe is") : README.index("Any flag changes")]
    assert set(re.findall(r"`(\w+)`", paragraph)) == set(RECIPES)


def test_serving_in_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # tests/export/test_requests.py runs what speaks to a server.
    (code,) = (block for block in blocks(SERVING, "python") if "grpc" not in block)
    image = keras.Input((8, 8, 3))
    outputs = keras.layers.Dense(3, activation="softmax")(keras.layers.Flatten()(image))
    signatures = build_signatures(
        keras.Model(image, outputs), Preprocessing(image_size=(8, 8)), ("rose", "tulip", "daisy")
    )
    save_signatures(signatures, [], tmp_path / "models" / "flowers" / "1")
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    (tmp_path / "rose.jpg").write_bytes(tf.io.encode_jpeg(picture).numpy())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "serving.md", "exec"), names)
    assert {name.decode() for name in names["answer"]["classes"].numpy()[0]} == {
        "rose",
        "tulip",
        "daisy",
    }
