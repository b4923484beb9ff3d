"""The training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bnzoo import models, population

from . import data, run_directory
from .checkpoints import Checkpoints
from .command_line import BadFlags, RunFailed
from .data import Inputs
from .failures import explained, reason
from .metrics import Evaluation, MetricsFile, in_top, make_evaluator
from .optimizers import build_optimizer, kernels, l2_loss
from .progress import Progress
from .run_directory import write_aside, write_text
from .settings import SMALL_IMAGE, Settings, model_keywords

# One call of the compiled function runs about this many seconds of steps, so that Python's share
# is small and the progress line and Ctrl-C are still answered soon.
SECONDS_PER_CALL = 1.0

# From an iterator of batches and a number of steps: each step's loss, fraction of right answers
# and learning rate.
TrainSteps = Callable[[Iterator[Any], tf.Tensor], tuple[tf.Tensor, tf.Tensor, tf.Tensor]]


def build_model(settings: Settings, inputs: Inputs) -> keras.Model:
    """The network of `settings` for the images and classes of `inputs`, seeded.

    Raises:
        BadFlags: the network refuses an argument or the size of the images.
        RunFailed: there is not enough memory for it.
    """
    arguments = dict(settings.model_args)
    size = inputs.preprocessing.image_size
    if max(size) <= SMALL_IMAGE and "stem" in model_keywords(settings.model):
        arguments.setdefault("stem", "small")
    keras.utils.set_random_seed(settings.seed)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(settings.precision)
    try:
        return getattr(models, settings.model)(
            input_shape=(*size, inputs.preprocessing.channels),
            classes=len(inputs.labels),
            **arguments,
        )
    except tf.errors.ResourceExhaustedError as error:
        raise RunFailed(f"out of memory for the weights: {reason(error)}") from error
    except (ValueError, TypeError) as error:
        raise BadFlags(
            f"--model={settings.model} with --model_args={arguments} and images of {size}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    finally:
        keras.config.set_dtype_policy(before)


def make_train_steps(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    step: tf.Variable,
    batch_size: int,
    weight_decay: float,
) -> TrainSteps:
    """The compiled function that trains `model`, several steps a call.

    The loss that is reported is the mean cross-entropy of the top over the batch; the auxiliary
    heads' and L2 are added to what is minimised.

    Args:
        model: built; its output is class probabilities, or a dict of them with auxiliary heads.
        optimizer: built on the model's trainable variables.
        step: int64; counts the steps.
        batch_size: examples in a batch, over all devices.
        weight_decay: L2 weight of the kernels.
    """
    decayed = kernels(model)
    trained = model.trainable_variables
    weights: Mapping[str, float] = {"predictions": 1.0}
    if isinstance(model.output, dict):
        weights = models.auxiliary_loss_weights(model)

    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = model(images, training=True)
            if not isinstance(outputs, dict):
                outputs = {"predictions": outputs}
            losses = {
                # Keras takes it from the logits that the softmax was computed from.
                name: tf.nn.compute_average_loss(
                    keras.losses.sparse_categorical_crossentropy(labels, outputs[name]),
                    global_batch_size=batch_size,
                )
                for name in weights
            }
            weighted = tf.add_n([weight * losses[name] for name, weight in weights.items()])
            minimised = optimizer.scale_loss(weighted + l2_loss(decayed, weight_decay))
        optimizer.apply(tape.gradient(minimised, trained), trained)
        step.assign_add(1)
        hits = tf.cast(in_top(outputs["predictions"], labels, 1), tf.float32)
        return losses["predictions"], tf.reduce_sum(hits) / batch_size

    @tf.function
    def train_steps(
        batches: Iterator[Any], count: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        columns = [tf.TensorArray(tf.float32, size=count) for _ in range(3)]
        for index in tf.range(count):
            images, labels = next(batches)
            rate = tf.convert_to_tensor(optimizer.learning_rate)
            row = (*train_step(images, labels), rate)
            columns = [
                column.write(index, value) for column, value in zip(columns, row, strict=True)
            ]
        losses, accuracies, rates = (column.stack() for column in columns)
        return losses, accuracies, rates

    return train_steps


def train(settings: Settings, inputs: Inputs, model: keras.Model, run_dir: str) -> Evaluation:
    """Trains `model` from the newest checkpoint of `run_dir`, or from its start, to the last step.

    Args:
        settings: those of the run.
        inputs: its data.
        model: as `build_model` makes it.
        run_dir: an existing folder.

    Returns:
        The evaluation of the model that is saved, with population statistics in.

    Raises:
        RunFailed: the loss or a weight is not finite, an image is damaged, memory is out, or the
            run cannot be written.
    """
    optimizer = build_optimizer(settings, inputs.train.examples)
    optimizer.build(model.trainable_variables)
    step_variable = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
    # Sums over the steps since the last row of metrics.csv: loss, accuracy, how many.
    sums_variable = tf.Variable(np.zeros(3), dtype=tf.float64, trainable=False, name="sums")
    checkpoints = Checkpoints(
        os.path.join(run_dir, run_directory.CHECKPOINTS),
        model,
        optimizer,
        step_variable,
        sums_variable,
    )
    step = checkpoints.restore()
    if step:
        print(f"continuing at step {step}", flush=True)
    sums = sums_variable.numpy()
    metrics = MetricsFile(os.path.join(run_dir, run_directory.METRICS), step)
    progress = Progress(settings.steps, step)
    deployed = models.without_auxiliary(model) if isinstance(model.output, dict) else model
    evaluate = make_evaluator(deployed)
    held_out = data.evaluation_batches(inputs.evaluation, inputs.preprocessing, settings.batch_size)
    train_steps = make_train_steps(
        model, optimizer, step_variable, settings.batch_size, settings.weight_decay
    )
    batches = iter(
        data.training_batches(inputs, settings.batch_size, settings.seed, first_step=step)
    )
    epoch = inputs.train.examples / settings.batch_size
    evaluate_every = settings.evaluate_every or max(1, round(epoch))
    events = (settings.log_every, evaluate_every, settings.checkpoint_every)
    steps_per_call, images, seconds, compiled = 1, 0, 0.0, False
    while step < settings.steps:
        stop = min(
            step + steps_per_call,
            settings.steps,
            *(every * (step // every + 1) for every in events),
        )
        start = time.perf_counter()
        with explained(inputs.train, inputs.preprocessing):
            results = train_steps(batches, tf.constant(stop - step))
        losses, accuracies, rates = (column.numpy() for column in results)
        spent = time.perf_counter() - start
        _check_finite(losses, rates, step, checkpoints)
        sums += (losses.sum(dtype=np.float64), accuracies.sum(dtype=np.float64), stop - step)
        speed = (stop - step) * settings.batch_size / spent
        if compiled:
            steps_per_call = max(1, round(SECONDS_PER_CALL * (stop - step) / spent))
            images, seconds = images + (stop - step) * settings.batch_size, seconds + spent
        compiled = True
        step = stop
        progress.update(step, losses.mean(), accuracies.mean(), rates[-1], speed)

        last = step == settings.steps
        evaluated = last or step % evaluate_every == 0
        if evaluated or step % settings.log_every == 0:
            row = {
                "step": step,
                "epoch": step / epoch,
                "loss": sums[0] / sums[2],
                "accuracy": sums[1] / sums[2],
                "learning_rate": rates[-1],
                "images_per_second": images / seconds if seconds else speed,
            }
            if evaluated:
                with explained(inputs.evaluation, inputs.preprocessing):
                    result = evaluate(held_out, inputs.evaluation.examples)
                row |= {
                    "eval_loss": result.loss,
                    "eval_accuracy": result.accuracy,
                    "eval_top5_accuracy": result.top5_accuracy,
                }
                progress.note(f"step {step}: held-out accuracy {result.accuracy:.4f}")
            metrics.write(row)
            sums, images, seconds = np.zeros(3), 0, 0.0
        if last or step % settings.checkpoint_every == 0:
            if not checkpoints.all_finite():
                raise RunFailed(_not_finite("a weight", step, rates[-1], checkpoints))
            metrics.sync()
            sums_variable.assign(sums)
            checkpoints.save()
    metrics.close()
    return _finish(settings, inputs, deployed, run_dir)


def _finish(settings: Settings, inputs: Inputs, model: keras.Model, run_dir: str) -> Evaluation:
    """Puts the population statistics in (Algorithm 2), evaluates, and writes model.keras."""
    if settings.population_batches:
        batches = data.training_batches(
            inputs, settings.batch_size, settings.seed, first_step=settings.steps
        )
        with explained(inputs.train, inputs.preprocessing):
            model = population.estimate_population_statistics(
                model, batches, settings.population_batches
            )
    held_out = data.evaluation_batches(inputs.evaluation, inputs.preprocessing, settings.batch_size)
    with explained(inputs.evaluation, inputs.preprocessing):
        result = make_evaluator(model)(held_out, inputs.evaluation.examples)
    write_model(run_dir, model)
    return result


def write_model(run_dir: str, model: keras.Model) -> None:
    """Writes model.keras."""
    write_aside(os.path.join(run_dir, run_directory.MODEL), model.save)


def write_description(run_dir: str, settings: Settings, inputs: Inputs) -> None:
    """Writes what is known before the first step: the configuration, the labels, the input.

    Raises:
        BadFlags: the run in `run_dir` was begun with other data.
    """
    found = {
        "train_examples": inputs.train.examples,
        "eval_examples": inputs.evaluation.examples,
        "classes": len(inputs.labels),
    }
    if os.path.exists(os.path.join(run_dir, run_directory.CONFIG)):
        begun_with = run_directory.read_config(run_dir)["data"]
        if begun_with != found:
            raise BadFlags(
                f"--run_dir={run_dir} holds a run on other data: {begun_with}, now {found}. "
                "Give another --run_dir, or --overwrite"
            )
    run_directory.write_config(run_dir, settings, found)
    write_text(
        os.path.join(run_dir, run_directory.PREPROCESSING), inputs.preprocessing.to_json() + "\n"
    )
    write_text(os.path.join(run_dir, run_directory.LABELS), "\n".join(inputs.labels) + "\n")


def _check_finite(
    losses: np.ndarray, rates: np.ndarray, step: int, checkpoints: Checkpoints
) -> None:
    """RunFailed if one of the losses of the steps behind `step` is not finite."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        first = bad[0]
        raise RunFailed(_not_finite("the loss", step + int(first) + 1, rates[first], checkpoints))


def _not_finite(what: str, step: int, rate: float, checkpoints: Checkpoints) -> str:
    newest = checkpoints.newest
    kept = (
        f"the last good checkpoint, {newest}, is kept" if newest else "there is no checkpoint yet"
    )
    return (
        f"{what} is not finite at step {step}, with learning rate {rate:.6g}; {kept}. "
        "A lower --learning_rate may help"
    )
