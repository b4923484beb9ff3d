"""Where a run computes: the strategy, the devices of this machine, and who tells of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .command_line import BadFlags, Flag

ONE_DEVICE, MIRRORED = "one_device", "mirrored"
MULTI_WORKER, PARAMETER_SERVER = "multi_worker", "parameter_server"
STRATEGIES = (ONE_DEVICE, MIRRORED, MULTI_WORKER, PARAMETER_SERVER)
TF_CONFIG, SLURM, KUBERNETES = "tf_config", "slurm", "kubernetes"
CLUSTERS = (TF_CONFIG, SLURM, KUBERNETES)

PLACEMENT_FLAGS = (
    Flag(
        "strategy",
        "string",
        "one_device; mirrored: all devices of this machine, in step; multi_worker: those of "
        "several processes, in step; parameter_server: workers that do not wait for each other.",
        ONE_DEVICE,
    ),
    Flag(
        "devices",
        "integer",
        "Devices of this machine that mirrored uses; without accelerators, parts of the processor. "
        "Default: all accelerators, or the processor.",
    ),
    Flag(
        "cluster",
        "string",
        f"Who tells of the other processes: {', '.join(CLUSTERS)}. Default: tf_config where "
        "TF_CONFIG is set, else slurm where SLURM_PROCID is.",
    ),
    Flag(
        "cluster_timeout",
        "float",
        "Seconds that the processes of a cluster wait for each other when they start.",
        300.0,
    ),
    Flag(
        "cluster_port",
        "integer",
        "First port of the processes under slurm; the port of each under kubernetes. "
        "Default: 8888 and 8470.",
    ),
    Flag(
        "parameter_servers",
        "integer",
        "How many of Slurm's tasks hold the variables under parameter_server; one more leads.",
        1,
    ),
    Flag(
        "pod_labels",
        "list",
        "Label selectors of the pods under kubernetes, job:selector,job:selector; for example "
        "worker:app=bnzoo. The jobs are worker and, for parameter_server, chief and ps.",
    ),
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """One value for each flag that decides where a run computes, and not what."""

    strategy: str = ONE_DEVICE
    devices: int | None = None
    cluster: str | None = None
    cluster_timeout: float = 300.0
    cluster_port: int | None = None
    parameter_servers: int = 1
    pod_labels: tuple[str, ...] = ()

    @property
    def in_cluster(self) -> bool:
        """Whether other processes take part."""
        return self.strategy in (MULTI_WORKER, PARAMETER_SERVER)


def placement(given: Mapping[str, Any]) -> Placement:
    """What the flags say of where to compute.

    Args:
        given: the value of each of `PLACEMENT_FLAGS`.

    Raises:
        BadFlags: with one line for each flag that is wrong.
    """
    problems = []
    for name, allowed in (("strategy", STRATEGIES), ("cluster", CLUSTERS)):
        if given[name] is not None and given[name] not in allowed:
            problems.append(
                f"--{name} must be one of {', '.join(allowed)}. Received: --{name}={given[name]}"
            )
    for name in ("devices", "parameter_servers"):
        if given[name] is not None and given[name] < 1:
            problems.append(
                f"--{name} must be a whole number of at least 1. Received: --{name}={given[name]}"
            )
    if given["cluster_port"] is not None and not 0 < given["cluster_port"] < 65536:
        problems.append(
            "--cluster_port must be a whole number in [1, 65535]. "
            f"Received: --cluster_port={given['cluster_port']}"
        )
    if not 0 < given["cluster_timeout"] < float("inf"):
        problems.append(
            "--cluster_timeout must be a positive number of seconds. "
            f"Received: --cluster_timeout={given['cluster_timeout']}"
        )
    found = Placement(
        **{
            **{field.name: given[field.name] for field in dataclasses.fields(Placement)},
            "pod_labels": tuple(given["pod_labels"] or ()),
        }
    )
    if found.devices is not None and found.strategy != MIRRORED:
        problems.append(
            f"--devices is for --strategy={MIRRORED} alone. Received: --strategy={found.strategy}"
        )
    if found.cluster is not None and not found.in_cluster:
        problems.append(
            f"--cluster is for --strategy={MULTI_WORKER} and {PARAMETER_SERVER} alone. "
            f"Received: --strategy={found.strategy}"
        )
    if problems:
        raise BadFlags(*problems)
    return found
