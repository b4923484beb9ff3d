"""The manifest and the batch script of docs/clusters.md: well-formed, and with flags that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from training.command_line import parse
from training.launch import LAUNCH_FLAGS
from training.placement import placement
from training.settings import resolve
from training.train_flags import TRAIN_FLAGS

DOCS = Path(__file__).parents[2] / "docs"


def accepted(arguments: list[str]) -> str:
    """The strategy of a command, whose flags are all right."""
    values, rest = parse(TRAIN_FLAGS, ["bnzoo-train", *arguments])
    assert rest == []
    given = values.flag_values_dict()
    resolve(given)
    return placement(given).strategy


def test_kubeflow_manifest() -> None:
    job = yaml.safe_load((DOCS / "kubeflow_tfjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    replicas = job["spec"]["tfReplicaSpecs"]
    counts = {kind: spec["replicas"] for kind, spec in replicas.items()}
    assert counts == {"Chief": 1, "Worker": 4, "PS": 2}
    for spec in replicas.values():
        assert spec["restartPolicy"] == "OnFailure"
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "tensorflow"
        assert container["command"] == ["bnzoo-train"]
        assert accepted(container["args"]) == "parameter_server"
        mounted = [mount["name"] for mount in container["volumeMounts"]]
        assert mounted == [volume["name"] for volume in pod["volumes"]]


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (143, True)])
def test_batch_script(code: int, again: bool, tmp_path: Path) -> None:
    """Slurm's commands note what they are called with, and srun ends with `code`."""
    for name, ends in (("srun", code), ("scontrol", 0)):
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "{name} $@"\nexit {ends}\n')
        path.chmod(0o755)
    script = DOCS / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    result = subprocess.run(
        ["bash", str(script), "--recipe=bn_x5", "--run_dir=with space"],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17"},
    )
    assert result.returncode == code
    called = result.stdout.splitlines()
    assert called[1:] == (["scontrol requeue 17"] if again else [])
    _, _, flags = called[0].partition(" bnzoo-train ")
    first, second, *rest = shlex.split(flags)
    assert accepted([first, second]) == "multi_worker"
    assert rest == ["--run_dir=with", "space"]


def test_commands_of_the_text() -> None:
    text = (DOCS / "clusters.md").read_text()
    launched = re.findall(r"^bnzoo-launch (.*)$", text, re.MULTILINE)
    assert len(launched) == 2
    for line in launched:
        own, _, command = line.partition(" -- ")
        parse(LAUNCH_FLAGS, ["bnzoo-launch", *own.split()])
        program, *arguments = command.split()
        assert program == "bnzoo-train"
        strategy = accepted(arguments)
        assert ("--ps" in own) == (strategy == "parameter_server")
