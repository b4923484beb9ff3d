"""What a run is made of while it trains: the network, its engine, and where its state is kept."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bnzoo import models

from . import data, run_directory
from .averaging import WeightAverages
from .checkpoints import Checkpoints
from .command_line import RunStopped
from .data import Inputs
from .engine import Engine
from .failures import explained
from .metrics import Evaluation, make_evaluator
from .optimizers import build_optimizer
from .settings import Settings
from .sources import Split
from .steps import make_train_steps
from .stopping import StopRequest
from .strategies import Devices
from .synchronous import Synchronous


class Run:
    """What a run is made of: the model, what trains it, and where its state is kept."""

    def __init__(
        self,
        settings: Settings,
        inputs: Inputs,
        model: keras.Model,
        run_dir: str,
        devices: Devices,
        stop: StopRequest,
    ) -> None:
        self.settings, self.inputs, self.run_dir = settings, inputs, run_dir
        self.devices, self.stop, self.model = devices, stop, model
        self.averages: WeightAverages | None = None
        with devices.strategy.scope():
            self.optimizer = self._build_optimizer()
            self.optimizer.build(model.trainable_variables)
            self.step = tf.Variable(
                0,
                dtype=tf.int64,
                trainable=False,
                name="step",
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
            if settings.polyak is not None:
                self.averages = WeightAverages(model.trainable_variables, settings.polyak)
        # Sums over the steps since the last row of metrics.csv: loss, accuracy, how many.
        self.sums = tf.Variable(np.zeros(3), dtype=tf.float64, trainable=False, name="sums")
        self.checkpoints = Checkpoints(
            os.path.join(run_dir, run_directory.CHECKPOINTS),
            model,
            self.optimizer,
            self.step,
            self.sums,
            self.averages.variables if self.averages else (),
            devices,
        )
        self.deployed = models.without_auxiliary(model) if isinstance(model.output, dict) else model
        self._evaluate: Callable[..., Evaluation] | None = None
        self.engine: Engine = self._build_engine()

    def _build_optimizer(self) -> keras.optimizers.Optimizer:
        return build_optimizer(self.settings, self.inputs.train.examples)

    def _build_engine(self) -> Engine:
        settings = self.settings
        train_steps = make_train_steps(
            self.model,
            self.optimizer,
            self.step,
            settings.batch_size,
            settings.weight_decay,
            settings.clip_norm,
            self.averages,
            self.devices,
        )
        return Synchronous(train_steps, self._training_batches)

    def _training_batches(self, first_step: int) -> Iterator[Any]:
        size, seed = self.settings.batch_size, self.settings.seed
        part = self.devices.share(size)
        if part is None:
            return iter(data.training_batches(self.inputs, size, seed, first_step))
        return self.devices.batches(
            data.training_batches(self.inputs, size, seed, first_step, part)
        )

    def restore(self) -> int:
        """The step that the run goes on from."""
        step = self.checkpoints.restore()
        if step and self.devices.is_chief:
            print(f"continuing at step {step}", flush=True)
        return step

    def save(self, sums: np.ndarray) -> None:
        """Saves the state of now."""
        self.sums.assign(sums)
        self.checkpoints.save()

    def evaluate(self, model: keras.Model | None = None) -> Evaluation:
        """Evaluates `model`, or the one that is trained."""
        if model is not None or self._evaluate is None:
            evaluator = make_evaluator(model or self.deployed)
            if model is None:
                self._evaluate = evaluator
        else:
            evaluator = self._evaluate
        split, size = self.inputs.evaluation, self.settings.batch_size
        part = self.devices.share(size)
        held_out = data.evaluation_batches(split, self.inputs.preprocessing, size, part)
        batches: Iterable[Any] = held_out
        if part is not None:
            count = data.number_of_batches(split, size)
            whole = tf.data.experimental.assert_cardinality(count * len(part.sizes))
            batches = itertools.islice(self.devices.batches(held_out.apply(whole).repeat()), count)
        with self.explained(split):
            return evaluator(batches, split.examples)

    @contextlib.contextmanager
    def explained(self, split: Split) -> Iterator[None]:
        """Turns an error of TensorFlow inside, where `split` is read, into one line."""
        with explained(split, self.inputs.preprocessing), self.devices.guarded():
            yield

    def stop_if_told(self, saved: int) -> None:
        """RunStopped if any process was told to stop; the state of step `saved` is kept."""
        if self.devices.total(self.stop.came)[0]:
            self.devices.part()
            raise RunStopped(
                f"stopped by SIGTERM; step {saved} is saved, and the same command goes on from it"
            )

    def local_model(self) -> keras.Model:
        """The network that is trained, without auxiliary heads, where its batches are."""
        return self.deployed

    def close(self) -> None:
        """Ends the engine."""
