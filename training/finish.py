"""The end of a run: population statistics, the last evaluation, and model.keras."""

from __future__ import annotations

import hashlib
import os

import keras
import numpy as np
import tensorflow as tf

from bnzoo import models, population
from bnzoo.trained_steps import add_step

from . import data, run_directory
from .data import Share
from .metrics import Evaluation
from .networks import build_model
from .run_directory import write_aside
from .running import Run


def finish(run: Run) -> Evaluation:
    """Puts the population statistics in (Algorithm 2), evaluates, and writes model.keras.

    Where averages of the weights are kept, the network of the weights themselves is evaluated too,
    with statistics of its own, so that it can be seen what the averages are good for.
    """
    settings, inputs, devices = run.settings, run.inputs, run.devices
    if run.averages:
        without = run.evaluate(_with_population_statistics(run))
        run.averages.put_in()
        if devices.is_chief:
            print(
                f"without averaging the weights: held-out accuracy {without.accuracy:.4f}, "
                f"top-5 {without.top5_accuracy:.4f}, loss {without.loss:.4f}",
                flush=True,
            )
    model = _with_population_statistics(run)
    run.stop_if_told(settings.steps)
    result = run.evaluate(model)
    if devices.replicas > 1:
        # What each replica keeps by itself is read by all processes together.
        weights = model.get_weights()
        if devices.processes > 1:
            _print_checksum(run, weights)
        if devices.is_chief:
            model = build_model(settings, inputs)
            model = models.without_auxiliary(model) if isinstance(model.output, dict) else model
            model.set_weights(weights)
    if devices.is_chief:
        write_model(run.run_dir, model, settings.steps)
    if devices.processes > 1:
        # Nobody ends before the network is written: without the others the chief, started again,
        # could not do so.
        devices.part()
    return result


def _with_population_statistics(run: Run) -> keras.Model:
    """The network with its weights as they are, and with BN's statistics for these weights."""
    model = run.local_model()
    if not run.settings.population_batches:
        return model
    batches, count = _population_batches(run)
    with run.explained(run.inputs.train):
        return population.estimate_population_statistics(model, batches, count)


def _population_batches(run: Run) -> tuple[tf.data.Dataset, int]:
    """Batches as large as those that BN normalizes in training, and how many this process takes."""
    settings, devices = run.settings, run.devices
    size, part, count = settings.batch_size, None, settings.population_batches
    if not settings.synchronized_batch_norm:
        size = -(-size // devices.replicas)
    if devices.processes > 1:
        part = Share(0, (size,), turn=devices.process, turns=devices.processes)
        count = max(1, len(range(devices.process, count, devices.processes)))
    batches = data.training_batches(
        run.inputs, size, settings.seed, first_step=settings.steps, part=part
    )
    return batches, count


def _print_checksum(run: Run, weights: list[np.ndarray]) -> None:
    """Of all variables, so that it can be seen that all processes have the same."""
    digest = hashlib.sha256()
    variables = [variable.numpy() for variable in (*run.model.variables, *run.optimizer.variables)]
    for value in (*weights, *variables):
        digest.update(value.tobytes())
    print(f"checksum {digest.hexdigest()}", flush=True)


def write_model(run_dir: str, model: keras.Model, step: int) -> None:
    """Writes model.keras, with the number of steps that it was trained in it."""

    def write(partial: str) -> None:
        model.save(partial)
        add_step(partial, step)

    write_aside(os.path.join(run_dir, run_directory.MODEL), write)
