"""What workers and parameter servers do: serve the chief until it is done, or gone for good.

A task and the chief tell each other two things by files that are in the memory of the task's
process alone (TensorFlow's ram:// files, which the chief reads and writes by operations that it
runs on the task): what the task was started with, and that training is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from .cluster import CHIEF, PS, WORKER, Task
from .command_line import BadFlags, RunFailed, RunStopped
from .failures import reason
from .rendezvous import differences
from .stopping import StopRequest

# Seconds from one look at an address to the next, and that one look may take.
LOOK_EVERY = 2.0
LOOK_FOR = 2.0
# Operations that a server works on at a time, at least.
LEAST_THREADS = 4
# Seconds that a server told to stop goes on, so that a chief told the same can save; less than the
# 30 that Kubernetes and bnzoo-launch give.
SAVING_SECONDS = 20.0

_FACTS = "ram://bnzoo/facts.json"
_DISMISSED = "ram://bnzoo/dismissed"

# In what TensorFlow says of an error that has come from a parameter server.
_OF_A_SERVER = re.compile(r"remote target /job:ps/replica:0/task:(\d+)")
# Its own loss is of these kinds, or comes as one of others with such words once it was started
# again. An error of a step, such as a failed check, passes through servers too, and has lost none.
_OF_A_LOSS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
)
_FORGOTTEN = re.compile(r"find a context_id|(Resource|Container) \S+ does not exist")

Facts = Mapping[str, Mapping[str, Any]]


def answers(address: str) -> bool:
    """Whether a process accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), LOOK_FOR):
            return True
    except OSError:
        return False


def servants(task: Task) -> dict[str, str]:
    """The addresses of the workers and parameter servers of a cluster, by their names."""
    return {name: address for name, address in task.tasks if job_of(name) in (WORKER, PS)}


def job_of(name: str) -> str:
    """The kind of process that has this name."""
    return name.partition(" ")[0]


class Lookout:
    """Looks in the background which of some processes answer.

    Args:
        addresses: where they listen, by their names.
        tell: is called, in the background, with the name of one that has stopped to answer and
            False, and of one that answers again and True.
    """

    def __init__(
        self, addresses: Mapping[str, str], tell: Callable[[str, bool], None] | None = None
    ) -> None:
        self._addresses = addresses
        self._tell = tell or (lambda name, up: None)
        self._since: dict[str, float] = {}
        self._over = threading.Event()
        threading.Thread(target=self._look, name="lookout", daemon=True).start()

    def _look(self) -> None:
        while not self._over.is_set():
            for name, address in self._addresses.items():
                up = answers(address)
                if up == (name not in self._since) or self._over.is_set():
                    continue
                if up:
                    del self._since[name]
                else:
                    self._since[name] = time.monotonic()
                self._tell(name, up)
            self._over.wait(LOOK_EVERY)

    def silent(self, job: str) -> dict[str, float]:
        """Those of kind `job` that do not answer, and for how many seconds they have not."""
        now = time.monotonic()
        return {
            name: now - since for name, since in list(self._since.items()) if job_of(name) == job
        }

    def stop(self) -> None:
        """Ends the looking."""
        self._over.set()


def serve(task: Task, facts: Facts, patience: float) -> None:
    """Runs a tf.distribute.Server until the chief dismisses it.

    Args:
        task: the worker or parameter server that this process is.
        facts: what it was started with, for the chief to compare.
        patience: seconds that the chief may not answer, from the start on and later: a chief that
            is started again finds its servers waiting.

    Raises:
        RunFailed: the address is taken, or the chief has not answered for too long.
        RunStopped: SIGTERM came. As it comes to all processes of a job at once, and the chief needs
            the others to save, this is once the chief is gone, or after SAVING_SECONDS.
    """
    with StopRequest() as stop:
        _serve(task, facts, patience, stop)


