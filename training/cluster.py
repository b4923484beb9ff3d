"""The processes that train together: who they are, where they listen, and which one this is."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping
from typing import Any

from .command_line import BadFlags
from .placement import PARAMETER_SERVER, SLURM, TF_CONFIG, Placement

CHIEF, WORKER, PS = "chief", "worker", "ps"
# The ports that the resolvers of tf.distribute take themselves.
_SLURM_PORT, _KUBERNETES_PORT = 8888, 8470
_EXAMPLE = '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
_FORM = "host:port, with a port in [1, 65535]"
# A name, an address of four numbers, or one of IPv6 in brackets; nothing before it, nothing behind.
_ADDRESS = re.compile(
    r"(?:[\w-]{1,63}(?:\.[\w-]{1,63})*\.?|\[[0-9a-f:.]+(?:%[\w.-]+)?\]):(\d{1,5})", re.A | re.I
)


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of a cluster, and all that it knows of the others.

    Attributes:
        jobs: the addresses, host:port, of each kind of process, in the order of their numbers.
        job: its kind: chief, worker or ps.
        index: its number among those of its kind.
    """

    jobs: Mapping[str, tuple[str, ...]]
    job: str
    index: int

    @property
    def address(self) -> str:
        """Where this process listens."""
        return self.jobs[self.job][self.index]

    @property
    def name(self) -> str:
        """What this process is called in messages."""
        return f"{self.job} {self.index}"

    @property
    def is_chief(self) -> bool:
        """Whether this process reports, and writes the run."""
        return (self.job, self.index) == ((CHIEF if CHIEF in self.jobs else WORKER), 0)

    @property
    def tasks(self) -> list[tuple[str, str]]:
        """Name and address of each process, the chief first, in the order of tf.distribute."""
        return [
            (f"{job} {index}", address)
            for job in sorted(self.jobs, key=(CHIEF, WORKER, PS).index)
            for index, address in enumerate(self.jobs[job])
        ]

    @property
    def others(self) -> dict[str, str]:
        """The address of each other process, by its name."""
        return {name: address for name, address in self.tasks if name != self.name}


def find_task(placement: Placement, environment: Mapping[str, str] = os.environ) -> Task:
    """The cluster that `placement` names, and this process's place in it.

    Raises:
        BadFlags: there is none, or what tells of it is wrong.
    """
    kind = placement.cluster
    if kind is None:
        kind = next(
            (
                kind
                for kind, name in ((TF_CONFIG, "TF_CONFIG"), (SLURM, "SLURM_PROCID"))
                if name in environment
            ),
            None,
        )
    if kind is None:
        raise BadFlags(
            f"--strategy={placement.strategy} needs a cluster, but neither TF_CONFIG nor "
            "SLURM_PROCID is set. Set TF_CONFIG, start the processes by srun or by bnzoo-launch, "
            "or give --cluster=kubernetes"
        )
    if kind == TF_CONFIG:
        if "TF_CONFIG" not in environment:
            raise BadFlags("--cluster=tf_config needs the environment variable TF_CONFIG")
        task = parse_tf_config(environment["TF_CONFIG"])
    else:
        task = (_slurm if kind == SLURM else _kubernetes)(placement, environment)
    _check_jobs(task, placement.strategy, kind)
    return task


def parse_tf_config(text: str) -> Task:
    """The cluster in the JSON text of TF_CONFIG.

    Raises:
        BadFlags: it is malformed.
    """

    received = f"Received: {' '.join(text.split())}"

    def check(holds: bool, what: str) -> None:
        if not holds:
            raise BadFlags(f"TF_CONFIG must be like {_EXAMPLE}: {what}. {received}")

    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadFlags(f"TF_CONFIG is not JSON: {error}. {received}") from error
    check(isinstance(config, dict), "it must be an object")
    cluster, task = config.get("cluster"), config.get("task")
    check(isinstance(cluster, dict) and bool(cluster), "it lacks the cluster")
    check(isinstance(task, dict), "it lacks the task")
    for job, addresses in cluster.items():
        check(isinstance(addresses, list), f"{job} must be a list of {_FORM}")
        for index, address in enumerate(addresses):
            what = f"{job} {index} must be given as {_FORM}, not as {json.dumps(address)}"
            check(_is_address(address), what)
    everything = [address for addresses in cluster.values() for address in addresses]
    check(len(set(everything)) == len(everything), "two processes have one address")
    job, index = task.get("type"), task.get("index")
    check(
        isinstance(job, str) and job in cluster, f"there is no process of type {job} in the cluster"
    )
    # Some that start clusters write the number as text.
    number = int(index) if isinstance(index, str) and index.isdecimal() else index
    check(
        type(number) is int and 0 <= number < len(cluster[job]),
        f"there is no {job} {index} in the cluster",
    )
    return Task({job: tuple(found) for job, found in cluster.items()}, job, number)


def _is_address(value: Any) -> bool:
    found = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    return found is not None and 0 < int(found[1]) < 65536


