from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from training.command_line import parse
from training.experiments import digits_demo
from training.experiments.digits_demo import Curve
from training.settings import TRAIN_FLAGS, resolve

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
        "| recipe    | rate | best held-out accuracy | steps to 75.00% | seconds |",
        "| ---       | ---: | ---:                   | ---:            | ---:    |",
        "| inception | 0.01 | 75.00%                 | 90              | 31      |",
        "| bn_x5     | 0.05 | 90.00%                 | 90              | 46      |",
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
    # The narrowest networks: here it is about what is written, not about accuracy.
    for recipe in digits_demo.ARGUMENTS:
        monkeypatch.setitem(digits_demo.ARGUMENTS, recipe, "width_multiplier=0.02")
    monkeypatch.setattr(digits_demo, "EPOCH", 2)
    assert digits_demo.run(str(tmp_path), epochs=1) == 0
    printed = capsys.readouterr().out
    assert printed.count("$ bnzoo-train --recipe=") == 2
    assert "| bn_x5 " in printed
    better = tmp_path / "better"
    assert os.readlink(better) in digits_demo.RATES
    assert (tmp_path / "curves.png").exists()
    assert len(os.listdir(better / "examples")) == 16
    held = np.load(tmp_path / "held_out.npz")
    assert held["images"].shape == (360, 8, 8, 1)
    assert held["images"].dtype == np.uint8
    assert held["labels"].shape == (360,)
    assert held["probabilities"].shape == (360, 10)
    np.testing.assert_allclose(held["probabilities"].sum(axis=1), 1, atol=1e-5)
