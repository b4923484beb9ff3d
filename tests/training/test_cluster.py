"""Who trains together: TF_CONFIG, Slurm, Kubernetes, and what is said where there is no cluster."""

from __future__ import annotations

import json
import os
import shutil
import sys
import types
from typing import Any

import pytest

from training import train
from training.cluster import Task, find_task, parse_tf_config
from training.command_line import BadFlags
from training.placement import Placement, placement

from .helpers import given, train_argv

TWO = {"worker": ["a:1", "b:2"]}
MULTI_WORKER = Placement(strategy="multi_worker")


def config(cluster: Any = TWO, **task: Any) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1, **task}})


def test_tf_config() -> None:
    task = find_task(MULTI_WORKER, {"TF_CONFIG": config(), "SLURM_PROCID": "0"})
    assert (task.name, task.address, task.is_chief) == ("worker 1", "b:2", False)
    assert task.others == {"worker 0": "a:1"}
    assert find_task(MULTI_WORKER, {"TF_CONFIG": config(index=0)}).is_chief
    # The number as text, and a chief that the cluster names last.
    text = config({**TWO, "chief": ["c:3"]}, index="0")
    assert not parse_tf_config(text).is_chief
    assert [name for name, _ in parse_tf_config(text).tasks] == ["chief 0", "worker 0", "worker 1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"^TF_CONFIG is not JSON: Expecting .*\. Received: \{$"),
        ("[]", "it must be an object"),
        ("{}", "it lacks the cluster"),
        (json.dumps({"cluster": TWO}), "it lacks the task"),
        (config({"worker": "a:1"}), r"worker must be a list of host:port, with a port in \[1, "),
        (config({"worker": ["a:1", "a:1"]}), "two processes have one address"),
        (config(type="chief"), "there is no process of type chief in the cluster"),
        (config(type=["worker"]), r"there is no process of type \['worker'\] in the cluster"),
        (config(index=2), "there is no worker 2 in the cluster"),
        (config(index=-1), "there is no worker -1 in the cluster"),
        (config(index=None), "there is no worker None in the cluster"),
        (config(index=True), "there is no worker True in the cluster"),
        (
            config(index="\N{SUPERSCRIPT TWO}"),
            "there is no worker \N{SUPERSCRIPT TWO} in the clust",
        ),
        (
            '{"cluster":\n  {"worker":\n  ["h"]},\n "task": {}}',
            r'not as "h"\. Received: \{"cluster": ',
        ),
    ],
)
def test_malformed_tf_config(text: str, message: str) -> None:
    with pytest.raises(BadFlags, match=message) as caught:
        parse_tf_config(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "http://h:2222",
        "h",
        "h:",
        "h:0",
        "h:99999",
        "h:65536",
        "h:\N{SUPERSCRIPT TWO}",
        "h:1:2",
        ":2222",
        "h:2222/",
        "me@h:2222",
        "h h:2222",
        "h..i:2222",
        "x" * 64 + ":2222",
        "::1:2222",
        "",
        2222,
        None,
        ["h:2222"],
    ],
)
def test_an_address_that_is_none_is_named(address: Any) -> None:
    with pytest.raises(BadFlags) as caught:
        parse_tf_config(config({"worker": ["a:1", address]}))
    told = "worker 1 must be given as host:port, with a port in [1, 65535], not as "
    assert f": {told}{json.dumps(address)}. Received: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["h:1", "h-1.a_b.svc.cluster.local.:65535", "10.0.0.1:02222", "[fe80::1%eth0]:2222"]
)
def test_addresses(address: str) -> None:
    assert parse_tf_config(config({"worker": ["a:1", address]})).address == address


@pytest.mark.parametrize(
    ("strategy", "cluster", "message"),
    [
        ("multi_worker", {**TWO, "ps": ["c:3"]}, "needs workers, of which one may be called chief"),
        ("multi_worker", {**TWO, "chief": ["c:3", "d:4"]}, "Received from tf_config: 2 worker, 2"),
        ("parameter_server", TWO, "needs 1 chief and at least 1 worker and 1 ps"),
        ("multi_worker", {**TWO, "evaluator": ["c:3"]}, "must be chief, worker or ps, not evalua"),
    ],
)
def test_processes_that_do_not_fit_the_strategy(strategy: str, cluster: Any, message: str) -> None:
    with pytest.raises(BadFlags, match=message):
        find_task(Placement(strategy=strategy), {"TF_CONFIG": config(cluster)})