def _check_jobs(task: Task, strategy: str, kind: str) -> None:
    """BadFlags if the cluster's kinds of process are not those of `strategy`."""
    counts = {job: len(addresses) for job, addresses in task.jobs.items()}
    received = f"Received from {kind}: " + ", ".join(f"{n} {job}" for job, n in counts.items())
    if unknown := counts.keys() - {CHIEF, WORKER, PS}:
        raise BadFlags(
            f"the processes of a cluster must be {CHIEF}, {WORKER} or {PS}, not "
            f"{', '.join(sorted(unknown))}. {received}"
        )
    for name, address in task.tasks:
        if not _is_address(address):
            raise BadFlags(f"{name} must listen at {_FORM}, not at {address}. {received}")
    if strategy == PARAMETER_SERVER:
        if counts.get(CHIEF) != 1 or not counts.get(WORKER) or not counts.get(PS):
            raise BadFlags(
                f"--strategy={strategy} needs 1 chief and at least 1 worker and 1 ps. {received}"
            )
    elif PS in counts or counts.get(CHIEF, 0) > 1 or not (counts.get(CHIEF) or counts.get(WORKER)):
        raise BadFlags(
            f"--strategy={strategy} needs workers, of which one may be called chief, and no ps. "
            f"{received}"
        )


def _slurm(placement: Placement, environment: Mapping[str, str]) -> Task:
    """By SlurmClusterResolver; under parameter_server its first task leads, then come the ps."""
    if "SLURM_PROCID" not in environment:
        raise BadFlags("--cluster=slurm needs SLURM_PROCID: start the processes by srun")
    import tensorflow as tf

    jobs = None
    if placement.strategy == PARAMETER_SERVER:
        total, ps = _slurm_tasks(environment), placement.parameter_servers
        if total < ps + 2:
            raise BadFlags(
                f"--strategy={PARAMETER_SERVER} with --parameter_servers={ps} needs at least "
                f"{ps + 2} tasks: a chief, {ps} ps, and a worker. Received from slurm: {total}"
            )
        jobs = {CHIEF: 1, PS: ps, WORKER: total - ps - 1}
    # It deals the accelerators of a node out to its tasks, unless there are none, or Slurm did. It
    # cannot do without any: then it is told of some that nobody gets.
    dealt = shutil.which("nvidia-smi") is None or "SLURM_GPUS_PER_TASK" in environment
    none = {"gpus_per_node": _slurm_tasks(environment), "gpus_per_task": 1, "auto_set_gpu": False}
    try:
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            jobs=jobs,
            port_base=placement.cluster_port or _SLURM_PORT,
            **(none if dealt else {"auto_set_gpu": True}),
        )
        found = resolver.cluster_spec().as_dict()
        job, index = resolver.get_task_info()
    except (RuntimeError, ValueError, KeyError) as error:
        raise BadFlags(f"Slurm's variables do not tell of a cluster: {error}") from error
    return Task({job: tuple(addresses) for job, addresses in found.items()}, job, index)


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    raise BadFlags("--cluster=slurm needs SLURM_STEP_NUM_TASKS: start the processes by srun")


def _kubernetes(placement: Placement, environment: Mapping[str, str]) -> Task:
    """By KubernetesClusterResolver, which lists pods; this one is known by its address."""
    import tensorflow as tf

    selectors: dict[str, list[str]] = {}
    for label in placement.pod_labels:
        job, colon, selector = label.partition(":")
        if not colon or not selector:
            raise BadFlags(f"--pod_labels must be job:selector,... Received: {label}")
        selectors.setdefault(job, []).append(selector)
    if not selectors:
        raise BadFlags("--cluster=kubernetes needs --pod_labels, such as worker:app=bnzoo")
    port = placement.cluster_port or _KUBERNETES_PORT
    try:
        resolver = tf.distribute.cluster_resolver.KubernetesClusterResolver(
            selectors, tf_server_port=port
        )
        found = resolver.cluster_spec().as_dict()
    except ImportError as error:
        raise BadFlags("--cluster=kubernetes needs the package: pip install kubernetes") from error
    except Exception as error:
        # The client of Kubernetes raises errors of its own, which may not be installed.
        raise BadFlags(f"Kubernetes does not tell of a cluster: {error}") from error
    own = {environment.get("POD_IP"), environment.get("HOST_IP"), *_own_addresses()}
    for job, addresses in found.items():
        for index, address in enumerate(addresses):
            if address.rpartition(":")[0] in own:
                return Task({job: tuple(found[job]) for job in found}, job, index)
    listed = ", ".join(address for addresses in found.values() for address in addresses)
    raise BadFlags(
        f"none of the pods of --pod_labels ({listed}) is this one. Set POD_IP and HOST_IP from "
        "the pod's status (the downward API of Kubernetes)"
    )


def _own_addresses() -> set[str]:
    try:
        return set(socket.gethostbyname_ex(socket.gethostname())[2])
    except OSError:
        return set()
