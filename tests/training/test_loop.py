"""The compiled steps against NumPy, and runs that are interrupted, fail or are mixed precision."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from training import data, loop, progress, running, train
from training.command_line import BadFlags
from training.data import Inputs
from training.networks import build_model
from training.optimizers import build_optimizer, kernels
from training.settings import Settings
from training.steps import TrainSteps, make_train_steps

from .helpers import read_metrics, settings, train_argv


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return data.open_inputs(settings())


def softmax_regression() -> keras.Model:
    image = keras.Input((8, 8, 1))
    flat = keras.layers.Flatten()(image)
    return keras.Model(image, keras.layers.Dense(10, activation="softmax")(flat))


def compiled(
    model: keras.Model, chosen: Settings, examples: int
) -> tuple[TrainSteps, keras.optimizers.Optimizer, tf.Variable]:
    optimizer = build_optimizer(chosen, examples)
    optimizer.build(model.trainable_variables)
    step = tf.Variable(0, dtype=tf.int64)
    run = make_train_steps(model, optimizer, step, chosen.batch_size, chosen.weight_decay)
    return run, optimizer, step


def test_steps_against_numpy(inputs: Inputs) -> None:
    """Softmax regression by SGD with momentum, L2 on the kernel and decay, in float64."""
    chosen = settings(
        "--batch_size=20",
        "--learning_rate=0.05",
        "--momentum=0.9",
        "--weight_decay=0.02",
        "--decay_rate=0.5",
        f"--decay_epochs={40 / 1437}",  # Every 2 steps.
    )
    model = softmax_regression()
    kernel, bias = (np.float64(variable.numpy()) for variable in model.trainable_variables)
    bias = bias + np.random.default_rng(0).normal(size=10)
    model.trainable_variables[1].assign(bias)
    run, _, step = compiled(model, chosen, inputs.train.examples)
    stream = data.training_batches(inputs, 20, seed=0)
    batches = iter(stream)
    results = [run(batches, tf.constant(count)) for count in (1, 3, 2)]
    losses, accuracies, rates, norms = (
        np.concatenate([result[column].numpy() for result in results]) for column in range(4)
    )

    velocity = [np.zeros_like(kernel), np.zeros_like(bias)]
    for number, (images, labels) in enumerate(stream.take(6).as_numpy_iterator()):
        x = np.float64(images.reshape(20, 64))
        logits = x @ kernel + bias
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = shifted / shifted.sum(axis=1, keepdims=True)
        right = probabilities[np.arange(20), labels]
        rate = 0.05 * 0.5 ** (number / 2)
        np.testing.assert_allclose(losses[number], -np.log(right).mean(), rtol=1e-5)
        np.testing.assert_allclose(
            accuracies[number], (logits.argmax(1) == labels).mean(), rtol=1e-6
        )
        np.testing.assert_allclose(rates[number], rate, rtol=1e-5)
        error = (probabilities - np.eye(10)[labels]) / 20
        gradients = x.T @ error + 0.02 * kernel, error.sum(axis=0)
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        np.testing.assert_allclose(norms[number], norm, rtol=1e-5)
        velocity = [0.9 * v - rate * g for v, g in zip(velocity, gradients, strict=True)]
        kernel, bias = kernel + velocity[0], bias + velocity[1]
    found = [variable.numpy() for variable in model.trainable_variables]
    np.testing.assert_allclose(found[0], kernel, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[1], bias, rtol=1e-4, atol=1e-6)
    assert int(step) == 6


def test_one_trace_serves_all_numbers_of_steps(inputs: Inputs) -> None:
    run, _, _ = compiled(softmax_regression(), settings("--batch_size=20"), 1437)
    for first in (0, 5):
        batches = iter(data.training_batches(inputs, 20, seed=0, first_step=first))
        for count in (1, 2, 7):
            run(batches, tf.constant(count))
    assert run.experimental_get_tracing_count() == 1


def test_gradient_of_a_confident_mistake_does_not_vanish(inputs: Inputs) -> None:
    """Cross-entropy is taken from logits: a probability of 0 in float32 still has a gradient."""
    model = softmax_regression()
    bias = model.trainable_variables[1]
    start = np.where(np.arange(10) == 0, 200.0, 0.0)
    bias.assign(start)
    run, _, _ = compiled(model, settings("--batch_size=20", "--learning_rate=1.0"), 1437)
    images = np.zeros((20, 8, 8, 1), np.float32)
    batches = iter(tf.data.Dataset.from_tensors((images, np.full(20, 3, np.int64))))
    losses, *_ = run(batches, tf.constant(1))
    np.testing.assert_allclose(losses, [200.0], rtol=1e-6)
    np.testing.assert_allclose(bias.numpy() - start, -np.eye(10)[0] + np.eye(10)[3], atol=1e-6)


def test_auxiliary_heads_weigh_in_training_alone() -> None:
    """Each head's loss counts 0.3 (Szegedy et al. 2014, Section 5); the top's is reported."""
    image = keras.Input((8, 8, 1))
    flat = keras.layers.Flatten()(image)
    heads = {
        name: keras.layers.Dense(10, activation="softmax", name=name)(flat)
        for name in ("predictions", "auxiliary_1", "auxiliary_2")
    }
    model = keras.Model(image, heads)
    before = {name: model.get_layer(name).bias.numpy() for name in heads}
    for name in heads:
        model.get_layer(name).kernel.assign(np.zeros((64, 10)))
    run, _, _ = compiled(model, settings("--batch_size=20", "--learning_rate=1.0"), 1437)
    images = np.ones((20, 8, 8, 1), np.float32)
    batches = iter(tf.data.Dataset.from_tensors((images, np.full(20, 3, np.int64))))
    losses, accuracies, *_ = run(batches, tf.constant(1))
    np.testing.assert_allclose(losses, [np.log(10)], rtol=1e-6)
    np.testing.assert_array_equal(accuracies, [0.0])
    for name, weight in (("predictions", 1.0), ("auxiliary_1", 0.3), ("auxiliary_2", 0.3)):
        moved = model.get_layer(name).bias.numpy() - before[name]
        np.testing.assert_allclose(moved, weight * (np.eye(10)[3] - 0.1), rtol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_precision(precision: str, inputs: Inputs) -> None:
    before = keras.config.dtype_policy().name
    chosen = settings(
        f"--precision={precision}", "--batch_size=40", "--learning_rate=0.2", "--weight_decay=1e-3"
    )
    model = build_model(chosen, inputs)
    assert keras.config.dtype_policy().name == before
    assert model.get_layer("fc1").compute_dtype == precision.removeprefix("mixed_")
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    run, optimizer, step = compiled(model, chosen, inputs.train.examples)
    losses, *_ = run(iter(data.training_batches(inputs, 40, seed=0)), tf.constant(60))
    assert np.isfinite(losses).all()
    assert losses[-10:].numpy().mean() < 0.7 * losses[0]
    assert int(step) == 60
    # A scale of 2^15 that is too high skips an update or two, and the step counts all the same.
    assert 55 <= int(optimizer.iterations.numpy()) <= 60


def test_float16_skips_what_overflows_and_lowers_the_scale(inputs: Inputs) -> None:
    chosen = settings("--precision=mixed_float16", "--batch_size=20")
    model = build_model(chosen, inputs)
    run, optimizer, step = compiled(model, chosen, inputs.train.examples)
    optimizer.dynamic_scale.assign(2.0**120)
    weights = model.get_weights()
    run(iter(data.training_batches(inputs, 20, seed=0)), tf.constant(1))
    assert (int(step), int(optimizer.iterations.numpy())) == (1, 0)
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**119
    trained = {id(variable) for variable in model.trainable_variables}
    for variable, old in zip(model.weights, weights, strict=True):
        if id(variable) in trained:
            np.testing.assert_array_equal(variable.numpy(), old)


def test_small_images_get_the_small_stem() -> None:
    chosen = settings("--recipe=bn_x5", "--model=bn_inception", "--model_args=width_multiplier=0.1")
    small = build_model(chosen, data.open_inputs(chosen))
    assert small.get_layer("conv1_3x3_s2").strides == (2, 2)
    other = settings(
        "--recipe=bn_x5",
        "--model=bn_inception",
        "--image_size=32",
        "--model_args=width_multiplier=0.1,stem=conv",
    )
    assert build_model(other, data.open_inputs(other)).get_layer("conv1_7x7_s2").kernel_size == (
        7,
        7,
    )


def test_a_network_that_refuses_its_arguments_is_bad_flags(inputs: Inputs) -> None:
    chosen = dataclasses.replace(settings(), model_args={"epsilon": -1.0})
    with pytest.raises(BadFlags, match=r"--model=mnist_mlp with --model_args={'epsilon': -1.0} "):
        build_model(chosen, inputs)


def test_the_seed_decides_the_initial_weights(inputs: Inputs) -> None:
    first, same, other = (
        np.concatenate(
            [w.ravel() for w in build_model(settings(f"--seed={seed}"), inputs).get_weights()]
        )
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 0.1


RUN = (
    "--batch_size=100",
    "--momentum=0.9",
    "--weight_decay=1e-4",
    "--decay_rate=0.9",
    "--augmentation=shift",
    "--photometric=0.3",
    "--evaluate_every=12",
    "--log_every=5",
    "--checkpoint_every=8",
    "--population_batches=3",
)


def variables_of(path: Path) -> list[np.ndarray]:
    return keras.models.load_model(path).get_weights()


def without_speed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{key: row[key] for key in row if key != "images_per_second"} for row in rows]


def test_interrupted_run_ends_as_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 47, bit for bit: momentum, decay, moving statistics, augmentation and input go on."""
    argv = [*RUN, "--steps=28"]
    assert train.main(train_argv(tmp_path / "whole", *argv)) == 0
    update = progress.Progress.update
    for stop in (11, 19, 26):

        def interrupted(
            self: progress.Progress, step: int, *figures: float, stop: int = stop
        ) -> None:
            update(self, step, *figures)
            if step >= stop:
                raise KeyboardInterrupt

        monkeypatch.setattr(progress.Progress, "update", interrupted)
        assert train.main(train_argv(tmp_path / "broken", *argv)) == 130
        assert not (tmp_path / "broken" / "model.keras").exists()
    monkeypatch.setattr(progress.Progress, "update", update)
    assert train.main(train_argv(tmp_path / "broken", *argv)) == 0
    output = capsys.readouterr().out
    assert [line for line in output.splitlines() if line.startswith("continuing")] == [
        f"continuing at step {step}" for step in (8, 16, 24)
    ]
    whole, broken = (variables_of(tmp_path / run / "model.keras") for run in ("whole", "broken"))
    for expected, found in zip(whole, broken, strict=True):
        np.testing.assert_array_equal(found, expected)
    rows = read_metrics(tmp_path / "whole")
    assert [int(row["step"]) for row in rows] == [5, 10, 12, 15, 20, 24, 25, 28]
    assert [row["step"] for row in rows if row["eval_accuracy"]] == ["12", "24", "28"]
    assert without_speed(read_metrics(tmp_path / "broken")) == without_speed(rows)


