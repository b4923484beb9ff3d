"""The figures of docs/models/prelu_nets.md are those of the networks."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest

from bnzoo import models

CARD = Path(__file__).parents[2] / "docs" / "models" / "prelu_nets.md"


def _table(first_column: str) -> dict[str, list[str]]:
    """The cells of the table of this first column, by row."""
    lines = CARD.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line[1:-1].split("|"))
        rows[name] = cells
    return rows


def _unallocated(name: str, **arguments: str) -> keras.Model:
    with keras.StatelessScope(initialize_variables=False):
        return getattr(models, name)(**arguments)


def _slopes(model: keras.Model) -> int:
    return sum(layer.count_params() for layer in model.layers if layer.name.endswith("_prelu"))


def _convolutions(model: keras.Model, stage: str) -> list[keras.layers.Conv2D]:
    return [
        layer
        for layer in model.layers
        if isinstance(layer, keras.layers.Conv2D) and layer.name.split("_")[0] == stage
    ]


NAMES = ["prelu_net_14", "prelu_net_30", "prelu_net_a", "prelu_net_b", "prelu_net_c"]


@pytest.mark.parametrize("name", NAMES)
def test_counts(name: str) -> None:
    model = _unallocated(name)
    shared = _unallocated(name, activation="prelu_shared")
    operations = models.multiply_adds(model)
    convolutions = sum(count for layer, count in operations.items() if layer.startswith("conv"))
    last = model.get_layer("spp").input._keras_history.operation.name
    assert _table("name")[name] == [
        f"{model.count_params() - _slopes(model):,}",
        f"{_slopes(model):,}",
        f"{_slopes(shared)}",
        f"{convolutions / 1e9:.3f} G",
        f"{(sum(operations.values()) - convolutions) / 1e9:.3f} G",
        f"{models.receptive_field(model, last)[0]}",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_stages(name: str) -> None:
    model = _unallocated(name)
    layers, *cells, bins = _table("network")[name]
    assert int(layers) == len(models.multiply_adds(model))
    expected = []
    for stage in ("conv1", "conv2", "conv3", "conv4"):
        convolutions = _convolutions(model, stage)
        if not convolutions:
            expected.append("")
            continue
        output = "x".join(str(size) for size in convolutions[-1].output.shape[1:])
        side = convolutions[0].kernel_size[0]
        expected.append(
            output if stage == "conv1" else f"{len(convolutions)} of {side}x{side}, {output}"
        )
    side = model.get_layer("pool1").pool_size[0]
    expected.insert(1, f"{side}x{side}, stride {side}")
    assert cells == expected
    assert bins == ", ".join(str(n) for n in model.get_layer("spp").bins)
