"""The figures of the model cards in docs/ are those of the models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bnzoo.models import FORMS, multiply_adds, receptive_field
from bnzoo.models.inception_table import TABLES

from .networks import built, counts

CARDS = Path(__file__).parents[2] / "docs" / "models"


def table(card, first_column):
    """The rows, as dicts by column, of the table of a card whose first column has this name."""
    lines = (CARDS / f"{card}.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    header = [cell.strip() for cell in lines[start].strip("|").split("|")]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line[1:-1].split("|")]
        rows.append(dict(zip(header, cells, strict=True)))
    assert rows
    return rows


def number(text):
    return int(text.replace(",", ""))


def stage_layers(model, stage):
    """The layers with kernels of a stage of the table."""
    prefix = f"{stage}_" if stage.startswith("inception") else stage
    return [
        name
        for name in multiply_adds(model)
        if name == stage or (prefix != stage and name.startswith(prefix))
    ]


def test_stages_of_bn_inception():
    model = built("bn_inception")
    operations = multiply_adds(model)
    rows = table("bn_inception", "stage")
    assert len(rows) == 15
    seen = set()
    for row in rows:
        stage = row["stage"]
        names = stage_layers(model, stage)
        seen.update(names)
        output = "x".join(str(size) for size in model.get_layer(stage).output.shape[1:])
        assert row["output"] == output, stage
        weights = sum(
            math.prod(weight.shape)
            for name in names
            for weight in model.get_layer(name).weights
            if "kernel" in weight.name
        )
        assert number(row["weights"]) == weights, stage
        total = sum(operations[name] for name in names)
        assert row["multiply-adds"] == f"{total / 1e6:.1f} M", stage
        assert int(row["receptive field"]) == receptive_field(model, stage)[0], stage
    assert seen == operations.keys() - {"predictions"}


def test_widths_of_bn_inception():
    rows = {row["stage"]: row for row in table("bn_inception", "stage")}
    for module in TABLES["paper"].modules:
        row = rows[f"inception_{module.name}"]
        assert row["1x1"] == (str(module.conv_1x1) if module.conv_1x1 else "")
        assert row["3x3"] == f"{module.reduce_3x3}, {module.conv_3x3}"
        assert row["double"] == f"{module.reduce_double}, {module.conv_double}"
        projection = f", {module.projection}" if module.projection else ""
        assert row["pool"] == f"{module.pool}{projection}"


@pytest.mark.parametrize("row", table("bn_inception", "stem"), ids=lambda row: row["trainable"])
def test_counts_of_bn_inception(row):
    model = built(
        "bn_inception",
        stem=row["stem"],
        pool_projection=int(row["pool_projection"]),
        conv_bias=row["conv_bias"] == "yes",
    )
    assert (number(row["trainable"]), number(row["moving"])) == counts(model)
    assert row["multiply-adds"] == f"{sum(multiply_adds(model).values()) / 1e9:.3f} G"


@pytest.mark.parametrize("row", table("inception", "stem"), ids=lambda row: row["parameters"])
def test_counts_of_inception(row):
    model = built("inception", stem=row["stem"], pool_projection=int(row["pool_projection"]))
    assert number(row["parameters"]) == model.count_params()
    assert row["multiply-adds"] == f"{sum(multiply_adds(model).values()) / 1e9:.3f} G"


def test_forms():
    rows = {row["form"]: row for row in table("bn_inception", "form")}
    assert rows.keys() == FORMS.keys()
    for name, form in FORMS.items():
        row = rows[name]
        assert row["source"] == form.source
        assert row["order"] == form.preprocessing.channel_order
        for key in ("mean", "scale"):
            given = [float(value) for value in row[key].split(",")]
            given = given * 3 if len(given) == 1 else given
            assert tuple(given) == getattr(form.preprocessing, key)
        accuracy = (float(row["top-1"]), float(row["top-5"])) if row["top-1"] else None
        assert accuracy == form.accuracy
        if row["trainable"]:
            assert number(row["trainable"]) == counts(built(name))[0]


def test_layers_of_mnist_mlp():
    rows = table("mnist_mlp", "layer")
    model = built("mnist_mlp")
    assert {row["layer"]: number(row["multiply-adds"]) for row in rows} == multiply_adds(model)
    for row in rows:
        layer = model.get_layer(row["layer"])
        assert number(row["weights"]) == math.prod(layer.kernel.shape)
        assert int(row["output"]) == layer.units


def test_counts_of_mnist_mlp():
    for row in table("mnist_mlp", "batch_norm"):
        model = built("mnist_mlp", batch_norm=row["batch_norm"] == "yes")
        assert (number(row["trainable"]), number(row["moving"])) == counts(model)
        assert number(row["multiply-adds"]) == sum(multiply_adds(model).values())