def test_metrics_are_means_over_the_steps_since_the_last_row(tmp_path: Path) -> None:
    assert train.main(train_argv(tmp_path / "fine", *RUN, "--steps=10", "--log_every=1")) == 0
    assert train.main(train_argv(tmp_path / "coarse", *RUN, "--steps=10")) == 0
    fine, coarse = (read_metrics(tmp_path / run) for run in ("fine", "coarse"))
    assert len(fine) == 10
    for column in ("loss", "accuracy"):
        for row, first in ((coarse[0], 0), (coarse[1], 5)):
            mean = np.mean([float(one[column]) for one in fine[first : first + 5]])
            assert float(row[column]) == pytest.approx(mean, rel=1e-5)
    assert float(fine[4]["epoch"]) == pytest.approx(5 * 100 / 1437, rel=1e-5)
    assert float(fine[9]["learning_rate"]) == pytest.approx(0.1 * 0.9 ** (900 / 1437), rel=1e-5)


def test_saved_model_has_population_statistics(tmp_path: Path) -> None:
    """Algorithm 2 for the first layer, whose input depends on no other statistics, in float64."""
    assert train.main(train_argv(tmp_path, *RUN, "--steps=10", "--augmentation=none")) == 0
    model = keras.models.load_model(tmp_path / "model.keras")
    chosen = settings(*RUN, "--steps=10", "--augmentation=none")
    stream = data.training_batches(data.open_inputs(chosen), 100, 0, first_step=10)
    kernel = np.float64(model.get_layer("fc1").kernel.numpy())
    batches = [
        np.float64(images.reshape(100, 64)) @ kernel
        for images, _ in stream.take(3).as_numpy_iterator()
    ]
    layer = model.get_layer("fc1_bn")
    mean = np.mean([batch.mean(axis=0) for batch in batches], axis=0)
    variance = np.mean([batch.var(axis=0, ddof=1) for batch in batches], axis=0)
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-4, atol=1e-5)


