"""Flags -> the strategy of tf.distribute that computes, with its cluster up and agreed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bnzoo.layers import BatchNormalization

from . import data, rendezvous, run_directory, task_server
from .cluster import CHIEF, WORKER, Task, find_task
from .command_line import BadFlags, RunFailed, RunStopped
from .data import Inputs, Share
from .failures import reason
from .peers import Peers
from .placement import MIRRORED, ONE_DEVICE, PARAMETER_SERVER, Placement
from .settings import Settings

PROGRAM = "bnzoo-train"
# Seconds that a process may not give a sign of life to TensorFlow.
HEARTBEAT_SECONDS = 600
# What operations that several processes do together raise when one of them is gone.
_OF_THE_CLUSTER = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Devices:
    """What computes: replicas in step with each other, in this process and in others.

    Attributes:
        strategy: of tf.distribute; for one device its default one.
        task: this process among those of a cluster; None where it is alone.
        peers: looks whether the other processes are there, if all have to be.
        asynchronous: whether workers train on their own, with this process as their chief.
        patience: seconds to wait for other processes.
    """

    strategy: tf.distribute.Strategy
    task: Task | None = None
    peers: Peers | None = None
    asynchronous: bool = False
    patience: float = 0.0

    @property
    def is_chief(self) -> bool:
        """Whether this process reports, and writes the run."""
        return self.task is None or self.task.is_chief

    @property
    def replicas(self) -> int:
        """How many there are in all processes together."""
        return self.strategy.num_replicas_in_sync

    @property
    def local_replicas(self) -> int:
        """How many there are in this process."""
        return len(self.strategy.extended.worker_devices) if self.replicas > 1 else 1

    @property
    def processes(self) -> int:
        """How many train together."""
        return self.replicas // self.local_replicas

    @property
    def process(self) -> int:
        """The number of this one, from 0: that of its first replica among all."""
        if self.task is None:
            return 0
        return [name for name, _ in self.task.tasks].index(self.task.name)

    def share(self, batch_size: int) -> Share | None:
        """The rows that this process reads of each global batch; None where it reads all."""
        if self.replicas == 1:
            return None
        return data.share(batch_size, self.processes, self.process, self.replicas)

    def batches(self, local: tf.data.Dataset) -> Iterator[Any]:
        """The endless batches of this process, one for each of its replicas in turn, as one."""
        if self.replicas == 1:
            return iter(local)
        # Known to be endless, tf.distribute does not ask before each step whether all have more.
        endless = local.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        return iter(self.strategy.distribute_datasets_from_function(lambda _: endless))

    def total(self, *values: float) -> np.ndarray:
        """The sum of each of `values` over all processes, the same in each; float64."""
        own = np.array(values, np.float64)
        if self.processes == 1:
            return own
        return self._total(tf.constant(own)).numpy()

    def check_same_data(self, inputs: Inputs) -> None:
        """BadFlags if the processes do not see the same data set."""
        own = (
            inputs.train.examples,
            inputs.evaluation.examples,
            len(inputs.labels),
            zlib.crc32("\n".join(inputs.labels).encode()),
        )
        if (self.total(*own) != np.multiply(own, self.processes)).any():
            raise BadFlags(
                "the processes do not see the same data set: here it has "
                f"{inputs.train.examples} training and {inputs.evaluation.examples} held-out "
                f"examples of {len(inputs.labels)} classes"
            )

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Turns an error inside that comes of the loss of another process into one line."""
        try:
            yield
        except (*_OF_THE_CLUSTER, RunFailed) as error:
            if self.asynchronous and self.task:
                if line := task_server.server_lost(self.task, error):
                    raise RunStopped(line) from error
                raise
            if self.peers is None or isinstance(error, RunFailed):
                raise
            if self.peers.lost():
                raise self.peers.error() from error
            raise RunFailed(f"the cluster failed: {reason(error)}") from error

    def part(self) -> None:
        """The last thing that the processes do together: from here on each may end."""
        self.total(0.0)
        if self.peers:
            # Another may still be fetching from this process what the sum is made of.
            time.sleep(1.0)
            self.peers.stop()

    @tf.function(reduce_retracing=True)
    def _total(self, own: tf.Tensor) -> tf.Tensor:
        return sum_over_processes(self, own)


def sum_over_processes(devices: Devices, own: tf.Tensor) -> tf.Tensor:
    """(In a tf.function, outside of replicas.) The sum of `own` over all processes."""
    if devices.processes == 1:
        return own
    # Each of the process's replicas brings its part.
    parts = devices.strategy.run(lambda value: value / devices.local_replicas, args=(own,))
    return devices.strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)


