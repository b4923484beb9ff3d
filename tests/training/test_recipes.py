"""The recipes against what the papers print and Section 4.2.1 changes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from bnzoo import models
from training.optimizers import learning_rate_schedule
from training.recipes import RECIPE_OF_MODEL, RECIPES
from training.settings import model_keywords, resolve

from .helpers import given

# Ioffe & Szegedy 2015: initial learning rates of Section 4.2.2, batch of 32 of Section 4.2;
# Section 4.1: 50,000 steps of 60 examples.
PRINTED = {
    "inception": ("inception", 0.0015, 32),
    "bn_baseline": ("bn_inception", 0.0015, 32),
    "bn_x5": ("bn_inception", 0.0075, 32),
    "bn_x30": ("bn_inception", 0.045, 32),
    **{f"bn_x30_ensemble_{number}": ("bn_inception", 0.045, 32) for number in range(1, 7)},
    "bn_x5_sigmoid": ("bn_inception", 0.0075, 32),
    "mnist_bn": ("mnist_mlp", 0.1, 60),
    "mnist_plain": ("mnist_mlp", 0.1, 60),
    # He et al. 2015, Section 3.
    **{
        f"prelu_net_{name}": (f"prelu_net_{name}", 0.01, 128)
        for name in ("14", "30", "a", "b", "c")
    },
}
ACCELERATED = ("bn_x5", "bn_x30", "bn_x5_sigmoid")


def test_rows_have_the_printed_figures() -> None:
    found = {name: (row.model, row.learning_rate, row.batch_size) for name, row in RECIPES.items()}
    assert found == PRINTED
    assert all(name == row.name for name, row in RECIPES.items())
    assert RECIPES["bn_x5"].learning_rate == pytest.approx(5 * RECIPES["inception"].learning_rate)
    assert RECIPES["bn_x30"].learning_rate == pytest.approx(30 * RECIPES["inception"].learning_rate)


@pytest.mark.parametrize("name", ACCELERATED)
def test_section_4_2_1(name: str) -> None:
    row, inception = RECIPES[name], RECIPES["inception"]
    assert row.weight_decay == pytest.approx(inception.weight_decay / 5)
    # Decaying six times faster: the same rate relative to the first after a sixth of the epochs.
    rate_at = lambda row, epochs: row.decay_rate ** (epochs / row.decay_epochs)  # noqa: E731
    assert rate_at(row, 10) == pytest.approx(rate_at(inception, 60))
    assert row.photometric < inception.photometric
    assert not row.model_arguments.get("dropout")
    assert not row.model_arguments.get("local_response_normalization")


def test_bn_baseline_changes_nothing_but_the_normalization() -> None:
    row, inception = RECIPES["bn_baseline"], RECIPES["inception"]
    for name in ("learning_rate", "weight_decay", "decay_rate", "decay_epochs", "photometric"):
        assert getattr(row, name) == getattr(inception, name)
    shape = {"input_shape": (32, 32, 3), "stem": "small", "width_multiplier": 0.1}
    kinds = {}
    for which in (row, inception):
        model = getattr(models, which.model)(**shape, **which.model_arguments)
        kinds[which.name] = {type(layer).__name__ for layer in model.layers}
        rates = [layer.rate for layer in model.layers if type(layer).__name__ == "Dropout"]
        assert rates == [0.4]
    assert kinds["bn_baseline"] - kinds["inception"] == {"BatchNormalization"}
    assert kinds["inception"] <= kinds["bn_baseline"]


def test_decay_ends_low_but_not_at_zero() -> None:
    # The claim of the comment on what the paper leaves unsaid: ImageNet has 1,281,167 images.
    for name, epochs, ends_at in (("inception", 774, 0.02), ("bn_x30", 150, 0.01)):
        row = RECIPES[name]
        assert row.steps * row.batch_size / 1_281_167 == pytest.approx(epochs, abs=1)
        assert row.decay_rate ** (epochs / row.decay_epochs) == pytest.approx(ends_at, rel=0.1)


def test_mnist_rows_are_section_4_1() -> None:
    with_bn, without = RECIPES["mnist_bn"], RECIPES["mnist_plain"]
    assert with_bn.steps == without.steps == 50_000
    assert (with_bn.image_size, with_bn.binarize_threshold) == (28, 127.5)
    has_bn = [
        any("BatchNormalization" in type(layer).__name__ for layer in model.layers)
        for model in (
            models.mnist_mlp(**with_bn.model_arguments),
            models.mnist_mlp(**without.model_arguments),
        )
    ]
    assert has_bn == [True, False]


@pytest.mark.parametrize("name", ["14", "30", "a", "b", "c"])
def test_rectifier_networks_are_trained_as_he_et_al_print(name: str) -> None:
    """L2 5e-4, dropout of a half, rates 1e-2, 1e-3, 1e-4, and their images of 256 levels."""
    row = RECIPES[f"prelu_net_{name}"]
    assert row.weight_decay == 5e-4
    assert row.scale == 1.0
    epochs = row.steps * row.batch_size / 1_281_167
    assert epochs == pytest.approx(75 if name in ("14", "30") else 80, abs=0.1)
    schedule = learning_rate_schedule(resolve(given(f"--recipe={row.name}")), 1_281_167)
    rates = [float(schedule(step)) for step in range(0, row.steps, row.steps // 1000)]
    # Three rates alone, each for a third of the time, and never a fourth.
    values, counts = np.unique(np.float32(rates), return_counts=True)
    np.testing.assert_allclose(values, [1e-4, 1e-3, 1e-2], rtol=1e-5)
    assert counts == pytest.approx([1000 / 3] * 3, abs=2)
    assert rates == sorted(rates, reverse=True)
    assert float(schedule(row.steps - 1)) == pytest.approx(1e-4, rel=1e-5)


def test_each_row_can_be_built() -> None:
    for row in RECIPES.values():
        assert set(row.model_arguments) <= set(model_keywords(row.model))
        assert row.momentum == (0.9 if row.model != "mnist_mlp" else 0.0)
        assert math.isfinite(row.learning_rate)


def test_each_model_has_a_recipe_of_its_own() -> None:
    for model, name in RECIPE_OF_MODEL.items():
        assert RECIPES[name].model == model
    assert set(RECIPE_OF_MODEL) == {row.model for row in RECIPES.values()}


def test_the_ensemble_is_six_variants_of_bn_x30() -> None:
    members = [RECIPES[f"bn_x30_ensemble_{number}"] for number in range(1, 7)]
    options = [dict(member.model_arguments) for member in members]
    for member in members:
        same = dataclasses.replace(member, name="bn_x30", model_arguments={})
        assert same == RECIPES["bn_x30"]
    # Section 4.2.3's three kinds of change, each in some of them, and no two alike.
    assert {name for chosen in options for name in chosen} == {
        "weight_scale",
        "dropout",
        "batch_norm",
    }
    assert {chosen.get("dropout", 0) for chosen in options} == {0, 0.05, 0.1}
    assert all(options.count(chosen) == 1 for chosen in options)