def test_not_finite_loss_names_step_and_rate_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The images of step 14 are no numbers; the step is one of eight in its call."""
    batches = data.training_batches

    def poisoned(inputs: Inputs, size: int, seed: int, first_step: int = 0) -> tf.data.Dataset:
        def poison(
            number: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]
        ) -> tuple[tf.Tensor, tf.Tensor]:
            images, labels = batch
            return tf.where(number == 14, np.float32(np.nan), images), labels

        numbers = tf.data.Dataset.range(first_step + 1, tf.int64.max)
        return tf.data.Dataset.zip(numbers, batches(inputs, size, seed, first_step)).map(poison)

    monkeypatch.setattr(data, "training_batches", poisoned)
    monkeypatch.setattr(loop, "SECONDS_PER_CALL", 1000.0)  # Many steps a call: 9 to 16 is one.
    argv = train_argv(tmp_path, *RUN, "--steps=28", "--log_every=100", "--evaluate_every=100")
    for _ in range(2):  # The same again from the checkpoint.
        assert train.main(argv) == 1
        rate = 0.1 * 0.9 ** (1300 / 1437)
        assert capsys.readouterr().err == (
            f"bnzoo-train: the loss is not finite at step 14, with learning rate {rate:.6g}; the "
            "last good checkpoint, ckpt-8, is kept. A lower --learning_rate may help\n"
        )
    assert not (tmp_path / "model.keras").exists()
    reader = tf.train.load_checkpoint(str(tmp_path / "checkpoints"))
    kinds = reader.get_variable_to_dtype_map()
    saved = [reader.get_tensor(name) for name, kind in kinds.items() if kind.is_floating]
    assert len(saved) > 20
    assert all(np.isfinite(value).all() for value in saved)


def test_weights_that_are_not_finite_are_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss is that of before the update, so it tells of a broken update a step too late."""
    make = running.make_train_steps

    def breaking(model: keras.Model, *arguments: object) -> TrainSteps:
        run = make(model, *arguments)

        def steps(batches: object, count: tf.Tensor) -> object:
            results = run(batches, count)
            if int(arguments[1]) == 16:
                kernels(model)[0].assign(tf.fill(kernels(model)[0].shape, np.inf))
            return results

        return steps

    monkeypatch.setattr(running, "make_train_steps", breaking)
    assert train.main(train_argv(tmp_path, *RUN, "--steps=28")) == 1
    assert "a weight is not finite at step 16, with learning rate" in capsys.readouterr().err
    assert tf.train.latest_checkpoint(str(tmp_path / "checkpoints")).endswith("ckpt-8")