def _serve(task: Task, facts: Facts, patience: float, stop: StopRequest) -> None:
    tf.io.write_file(_FACTS, json.dumps(facts))
    chief = f"{CHIEF} 0"
    # A thread may wait for what another one has to do, which on a single core there would not be.
    threads = max(LEAST_THREADS, os.cpu_count() or 1)
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads)
    try:
        server = tf.distribute.Server(
            cluster_spec(task), task.job, task.index, protocol="grpc", config=config
        )
    except tf.errors.OpError as error:
        raise RunFailed(
            f"{task.name} cannot listen on its address {task.address}: {reason(error)}"
        ) from error
    lookout = Lookout({chief: dict(task.tasks)[chief]})
    print(f"{task.name} serves at {task.address}", flush=True)
    told: float | None = None
    while not tf.io.gfile.exists(_DISMISSED):
        seconds = lookout.silent(CHIEF).get(chief, 0.0)
        if stop.came:
            told = told or time.monotonic()
            if seconds > 0 or time.monotonic() - told > SAVING_SECONDS:
                raise RunStopped(f"{task.name} is stopped by SIGTERM")
        if seconds > patience:
            raise RunFailed(
                f"{task.name} ends: no answer from the chief at {dict(task.tasks)[chief]} "
                f"for {seconds:.0f} s"
            )
        time.sleep(0.5)
    lookout.stop()
    del server
    print(f"{task.name} is done", flush=True)


def cluster_spec(task: Task) -> tf.train.ClusterSpec:
    """The cluster of `task` as TensorFlow wants it."""
    return tf.train.ClusterSpec({job: list(addresses) for job, addresses in task.jobs.items()})


def connect(task: Task, facts: Facts, timeout: float) -> tf.distribute.ParameterServerStrategy:
    """(On the chief.) The strategy, once all tasks answer and were started alike.

    Args:
        task: the chief.
        facts: what it was started with.
        timeout: seconds to wait for the others.

    Raises:
        RunFailed: not all answer in that time.
        BadFlags: one was started with other facts, or has more than one accelerator.
    """
    _wait_for(servants(task), timeout)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster_spec(task), task_type=task.job, task_id=task.index, rpc_layer="grpc"
    )
    try:
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        found = {}
        for name in servants(task):
            with _on(name):
                found[name] = json.loads(tf.io.read_file(_FACTS).numpy())
    except tf.errors.OpError as error:
        raise RunFailed(f"the cluster cannot be connected: {reason(error)}") from error
    if strategy.num_replicas_in_sync > 1:
        raise BadFlags(
            "--strategy=parameter_server uses one accelerator in each process, but the workers "
            f"have {strategy.num_replicas_in_sync}. Start as many workers, each with "
            "CUDA_VISIBLE_DEVICES set to one"
        )
    for name, theirs in found.items():
        if different := differences(json.loads(json.dumps(facts)), theirs):
            raise BadFlags(
                f"{name} at {dict(task.tasks)[name]} does not run the same as {task.name}: "
                f"{', '.join(different)}. All processes must be started alike"
            )
    return strategy


def _wait_for(addresses: Mapping[str, str], timeout: float) -> None:
    end = time.monotonic() + timeout
    missing = dict(addresses)
    while missing := {name: at for name, at in missing.items() if not answers(at)}:
        if time.monotonic() > end:
            raise RunFailed(
                f"no answer within {timeout:g} s from "
                f"{', '.join(f'{name} at {address}' for name, address in missing.items())}. See "
                "that it is started with the same cluster and can be reached, or give it longer "
                "with --cluster_timeout"
            )
        time.sleep(0.2)


def server_lost(task: Task, error: Exception) -> str | None:
    """(On the chief.) The line about the parameter server whose loss `error` comes of, if it does.

    What a server held is lost with it, also where it was started again at once.
    """
    addresses = servants(task)
    text = f"{error} {error.__cause__}"
    told = _OF_A_SERVER.search(text)
    # What TensorFlow's coordinator wraps has this attribute.
    wrapped = (error, error.__cause__, getattr(error, "original_exception", None))
    of_a_loss = any(isinstance(one, _OF_A_LOSS) for one in wrapped) or _FORGOTTEN.search(text)
    lost = [f"{PS} {told[1]}"] if told and of_a_loss else []
    lost += [name for name, at in addresses.items() if job_of(name) == PS and not answers(at)]
    return server_lost_line(lost[0], addresses[lost[0]]) if lost else None


def server_lost_line(name: str, address: str) -> str:
    """What is said of a parameter server that is lost, and is to be done."""
    return (
        f"{name} at {address} is lost, with the variables that it held: start it and the chief "
        "again, and training goes on from the last checkpoint"
    )


def dismiss(addresses: Mapping[str, str]) -> None:
    """(On the chief.) Tells that training is over to those that answer."""
    for name, address in addresses.items():
        if answers(address):
            with _on(name), contextlib.suppress(tf.errors.OpError):
                tf.io.write_file(_DISMISSED, "")


def _on(name: str) -> contextlib.AbstractContextManager[Any]:
    job, _, index = name.partition(" ")
    return tf.device(f"/job:{job}/replica:0/task:{index}/device:CPU:0")
