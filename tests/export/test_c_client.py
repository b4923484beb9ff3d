"""A C program classifies with an export: no Python is needed, as in TensorFlow Serving."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from export import saved_model
from tests.export.runs import encoded_image, write_run

CLIENT = Path(__file__).parent / "client.c"
TENSORFLOW = Path(tf.sysconfig.get_lib())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("c")
    keras.utils.set_random_seed(2)
    run_dir = write_run(out / "run", examples=0)
    assert saved_model.main(["bnzoo-export", str(run_dir), str(out / "models")]) == 0
    return out / "models" / "1"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        missing("no C compiler: cc, gcc or clang")
    program = tmp_path_factory.mktemp("client") / "client"
    built = subprocess.run(
        [
            *(compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-o", program, CLIENT),
            *("-isystem", tf.sysconfig.get_include(), f"-L{TENSORFLOW}"),
            *("-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2"),
            f"-Wl,-rpath,{TENSORFLOW}",
        ],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return program


@pytest.fixture(scope="module")
def tensors(folder: Path) -> list[str]:
    """The names of the tensors that the client is to be told: those of `serving_bytes`."""
    saved = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    signature = saved.meta_graphs[0].signature_def["serving_bytes"]
    return [
        signature.inputs["image_bytes"].name,
        signature.outputs["classes"].name,
        signature.outputs["scores"].name,
    ]


def run(client: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([client, *map(str, arguments)], capture_output=True, text=True)


def test_says_what_python_says(
    client: Path, folder: Path, tensors: list[str], tmp_path: Path
) -> None:
    served = tf.saved_model.load(str(folder))
    seen = set()
    for seed in (2, 4):
        png = encoded_image(seed, 40 + seed, 30)
        jpeg = tf.io.encode_jpeg(tf.io.decode_png(png), quality=95).numpy()
        (tmp_path / "image.jpg").write_bytes(jpeg)
        answer = served.signatures["serving_bytes"](image_bytes=tf.constant([jpeg]))
        done = run(client, folder, tmp_path / "image.jpg", *tensors)
        assert done.returncode == 0, done.stderr
        name, score = done.stdout.split()
        assert name == answer["classes"].numpy()[0, 0].decode()
        # It prints six digits.
        assert float(score) == pytest.approx(float(answer["scores"][0, 0]), abs=1e-6)
        seen.add(done.stdout)
    assert len(seen) == 2


def test_mistakes_end_in_one_line_and_1(
    client: Path, folder: Path, tensors: list[str], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    for arguments, message in (
        ((folder, tmp_path / "notes.txt", *tensors), "image_bytes is no JPEG"),
        ((folder, tmp_path / "none.jpg", *tensors), "none.jpg: cannot be read"),
        ((folder, tmp_path / "notes.txt", "nothing:0", *tensors[1:]), "nothing:0: is not in the"),
        ((tmp_path, tmp_path / "notes.txt", *tensors), "Could not find SavedModel"),
        ((folder,), "five arguments are needed"),
    ):
        done = run(client, *arguments)
        assert done.returncode == 1
        assert message in done.stderr
        assert not done.stdout