def test_without_a_cluster_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert train.main(train_argv(tmp_path / "run", "--strategy=multi_worker")) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "bnzoo-train: --strategy=multi_worker needs a cluster, but neither TF_CONFIG nor "
        "SLURM_PROCID is set"
    )
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "CUDA_VISIBLE_DEVICES": "4,5",
}


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    task = find_task(MULTI_WORKER, SLURM)
    addresses = ("node1:8888", "node1:8889", "node2:8888", "node2:8889")
    assert task == Task({"worker": addresses}, "worker", 2)
    placed = Placement(strategy="parameter_server", cluster_port=5000)
    task = find_task(placed, SLURM)
    assert task.jobs == {
        "chief": ("node1:5000",),
        "ps": ("node1:5001",),
        "worker": ("node2:5000", "node2:5001"),
    }
    assert task.name == "worker 0"
    with pytest.raises(
        BadFlags, match=r"^worker 1 must listen at host:port, .*, not at node1:65536"
    ):
        find_task(Placement(strategy="multi_worker", cluster_port=65535), SLURM)
    with pytest.raises(BadFlags, match="needs at least 5 tasks: a chief, 3 ps, and a worker"):
        find_task(Placement(strategy="parameter_server", parameter_servers=3), SLURM)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"  # Dealt out by Slurm, or of no use.
    monkeypatch.setattr(shutil, "which", lambda _: "nvidia-smi")
    assert find_task(MULTI_WORKER, SLURM).name == "worker 2"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"  # The first of two tasks on its node.
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    with pytest.raises(BadFlags, match=r"Slurm's variables do not tell of a cluster: .*NODELIST"):
        find_task(MULTI_WORKER, SLURM)
    with pytest.raises(BadFlags, match="--cluster=slurm needs SLURM_PROCID"):
        find_task(Placement(strategy="multi_worker", cluster="slurm"), {})


def pod(name: str, address: str, phase: str = "Running") -> types.SimpleNamespace:
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(name=name),
        status=types.SimpleNamespace(host_ip=address, phase=phase),
    )


def test_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a client of our own in the place of Kubernetes': pods come in the order of names."""
    pods = [pod("b", "10.0.0.2"), pod("a", "10.0.0.1")]

    class Client:
        def list_pod_for_all_namespaces(self, label_selector: str) -> types.SimpleNamespace:
            return types.SimpleNamespace(items=pods if label_selector == "app=bnzoo" else [])

    package = types.ModuleType("kubernetes")
    package.config = types.SimpleNamespace(  # type: ignore[attr-defined]
        load_incluster_config=lambda: None, load_kube_config=lambda: None
    )
    package.client = types.SimpleNamespace(CoreV1Api=Client)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kubernetes", package)
    placed = Placement("multi_worker", cluster="kubernetes", pod_labels=("worker:app=bnzoo",))
    task = find_task(placed, {"HOST_IP": "10.0.0.2"})
    assert task == Task({"worker": ("10.0.0.1:8470", "10.0.0.2:8470")}, "worker", 1)
    with pytest.raises(BadFlags, match=r"none of the pods .*10.0.0.1:8470.* is this one"):
        find_task(placed, {"HOST_IP": "10.0.0.9"})
    pods[0].status.phase = "Pending"
    with pytest.raises(BadFlags, match='Kubernetes does not tell of a cluster: Pod "b" is not run'):
        find_task(placed, {"HOST_IP": "10.0.0.2"})
    with pytest.raises(BadFlags, match="needs --pod_labels, such as worker:app=bnzoo"):
        find_task(Placement("multi_worker", cluster="kubernetes"), {})


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--strategy=mirored", "--strategy must be one of one_device, mirrored, multi_worker, "),
        ("--devices=2", "--devices is for --strategy=mirrored alone"),
        ("--devices=0", "--devices must be a whole number of at least 1"),
        ("--cluster=slurm", "--cluster is for --strategy=multi_worker and parameter_server alone"),
        ("--cluster_timeout=0", "--cluster_timeout must be a positive number of seconds"),
        ("--cluster_port=70000", r"--cluster_port must be a whole number in \[1, 65535\]"),
    ],
)
def test_bad_placements(flag: str, message: str) -> None:
    with pytest.raises(BadFlags, match=message):
        placement(given("--model=mnist_mlp", flag))
