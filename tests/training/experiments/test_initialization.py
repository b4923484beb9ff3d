"""The study of initialisation: He's forms keep the variance through 30 layers, Xavier does not."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from training.experiments import initialization
from training.experiments.initialization import Curve


@pytest.fixture(scope="module")
def chains() -> dict[tuple[str, str], Curve]:
    """The four curves of a narrow chain, each the mean of four networks."""
    curves = {}
    for form in ("he_backward", "xavier"):
        for activation in ("relu", "prelu"):
            results = [
                initialization.mean_squares(
                    initialization.chain(form, activation, filters=128, map_size=4), 4, seed
                )
                for seed in range(4)
            ]
            forward, backward = np.mean(results, axis=0)
            curves[form, activation] = Curve("chain", form, activation, forward, backward)
    return curves


@pytest.mark.parametrize("activation", ["relu", "prelu"])
def test_he_keeps_the_variance_within_a_factor_of_4(chains, activation: str) -> None:
    curve = chains["he_backward", activation]
    assert len(curve.forward) == len(curve.backward) == 30
    for values in (curve.forward, curve.backward):
        assert max(values) < 4
        assert min(values) > 1 / 4


@pytest.mark.parametrize("activation", ["relu", "prelu"])
def test_xavier_loses_it(chains, activation: str) -> None:
    curve = chains["xavier", activation]
    assert curve.forward[-1] < 1e-3
    assert curve.backward[0] < 1e-3
    # (1 + a^2) / 2 in each of the 29 layers from the first response to the last.
    factor = {"relu": 0.5, "prelu": 0.53125}[activation] ** 29
    # Within what four random networks of this width differ by.
    assert factor / 6 < curve.forward[-1] / curve.forward[0] < 6 * factor
    assert factor / 6 < curve.backward[0] < 6 * factor


def test_mean_squares_are_of_responses_and_their_gradients() -> None:
    """One layer after another, by hand: the gradient of a linear last layer is its own upstream."""
    model = initialization.chain("he_backward", "relu", filters=3, map_size=2, depth=2)
    forward, backward = initialization.mean_squares(model, 64, seed=0)
    first, second = (layer for layer in model.layers if hasattr(layer, "kernel"))
    # With periodic borders each input meets each of the 4 places of a kernel once.
    energy = np.sum(np.square(first.kernel), axis=(0, 1, 2)).mean()
    assert forward[0] == pytest.approx(energy, rel=0.2)
    assert backward[1] == pytest.approx(1.0, rel=0.1)
    energy = np.sum(np.square(second.kernel), axis=(0, 1, 3)).mean() / 2
    assert backward[0] == pytest.approx(energy, rel=0.3)


def test_command_writes_table_plot_and_values(tmp_path, capsys) -> None:
    small = ["--networks=1", "--images=1", "--image_size=17", "--width_multiplier=0.03"]
    small += ["--filters=4", "--map_size=2"]
    assert initialization.main(["initialization", str(tmp_path), *small]) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "initialization.csv",
        "initialization.md",
        "initialization.png",
    ]
    page = (tmp_path / "initialization.md").read_text()
    assert printed.strip() in page
    assert "--image_size=17" in page
    assert (tmp_path / "initialization.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "initialization.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    # Two chains and three forms of prelu_net_30, two activations, 30 layers.
    assert len(rows) == 5 * 2 * 30
    assert {row["network"] for row in rows} == {"chain", "prelu_net_30"}
    last = [row for row in rows if row["layer"] == "30"]
    assert f"{float(last[0]['forward']):.2g} |" in printed.splitlines()[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"give one folder to write to. Received: []"),
        (["here", "--networks=0"], "--networks must be more than 0. Received: --networks=0"),
        (["here", "--image_size=16"], "--image_size must be at least 17. Received:"),
        (["here", "--filters=many"], "--filters"),
    ],
)
def test_bad_flags(arguments: list[str], message: str, capsys) -> None:
    assert initialization.main(["initialization", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
