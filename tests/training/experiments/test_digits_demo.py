from __future__ import annotations

import os
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing
from training.command_line import parse
from training.experiments import digits_demo
from training.experiments.digits_demo import Curve
from training.settings import resolve
from training.sources import digits
from training.train_flags import TRAIN_FLAGS

BASELINE = Curve("inception", [45, 90, 135], [0.10, 0.75, 0.70], 31.4)
BETTER = Curve("bn_x5", [45, 90, 135], [0.60, 0.80, 0.90], 45.6)


def test_best_and_steps_to() -> None:
    assert BASELINE.best == 0.75
    assert BASELINE.steps_to(0.75) == 90
    assert BETTER.steps_to(BASELINE.best) == 90
    assert BETTER.steps_to(0.6) == 45
    assert BETTER.steps_to(0.91) is None


def test_table() -> None:
    assert digits_demo.table([BASELINE, BETTER]).splitlines() == [
        "| recipe    | rate  | best held-out accuracy | steps to 75.00% | seconds |",
        "| ---       | ---:  | ---:                   | ---:            | ---:    |",
        "| inception | 0.003 | 75.00%                 | 90              | 31      |",
        "| bn_x5     | 0.015 | 90.00%                 | 90              | 46      |",
    ]


def test_table_where_the_baseline_is_better() -> None:
    last = digits_demo.table([BASELINE, Curve("bn_x5", [45], [0.5], 10.0)]).splitlines()[-1]
    assert "not reached" in last


def test_draws_both_curves(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    digits_demo.draw([BASELINE, BETTER], str(path))
    picture = tf.io.decode_png(path.read_bytes()).numpy()
    assert picture.shape[:2] == (480, 840)
    # Two curves in two colours besides white, black and grey.
    colours = picture.reshape(-1, picture.shape[-1])[:, :3]
    vivid = colours[np.ptp(colours.astype(int), axis=1) > 100]
    assert len(np.unique(vivid, axis=0)) >= 2


def test_the_two_networks_are_the_small_form_of_the_papers() -> None:
    for recipe, model in (("inception", "inception"), ("bn_x5", "bn_inception")):
        values, _ = parse(TRAIN_FLAGS, ["bnzoo-train", *digits_demo.command(recipe, "demo")])
        settings = resolve(values.flag_values_dict())
        assert settings.model == model
        assert settings.model_args["width_multiplier"] == 0.25
        assert settings.batch_size == 32
    assert digits_demo.RATES["bn_x5"] == 5 * digits_demo.RATES["inception"]
    assert digits_demo.RATES["inception"] in digits_demo.RATES_TRIED


def test_stops_where_a_training_fails(tmp_path: Path) -> None:
    (tmp_path / "inception").mkdir()
    (tmp_path / "inception" / "other.txt").touch()
    assert digits_demo.run(str(tmp_path)) == 2
    assert os.listdir(tmp_path) == ["inception"]


def test_leaves_what_the_export_and_the_comparison_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessing = Preprocessing(image_size=(32, 32), channels=1)
    image = keras.Input((32, 32, 1))
    x = keras.layers.AveragePooling2D(8)(image)
    x = keras.layers.Dense(10, activation="softmax")(keras.layers.Flatten()(x))
    network = keras.Model(image, x)

    def train_main(arguments: list[str]) -> int:
        """What bnzoo-train leaves, without the minutes that it takes: `make demo` runs it."""
        values, _ = parse(TRAIN_FLAGS, arguments)
        run_dir = Path(values.run_dir)
        run_dir.mkdir()
        network.save(run_dir / "model.keras")
        accuracy = {"inception": 0.5, "bn_x5": 0.75}[values.recipe]
        (run_dir / "metrics.csv").write_text(f"step,eval_accuracy\n45,0.125\n50,\n90,{accuracy}\n")
        return 0

    monkeypatch.setattr(digits_demo.train, "main", train_main)
    assert digits_demo.run(str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "$ bnzoo-train --recipe=inception --dataset=digits " in printed
    assert "| bn_x5     | 0.015 | 75.00%                 | 90 " in printed
    assert os.readlink(tmp_path / "better") == "bn_x5"
    assert (tmp_path / "curves.png").exists()

    held = np.load(tmp_path / "held_out.npz")
    test = digits().open_split("test")
    images, labels = zip(*(test.read(raw, preprocessing) for raw in test.ordered()), strict=True)
    assert held["images"].dtype == np.uint8
    np.testing.assert_array_equal(held["images"], np.stack(images))
    np.testing.assert_array_equal(held["labels"], np.stack(labels))
    scaled = tf.image.resize(np.stack(images), (32, 32)) / 127.5 - 1
    # The same network on the same pixels, up to the rounding of the scaling.
    np.testing.assert_allclose(held["probabilities"], network.predict(scaled, verbose=0), atol=1e-5)
