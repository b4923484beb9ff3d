"""What setup.cfg and constraints.txt promise."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
# Where the folder of a package is, if it is not that of its name.
FOLDERS = {"bnzoo": "bnzoo", "bnzoo.training": "training", "bnzoo.export": "export"}


def package_folders() -> dict[str, Path]:
    """The folders with an __init__.py that are to be installed, by the package's name."""
    packages = {}
    for name, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            below = init.parent.relative_to(ROOT / folder).parts
            packages[".".join((name, *below))] = init.parent
    return packages


def test_every_package_is_installed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert sorted(config["options"]["packages"].split()) == sorted(package_folders())


def test_the_wheel_has_every_file_and_adds_one_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in FOLDERS.values():
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."],
        cwd=source,
        check=True,
    )
    (wheel,) = source.glob("*.whl")
    installed = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in installed} == {"bnzoo", "bnzoo-0.1.0.dist-info"}
    for name, folder in package_folders().items():
        for module in folder.glob("*.py"):
            assert f"{name.replace('.', '/')}/{module.name}" in installed
    assert "bnzoo-0.1.0.dist-info/licenses/LICENSE" in installed


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(found.name): str(found.specifier) for found in requirements}


def required(name: str, extras: frozenset[str]) -> set[str]:
    """What an installation of `name` brings, itself included, by the installed metadata."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [(canonicalize_name(name), extras)]
    while waiting:
        item = waiting.pop()
        if item in found:
            continue
        found.add(item)
        for text in metadata.requires(item[0]) or ():
            requirement = Requirement(text)
            environments = [{"extra": extra} for extra in (item[1] or {""})]
            if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
                extras = frozenset(requirement.extras)
                waiting.append((canonicalize_name(requirement.name), extras))
    return {name for name, _ in found}


def test_every_version_that_the_two_commands_install_is_pinned() -> None:
    needed = required("bnzoo", frozenset({"demo", "test", "dev"})) - {"bnzoo"}
    assert {"tensorflow", "matplotlib", "pytest", "mypy", "numpy"} <= needed
    assert needed <= pins().keys()
    assert all(version.startswith("==") for version in pins().values())


def test_importing_bnzoo_imports_nothing_heavy() -> None:
    program = "import sys, bnzoo; print(bnzoo.__version__, dir(bnzoo), *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.startswith("0.1.0 ")
    assert "'surgery'" in done.stdout
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert (
        not {"keras", "tensorflow", "numpy", "tensorflow_datasets", "sklearn", "matplotlib"}
        & loaded
    )


def test_importing_bnzoo_imports_no_extra() -> None:
    # Keras itself imports scikit-learn and matplotlib where they are installed.
    program = (
        "import sys, keras; known = set(sys.modules)\n"
        "import bnzoo; print(*set(sys.modules) - known)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert "bnzoo" in imported
    extras = {"tensorflow_datasets", "sklearn", "matplotlib", "torch", "onnx", "onnxruntime"}
    assert not (extras | {"training", "export"}) & imported
    assert not {"bnzoo.training", "bnzoo.export"} & set(done.stdout.split())


def test_make_test_runs_every_folder_of_tests() -> None:
    makefile = (ROOT / "Makefile").read_text()
    folders = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders == set(re.findall(r"tests/\w+(?= )", makefile))
