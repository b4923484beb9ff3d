"""Asynchronous training: workers take steps by themselves, with the variables on servers.

Ioffe & Szegedy 2015 trained so, with 10 replicas. The engine is tf.distribute's
ParameterServerStrategy with its ClusterCoordinator.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from . import task_server
from .cluster import PS, WORKER, Task
from .command_line import RunFailed
from .engine import StepResults
from .failures import reason
from .steps import TrainStep
from .task_server import Lookout

# Steps that are scheduled for each worker and not done. TensorFlow's coordinator has each worker do
# one at a time; with the others at hand it never waits for the chief.
SCHEDULED_EACH = 5
# One step may be under way for each so many that are done, at first one alone. Moving statistics
# with momentum=None move by 1/n at step n: several that start from the same values would add up to
# more than 1, and leave a negative variance.
STEPS_PER_STALE = 10
# Seconds that a parameter server may not answer. What it held is lost with it, so there is nothing
# to be won by waiting long.
SERVER_PATIENCE = 20.0
# Seconds from one look at the cluster to the next while no step ends.
_LOOK_EVERY = 1.0


class ParameterServers:
    """The engine of `--strategy=parameter_server`.

    A step that is scheduled is done, whatever happens to workers; where one is lost in the middle
    of a step, another does that step from its start. `again` counts those that may have changed
    variables twice.

    Args:
        strategy: its cluster is up, and `train_step` is of variables made in its scope.
        task: the chief, which this process is.
        train_step: does one step on one batch, with atomic updates of variables.
        optimizer: the one of `train_step`, as `build_optimizer` makes it with `atomic`.
        step: counts the steps; right wherever none is under way.
        batches: makes the batches of one worker, in a tf.function that runs on it, from its number
            and the number of its batch to begin at.
        patience: seconds to go on waiting while no worker answers.
        retry: what to raise for a cluster that is to be started again, made from one line.
    """

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        task: Task,
        train_step: TrainStep,
        optimizer: keras.optimizers.Optimizer,
        step: tf.Variable,
        batches: Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset],
        patience: float,
        retry: Callable[[str], Exception] = RunFailed,
    ) -> None:
        tf.get_logger().addFilter(_of_interest)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._task = task
        self._addresses = task_server.servants(task)
        self.workers = len(task.jobs[WORKER])
        # Their learning rate follows the one, checkpoints the other.
        self._counts = (optimizer.iterations, step)
        self._patience = patience
        self._retry = retry
        self.again = 0
        self.scheduled = 0
        with strategy.scope():
            self._begun = tf.Variable(0, dtype=tf.int64, trainable=False, name="begun")
            # What each step under way has returned: there also if its worker is lost before the
            # chief has fetched it. Such a step is done, and must not be done again.
            size = SCHEDULED_EACH * self.workers
            self._returned = tf.Variable(tf.zeros([size, 4]), trainable=False, name="returned")
        self.step = self._make_step(strategy, train_step, optimizer)
        self._make_batches = batches
        self._batches: Any = None
        self._position = 0
        # Each with its arguments, the oldest first.
        self.under_way: deque[tuple[Callable[..., tf.Tensor], tuple[Any, ...]]] = deque()
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        threading.Thread(target=self._fetch, name="fetch", daemon=True).start()
        self._lookout = Lookout(self._addresses, self._tell)

    def _make_step(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        train_step: TrainStep,
        optimizer: keras.optimizers.Optimizer,
    ) -> Callable[..., tf.Tensor]:
        begun, returned = self._begun, self._returned

        def counted(*batch: tf.Tensor) -> tf.Tensor:
            # Before anything is changed: no step that changed something goes uncounted.
            with tf.control_dependencies([begun.assign_add(1, read_value=False)]):
                rate = tf.convert_to_tensor(optimizer.learning_rate)
                loss, accuracy, norm = train_step(*batch)
                # One tensor, one message.
                return tf.stack([loss, accuracy, rate, norm])

        @tf.function
        def step(batches: Any, place: tf.Tensor) -> tf.Tensor:
            row = strategy.run(counted, args=next(batches))
            returned.scatter_update(tf.IndexedSlices(row[tf.newaxis], place[tf.newaxis]))
            return row

        return step

    def _start(self, first_step: int) -> None:
        """Places the input on the workers, and sets the counts."""
        self._position = first_step
        self._set_counts(first_step)
        begun, workers, make = self._begun, self.workers, self._make_batches

        @tf.function
        def worker_batches() -> tf.data.Dataset:
            # Runs on a worker as it is taken on, and taken on again: it goes on about where it was.
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            return make(worker, begun.read_value() // workers)

        self._batches = iter(self._coordinator.create_per_worker_dataset(worker_batches))

    def run(self, first_step: int, count: int, ahead: int = 0) -> StepResults:
        """Does the steps behind `first_step`, `count` of them, and waits for them.

        With steps ahead no worker waits for the slowest at the end of a call.

        Args:
            first_step, count, ahead: see `Engine`.

        Raises:
            tf.errors.OpError: something in a step failed.
            RunFailed: no worker answers.
        """
        if self._batches is None:
            self._start(first_step)
        end = first_step + count
        rows: list[np.ndarray] = []
        while len(rows) < count or (self.under_way and not ahead):
            while self._position < end + ahead and len(self.under_way) < self._limit():
                place = tf.constant(self._position % (SCHEDULED_EACH * self.workers), tf.int64)
                self._schedule(self.step, (self._batches, place))
                self._position += 1
                self.scheduled += 1
            rows.append(self._oldest())
        if self.settled:
            self._settle()
        return StepResults(*np.stack(rows, axis=1))

    def _limit(self) -> int:
        """How many steps may be under way."""
        return min(SCHEDULED_EACH * self.workers, max(1, self._position // STEPS_PER_STALE))

    @property
    def settled(self) -> bool:
        """Whether no step is under way."""
        return not self.under_way

    def results(
        self, function: Callable[..., tf.Tensor], arguments: Iterable[tuple[Any, ...]]
    ) -> list[np.ndarray]:
        """What `function`, a tf.function, returns for each of `arguments`, done by the workers.

        Where a worker is lost another one begins the call again, and what it returns counts once.

        Raises:
            As `run`.
        """
        if self.under_way:
            raise RuntimeError("steps are under way")
        for one in arguments:
            self._schedule(function, one)
        return [self._oldest() for _ in range(len(self.under_way))]

    def _schedule(self, function: Callable[..., tf.Tensor], arguments: tuple[Any, ...]) -> None:
        try:
            value = self._coordinator.schedule(function, args=arguments)
        except tf.errors.OpError as error:
            raise self._explained(error) from error
        self.under_way.append((function, arguments))
        self._asked.put(value)

    def _fetch(self) -> None:
        """(In a thread of its own.) Waits for values: doing so cannot be given a limit of time."""
        while True:
            value = self._asked.get()
            try:
                self._done.put((value.fetch(), None))
            except Exception as error:
                self._done.put((None, error))

    def _oldest(self) -> np.ndarray:
        """What the oldest call under way returned."""
        while True:
            try:
                row, error = self._done.get(timeout=_LOOK_EVERY)
            except queue.Empty:
                self._check_cluster()
                continue
            function, arguments = self.under_way.popleft()
            if error is None:
                return row
            if not self._lost_with_worker(error):
                raise self._explained(error) from error
            self._check_cluster()
            if function is self.step:
                return self._returned.numpy()[int(arguments[1])]
            # A function without effects, such as an evaluation of a batch.
            self._schedule(function, arguments)

    def _lost_with_worker(self, error: Exception) -> bool:
        """Whether what a call returned was lost with its worker, before it was fetched.

        That call is over: the coordinator does not begin it again.
        """
        return (
            isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError))
            and f"/job:{WORKER}" in str(error)
            and task_server.server_lost(self._task, error) is None
        )

    def _check_cluster(self) -> None:
        for name, seconds in self._lookout.silent(PS).items():
            if seconds > SERVER_PATIENCE:
                raise self._retry(task_server.server_lost_line(name, self._addresses[name]))
        workers = self._lookout.silent(WORKER)
        if len(workers) == self.workers and min(workers.values()) > self._patience:
            listed = ", ".join(f"{name} at {self._addresses[name]}" for name in workers)
            raise self._retry(f"no worker has answered for {self._patience:g} s: {listed}")

    def _explained(self, error: Exception) -> Exception:
        """What to raise for an error of a step: the loss of a server is told by its name."""
        if line := task_server.server_lost(self._task, error):
            return self._retry(line)
        if isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)):
            return self._retry(f"the cluster failed: {reason(error)}")
        return error

    def _settle(self) -> None:
        """No step is under way: counts what ran again, and sets the counts right."""
        done = int(self._begun.numpy())
        self.again += done - self._position
        self._set_counts(self._position)

    def _set_counts(self, position: int) -> None:
        for variable in (self._begun, *self._counts):
            variable.assign(position)

    def _tell(self, name: str, up: bool) -> None:
        what = "answers again" if up else "does not answer: the others go on"
        print(f"{name} at {self._addresses[name]} {what}", flush=True)

    def report(self) -> str:
        """One line about the steps of this process."""
        executed = self.scheduled + self.again
        text = f"{self.scheduled} steps scheduled, {executed} executed"
        if self.again:
            text += f": {self.again} ran again after a worker was lost"
        return text

    def close(self) -> None:
        """Tells the workers and servers that training is over."""
        self._lookout.stop()
        task_server.dismiss(self._addresses)


def _of_interest(record: logging.LogRecord) -> bool:
    # What the coordinator logs of a lost worker are many lines; ours is one. And the saver of
    # variables that lie in several processes is traced for each checkpoint, and warned of that.
    return record.module != "cluster_coordinator" and "MultiDeviceSaver" not in record.getMessage()