def facts(
    settings: Settings, placement: Placement, run_dir: str
) -> Mapping[str, Mapping[str, Any]]:
    """What must be the same in all processes that train together."""
    flags = {
        **dataclasses.asdict(settings),
        "strategy": placement.strategy,
        # One that is relative is another folder in another place.
        "run_dir": os.path.abspath(run_dir),
    }
    return {"flag": flags, "version": run_directory.versions()}


def open_devices(
    settings: Settings, placement: Placement, run_dir: str, task: Task | None = None
) -> Devices:
    """Builds what `placement` asks for; before anything else of TensorFlow runs.

    Args:
        settings: those of the run.
        placement: what computes.
        run_dir: the folder of the run, which all processes share.
        task: this process among those of the cluster, where that is known already.

    Raises:
        BadFlags: there is no such cluster or device, its processes were started differently, or
            the batch is too small for it.
        RunFailed: a process of the cluster does not answer.
    """
    if placement.strategy == ONE_DEVICE:
        return Devices(tf.distribute.get_strategy())
    if placement.strategy == MIRRORED:
        devices = Devices(_mirrored(placement.devices))
    else:
        task = task or find_task(placement)
        same, patience = facts(settings, placement, run_dir), placement.cluster_timeout
        if placement.strategy == PARAMETER_SERVER:
            strategy = task_server.connect(task, same, patience)
            return Devices(strategy, task, asynchronous=True, patience=patience)
        rendezvous.meet(task, same, patience)
        devices = _multi_worker(task)
    if settings.batch_size < devices.replicas:
        raise BadFlags(
            f"--batch_size must be at least {devices.replicas}, one example for each device. "
            f"Received: --batch_size={settings.batch_size}"
        )
    return devices


def _mirrored(count: int | None) -> tf.distribute.Strategy:
    """All devices of this machine, or the first `count`, in step."""
    accelerators = tf.config.list_physical_devices("GPU")
    if accelerators:
        if (count or 1) > len(accelerators):
            raise BadFlags(
                f"--devices must be at most {len(accelerators)}, the accelerators of this "
                f"machine. Received: --devices={count}"
            )
        names = [f"GPU:{number}" for number in range(count or len(accelerators))]
        return tf.distribute.MirroredStrategy(names, tf.distribute.NcclAllReduce())
    processor = tf.config.list_physical_devices("CPU")[0]
    parts = tf.config.get_logical_device_configuration(processor) or [None]
    if (count or 1) > len(parts):
        parts = [tf.config.LogicalDeviceConfiguration()] * (count or 1)
        try:
            tf.config.set_logical_device_configuration(processor, parts)
        except RuntimeError as error:  # Already in use.
            raise BadFlags(f"--devices={count}: {reason(error)}") from error
    names = [f"CPU:{number}" for number in range(count or len(parts))]
    # Sums in one order, so that a run can be repeated; and needs no threads that wait.
    return tf.distribute.MirroredStrategy(names, tf.distribute.ReductionToOneDevice())


def _bear_pauses(task: Task) -> None:
    """Lets processes that are paused for a while, as when a machine is moved, go on training.

    tf.distribute gives up a process whose heart has not beaten for some 10 seconds. Those that are
    gone are seen sooner by `Peers`. There is no public way to say so.
    """
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.eager import context

    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=_leader(task),
        heartbeat_timeout_in_ms=HEARTBEAT_SECONDS * 1000,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(task.jobs[job]))
            for job in (CHIEF, WORKER)
            if job in task.jobs
        ],
    )


def _leader(task: Task) -> str:
    """TensorFlow's name of the process that leads: the chief or, without one, worker 0."""
    return f"/job:{CHIEF if CHIEF in task.jobs else WORKER}/replica:0/task:0"


def _multi_worker(task: Task) -> Devices:
    """All devices of all processes, which have met, in step."""
    _bear_pauses(task)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        task_server.cluster_spec(task),
        task_type=task.job,
        task_id=task.index,
        num_accelerators={"GPU": len(tf.config.list_physical_devices("GPU"))},
        rpc_layer="grpc",
    )
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except (tf.errors.OpError, RuntimeError) as error:
        raise RunFailed(f"the cluster cannot be started: {reason(error)}") from error
    return Devices(strategy, task, Peers(task, PROGRAM) if task.others else None)


def synchronize(model: keras.Model) -> None:
    """Lets each Batch Normalization of `model`, not called yet in training, see all replicas."""
    for layer in model.layers:
        if isinstance(layer, BatchNormalization):
            layer.synchronized = True
        elif isinstance(layer, keras.Model):
            synchronize(layer)
