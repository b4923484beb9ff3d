"""The training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from bnzoo.class_names import class_names

from . import run_directory
from .asynchronous import AsynchronousRun
from .checkpoints import Checkpoints
from .command_line import BadFlags, RunFailed
from .data import Inputs
from .engine import StepResults
from .finish import finish
from .metrics import Evaluation
from .report import Report
from .run_directory import write_text
from .running import Run
from .settings import Settings
from .stopping import StopRequest
from .strategies import Devices
from .watch import Watch

# One call of the compiled function runs about this many seconds of steps, so that Python's share
# is small and the progress line and Ctrl-C are still answered soon.
SECONDS_PER_CALL = 1.0


def train(
    settings: Settings,
    inputs: Inputs,
    model: keras.Model,
    run_dir: str,
    devices: Devices | None = None,
    stop: StopRequest | None = None,
) -> Evaluation:
    """Trains `model` from the newest checkpoint of `run_dir`, or from its start, to the last step.

    Of several processes that train together each calls this.

    Args:
        settings: those of the run.
        inputs: its data.
        model: as `build_model` makes it, in the scope of the strategy.
        run_dir: an existing folder.
        devices: what trains; by default one device.
        stop: tells when the run is to be stopped.

    Returns:
        The evaluation of the model that is saved, with population statistics in.

    Raises:
        RunFailed: the loss or a weight is not finite, an image is damaged, memory is out, or the
            run cannot be written.
        RunStopped: it was told to stop; the state is saved.
    """
    place = devices or Devices(tf.distribute.get_strategy())
    kind = AsynchronousRun if place.asynchronous else Run
    run = kind(settings, inputs, model, run_dir, place, stop or StopRequest())
    step = run.restore()
    epoch = inputs.train.examples / settings.batch_size
    report = Report(
        run_dir,
        settings.steps,
        settings.batch_size,
        epoch,
        step,
        run.sums.numpy(),
        place.is_chief,
        Watch(settings, inputs, run.deployed, run_dir, step) if place.is_chief else None,
    )
    evaluate_every = settings.evaluate_every or max(1, round(epoch))
    steps_per_call, compiled, saved = 1, False, step
    while step < settings.steps:
        # Up to where the variables may be ahead of the step.
        exact = min(
            settings.steps,
            *(every * (step // every + 1) for every in (evaluate_every, settings.checkpoint_every)),
        )
        log = settings.log_every * (step // settings.log_every + 1)
        profile = [boundary for boundary in settings.profile_steps if boundary > step]
        last_step = min(step + steps_per_call, log, exact, *profile)
        ahead = 0 if run.stop.came else exact - last_step
        report.before(step)
        start = time.perf_counter()
        with run.explained(inputs.train):
            results = run.engine.run(step, last_step - step, ahead)
        # Agreed, as all have to do equally many steps in the next call, or to stop behind this one.
        seconds, stopping = place.total(time.perf_counter() - start, run.stop.came)
        seconds /= place.processes
        _check_finite(results, step, run.checkpoints)
        stopping = stopping and run.engine.settled
        count = len(results.losses)
        step += count
        report.steps(step, results, seconds, compiled)
        if compiled:
            steps_per_call = max(1, round(SECONDS_PER_CALL * count / seconds))
        compiled = True

        last = step == settings.steps
        evaluated = last or step % evaluate_every == 0
        if evaluated or step % settings.log_every == 0:
            report.row(step, run.evaluate() if evaluated else None)
        if last or stopping or step % settings.checkpoint_every == 0:
            if not run.checkpoints.all_finite():
                raise RunFailed(_not_finite("a weight", step, results.rates[-1], run.checkpoints))
            report.sync()
            run.save(report.sums)
            saved = step
        if stopping:
            break
    report.close()
    run.stop_if_told(saved)
    result = finish(run)
    run.close()
    return result


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
        _check_labels(run_dir, inputs.labels)
    run_directory.write_config(run_dir, settings, found)
    write_text(
        os.path.join(run_dir, run_directory.PREPROCESSING), inputs.preprocessing.to_json() + "\n"
    )
    write_text(os.path.join(run_dir, run_directory.LABELS), "\n".join(inputs.labels) + "\n")


def _check_labels(run_dir: str, labels: Sequence[str]) -> None:
    """BadFlags if the run in `run_dir` was begun with classes of other names, or in another order.

    Their numbers would be other classes then.
    """
    if not os.path.exists(os.path.join(run_dir, run_directory.LABELS)):
        return  # Killed between the configuration and the labels.
    begun_with = run_directory.read_text(run_dir, run_directory.LABELS)
    for number, (before, now) in enumerate(zip(class_names(begun_with), labels, strict=False)):
        if before != now:
            raise BadFlags(
                f"--run_dir={run_dir} holds a run on other classes: class {number} was {before!r}, "
                f"now it is {now!r}. Give another --run_dir, or --overwrite"
            )


def _check_finite(results: StepResults, step: int, checkpoints: Checkpoints) -> None:
    """RunFailed if one of the losses of the steps behind `step` is not finite."""
    bad = np.flatnonzero(~np.isfinite(results.losses))
    if len(bad):
        first = int(bad[0])
        raise RunFailed(
            _not_finite("the loss", step + first + 1, results.rates[first], checkpoints)
        )


def _not_finite(what: str, step: int, rate: float, checkpoints: Checkpoints) -> str:
    newest = checkpoints.newest
    kept = (
        f"the last good checkpoint, {newest}, is kept" if newest else "there is no checkpoint yet"
    )
    return (
        f"{what} is not finite at step {step}, with learning rate {rate:.6g}; {kept}. "
        "A lower --learning_rate may help"
    )
