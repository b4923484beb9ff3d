"""What a run writes for TensorBoard, also one that is killed, and that watching changes nothing."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo import population
from training import data, train
from training.averaging import WeightAverages
from training.networks import build_model
from training.summaries import Summaries, read_events

from .helpers import read_metrics, settings, train_argv

FLAGS = (
    "--steps=24",
    "--batch_size=40",
    "--log_every=6",
    "--evaluate_every=12",
    "--checkpoint_every=12",
    "--learning_rate=0.3",
    "--momentum=0.9",
    "--seed=3",
)


def scalars(run_dir: Path) -> dict[str, dict[int, float]]:
    """The value at each step, by name; each is there once."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for path in sorted((run_dir / "tensorboard").glob("events*")):
        for event in read_events(str(path)):
            for value in event.summary.value:
                assert event.step not in found[value.tag]
                found[value.tag][event.step] = value.simple_value
    return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "watched"
    flags = ("--bn_percentiles=last,fc1:2", "--profile_steps=3,5")
    assert train.main(train_argv(run, *FLAGS, *flags)) == 0
    return run


def test_scalars_are_those_of_metrics_csv(watched: Path) -> None:
    found, rows = scalars(watched), read_metrics(watched)
    assert [int(row["step"]) for row in rows] == [6, 12, 18, 24]
    for name in set(rows[0]) - {"step"}:
        expected = {int(row["step"]): float(row[name]) for row in rows if row[name]}
        assert found[name] == pytest.approx(expected, rel=1e-5)
    assert found["eval_accuracy"].keys() == {12, 24}
    assert found["gradient_norm"].keys() == {6, 12, 18, 24}
    assert all(0 < norm < 100 for norm in found["gradient_norm"].values())


def test_gradient_norm_of_the_first_step(tmp_path: Path) -> None:
    flags = ("--batch_size=40", "--weight_decay=0.1", "--seed=3", "--clip_norm=1e-6")
    argv = train_argv(tmp_path / "run", *flags, "--steps=1", "--log_every=1")
    assert train.main(argv) == 0
    chosen = settings(*flags)
    inputs = data.open_inputs(chosen)
    model = build_model(chosen, inputs)
    images, labels = next(iter(data.training_batches(inputs, 40, 3)))
    kernels = [layer.kernel for layer in model.layers if hasattr(layer, "kernel")]
    with tf.GradientTape() as tape:
        probabilities = tf.gather(model(images, training=True), labels, axis=1, batch_dims=1)
        squares = [tf.reduce_sum(tf.convert_to_tensor(kernel) ** 2) for kernel in kernels]
        loss = -tf.reduce_mean(tf.math.log(probabilities)) + 0.05 * tf.add_n(squares)
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    norm = np.sqrt(sum(np.sum(np.float64(gradient) ** 2) for gradient in gradients))
    assert scalars(tmp_path / "run")["gradient_norm"][1] == pytest.approx(norm, rel=1e-4)


def test_percentiles_come_with_each_row(watched: Path) -> None:
    found = scalars(watched)
    names = [name for name in found if name.startswith("bn_percentiles/")]
    assert sorted(names) == sorted(
        f"bn_percentiles/{where}_{percent}"
        for where in ("fc3_bn/input", "fc3_bn/output", "fc1:2/input")
        for percent in (15, 50, 85)
    )
    for name in names:
        assert found[name].keys() == {6, 12, 18, 24}
    # By definition of BN, with gamma and beta near 1 and 0 still.
    assert found["bn_percentiles/fc3_bn/output_15"][6] < -0.5
    assert found["bn_percentiles/fc3_bn/output_85"][24] > 0.5


def test_profile_is_written(watched: Path) -> None:
    assert len(list((watched / "tensorboard").glob("plugins/profile/*/*.xplane.pb"))) == 1


