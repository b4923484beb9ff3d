"""A run of `--strategy=parameter_server`: the chief's side of it."""

from __future__ import annotations

import keras
import tensorflow as tf

from bnzoo import models

from . import data
from .command_line import RunStopped
from .data import Inputs
from .engine import Engine
from .metrics import Evaluation
from .networks import build_model
from .optimizers import build_optimizer
from .parameter_server import ParameterServers
from .running import Run
from .scheduled_evaluation import make_scheduled_evaluator
from .settings import Settings
from .steps import make_train_step

# Seeds are below this: so the workers' own are all different.
_SEEDS = 2**32


class AsynchronousRun(Run):
    """A run whose variables are on parameter servers and whose steps are done by workers."""

    def _build_optimizer(self) -> keras.optimizers.Optimizer:
        return build_optimizer(self.settings, self.inputs.train.examples, atomic=True)

    def _build_engine(self) -> Engine:
        settings, task = self.settings, self.devices.task
        if task is None:
            raise RuntimeError("there is no cluster")
        train_step = make_train_step(
            self.model,
            self.optimizer,
            settings.batch_size,
            settings.weight_decay,
            settings.clip_norm,
            self.averages,
        )
        self._servers = ParameterServers(
            self.devices.strategy,
            task,
            train_step,
            self.optimizer,
            self.step,
            lambda worker, position: worker_batches(self.inputs, settings, worker, position),
            self.devices.patience,
            RunStopped,
        )
        self._evaluate_deployed = make_scheduled_evaluator(
            self._servers,
            self.deployed,
            self.inputs.evaluation,
            self.inputs.preprocessing,
            settings.batch_size,
        )
        return self._servers

    def evaluate(self, model: keras.Model | None = None) -> Evaluation:
        """Evaluates `model`, or the one that is trained, by the workers."""
        if model is not None:
            # Of one build: the same variables in the same order.
            for own, given in zip(self.deployed.variables, model.variables, strict=True):
                own.assign(given.value)
        with self.explained(self.inputs.evaluation):
            return self._evaluate_deployed()

    def local_model(self) -> keras.Model:
        """The network that is trained, with its variables on this machine, near its batches."""
        model = build_model(self.settings, self.inputs)
        model = models.without_auxiliary(model) if isinstance(model.output, dict) else model
        for own, trained in zip(model.variables, self.deployed.variables, strict=True):
            own.assign(trained.value.read_value())
        return model

    def close(self) -> None:
        """Tells how the steps went, and lets the workers and servers go."""
        print(self._servers.report(), flush=True)
        self._servers.close()


def worker_batches(
    inputs: Inputs, settings: Settings, worker: tf.Tensor, position: tf.Tensor
) -> tf.data.Dataset:
    """(In a tf.function.) The batches of one worker: all examples in an order of its own.

    Worker 0 has that of one device.

    Args:
        inputs: the data.
        settings: have the batch size and the seed.
        worker: its number.
        position: the batch to begin at.
    """
    seed = settings.seed + _SEEDS * tf.cast(worker, tf.int64)
    return data.training_batches(inputs, settings.batch_size, seed, position)