def test_watching_changes_nothing(watched: Path, tmp_path: Path) -> None:
    assert train.main(train_argv(tmp_path / "run", *FLAGS)) == 0
    one, two = (
        keras.models.load_model(path / "model.keras") for path in (watched, tmp_path / "run")
    )
    for mine, other in zip(one.variables, two.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.numpy())
    assert not list((tmp_path / "run" / "tensorboard").glob("plugins"))


def test_a_run_goes_on_watched_in_another_way_and_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed behind step 18, its last checkpoint at 12; then 30 steps in place of 24."""
    run = tmp_path / "run"

    write = Summaries.write

    def killed(self: Summaries, step: int, values: dict[str, float]) -> None:
        write(self, step, values)
        if step == 18:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Summaries, "write", killed)
        assert train.main(train_argv(run, *FLAGS)) == 130
    assert train.main(train_argv(run, *FLAGS, "--bn_percentiles=fc3_bn")) == 0
    assert scalars(run)["loss"].keys() == {6, 12, 18, 24}
    assert scalars(run)["bn_percentiles/fc3_bn/input_50"].keys() == {18, 24}
    before = (run / "model.keras").read_bytes()
    assert train.main(train_argv(run, *FLAGS, "--steps=30")) == 0
    assert (run / "model.keras").read_bytes() != before
    assert scalars(run)["loss"].keys() == {6, 12, 18, 24, 30}
    with open(run / "metrics.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["6", "12", "18", "24", "30"]
    # As if all 30 had been asked for at once.
    assert train.main(train_argv(tmp_path / "whole", *FLAGS, "--steps=30")) == 0
    one, two = (keras.models.load_model(path / "model.keras") for path in (run, tmp_path / "whole"))
    for mine, other in zip(one.variables, two.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.numpy())


def test_a_layer_that_is_not_there_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(train_argv(tmp_path / "run", *FLAGS, "--bn_percentiles=fc4_bn")) == 2
    assert capsys.readouterr().err == (
        "bnzoo-train: --bn_percentiles=fc4_bn: mnist_mlp has no layer of that name. "
        "Did you mean fc3_bn?\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_averaged_weights_become_the_model(
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """--polyak against averages that are taken here, over a run that is interrupted half-way."""
    flags = (*FLAGS, "--polyak=0.7", f"--precision={precision}", "--clip_norm=1")
    seen: list[list[np.ndarray]] = []
    put_in = WeightAverages.put_in

    def watch(self: WeightAverages) -> None:
        seen.append([variable.numpy() for variable in self._weights])
        put_in(self)
        seen.append([variable.numpy() for variable in self._weights])

    monkeypatch.setattr(WeightAverages, "put_in", watch)
    assert train.main(train_argv(tmp_path / "whole", *flags)) == 0
    output = capfd.readouterr().out
    assert "without averaging the weights: held-out accuracy 0." in output
    # Interrupted at the checkpoint of step 12: the averages go on.
    assert train.main(train_argv(tmp_path / "run", *flags, "--steps=12")) == 0
    assert train.main(train_argv(tmp_path / "run", *flags)) == 0
    models = [keras.models.load_model(tmp_path / name / "model.keras") for name in ("whole", "run")]
    for one, two in zip(*(model.variables for model in models), strict=True):
        np.testing.assert_array_equal(one.numpy(), two.numpy())
    # The weights are the averages, and not those of the last step.
    for variable, last, average in zip(models[0].trainable_variables, *seen[:2], strict=True):
        np.testing.assert_array_equal(variable.numpy(), average)
        assert np.abs(last - average).max() > 1e-4
    # BN's statistics are those of the population under these weights.
    chosen = settings(*flags)
    inputs = data.open_inputs(chosen)
    batches = data.training_batches(inputs, 40, 3, first_step=24)
    again = population.estimate_population_statistics(models[0], batches, 100)
    for one, two in zip(models[0].variables, again.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), two.numpy(), rtol=1e-5, atol=1e-6)
