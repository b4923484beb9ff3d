"""The whole command in its variants, on small networks."""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing
from export import saved_model
from export.crops import crop_views
from export.provenance import METRICS_OF
from tests.export.runs import LABELS, PREPROCESSING, encoded_image, small_network, write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def network() -> keras.Model:
    return small_network()


@pytest.fixture(scope="module")
def run_dir(network: keras.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("runs") / "run", network)
    config = {"commit": "0123abc", "seed": 1, "flags": {"recipe": "bn_x5"}, "data": {}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "metrics.csv").write_text("step,split,accuracy\n10,eval,0.5\n20,eval,0.75\n")
    return run


def export(*arguments: object) -> int:
    return saved_model.main(["bnzoo-export", *map(str, arguments)])


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_everything_at_once_and_equal_bytes(
    network: keras.Model, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        *("--variables=constants", "--features=pooled,relu_1", "--top_k=2"),
        *("--litert=float32,int8", run_dir, tmp_path),
    )
    assert export(*flags) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("serving_bytes", "litert_float32", "litert_int8"):
        (line,) = (line for line in lines if line.startswith(f"  {name}: largest "))
        assert line.endswith("same class 100.0%")
    model = tf.saved_model.load(str(tmp_path / "1"))
    contents = [encoded_image(seed, 15 + seed) for seed in range(11)]
    answer = model.signatures["serving_bytes"](image_bytes=tf.constant(contents))
    images = np.stack([PREPROCESSING(PREPROCESSING.decode(one)) for one in contents])
    probabilities = network.predict(images, verbose=0)
    np.testing.assert_allclose(answer["probabilities"], probabilities, atol=1e-6)
    assert answer["scores"].shape == (11, 2)
    best = [LABELS[index].encode() for index in probabilities.argmax(axis=1)]
    assert answer["classes"].numpy()[:, 0].tolist() == best
    inner = keras.Model(
        network.input, [network.get_layer("pool").output, network.get_layer("relu_1").output]
    )
    for name, expected in zip(
        ("features_pooled", "features_relu_1"), inner.predict(images, verbose=0), strict=True
    ):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(answer[name], expected, atol=1e-5 * scale)

    told = json.loads((tmp_path / "1" / "assets" / "provenance.json").read_text())
    assert told["sources"] == [
        {
            "run": "run",
            "commit": "0123abc",
            "seed": 1,
            "recipe": "bn_x5",
            "metrics": {"step": 20.0, "split": "eval", "accuracy": 0.75},
            "metrics_of": METRICS_OF,
        }
    ]
    assert told["export"]["variables"] == "constants"
    assert told["folding"]["batch_norms"] == [
        "bn_0: folded into conv_0",
        "bn_1: folded into conv_1",
    ]
    assert told["verification"]["examples"] == "3 images of a folder"
    checked = told["verification"]
    assert checked["litert_int8"]["agreement"] == 1.0
    for name, allowed in (("serving_bytes", 1e-4), ("litert_int8", 0.2)):
        assert checked[name]["max_difference"] == allowed
        assert 0 <= checked[name]["mean"] <= checked[name]["largest"] <= allowed
    assert str(run_dir.parent) not in json.dumps(told)

    assert export(*flags) == 0
    first, second = files(tmp_path / "1"), files(tmp_path / "2")
    assert {name for name in first if first[name] != second.get(name)} == set()
    assert {"assets.extra/model.tflite", "assets.extra/model_int8.tflite"} <= first.keys()
    # The graph says where nothing was.
    assert not [name for name, content in first.items() if str(tmp_path).encode() in content]


def test_variables_of_two_exports_are_equal_too(run_dir: Path, tmp_path: Path) -> None:
    assert export(run_dir, tmp_path) == export(run_dir, tmp_path) == 0
    first, second = files(tmp_path / "1"), files(tmp_path / "2")
    assert {name for name in first if first[name] != second.get(name)} == set()
    assert {"fingerprint.pb", "variables/variables.index"} <= first.keys()


def test_bfloat16_and_crops(network: keras.Model, run_dir: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", network)
    cropped = Preprocessing(**{**PREPROCESSING.__dict__, "crop_fraction": 0.8})
    (run / "preprocessing.json").write_text(cropped.to_json())
    assert export("--precision=bfloat16", "--crops=10", run, tmp_path / "out") == 0
    served = tf.saved_model.load(str(tmp_path / "out" / "1")).signatures
    image = cropped.decode(encoded_image(3, 31))
    views = crop_views(image, cropped, 10)
    expected = network.predict(views, verbose=0).mean(axis=0)
    answer = served["serving_uint8"](images=tf.stack([image] * 9))["probabilities"]
    assert answer.dtype == tf.float32
    np.testing.assert_allclose(answer, [expected] * 9, atol=2e-2)
    stored = tf.train.load_checkpoint(str(tmp_path / "out" / "1" / "variables" / "variables"))
    types = set(stored.get_variable_to_dtype_map().values())
    assert types == {tf.bfloat16, tf.float32, tf.string}
    assert export("--crops=10", run_dir, tmp_path / "none") == 1


@pytest.mark.peers
def test_onnx_gives_the_same_outputs(
    network: keras.Model, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("tf2onnx")
    assert export("--onnx", run_dir, tmp_path) == 0
    assert "  onnx: largest " in capsys.readouterr().out
    session = onnxruntime.InferenceSession(tmp_path / "1" / "assets.extra" / "model.onnx")
    images = np.random.default_rng(3).normal(size=(5, 12, 10, 3)).astype(np.float32)
    (probabilities,) = session.run(["probabilities"], {"images": images})
    np.testing.assert_allclose(probabilities, network.predict(images, verbose=0), atol=1e-6)


def test_an_ensemble_is_the_mean_of_its_members(
    run_dir: Path,
    tmp_path: Path,
    network: keras.Model,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = small_network()
    write_run(tmp_path / "other", other)
    # A folder whose name is in other words, too.
    (tmp_path / "e").mkdir()
    for number in range(2):
        (tmp_path / "e" / f"{number}.png").write_bytes(encoded_image(number))
    monkeypatch.chdir(tmp_path)
    assert export("--examples=e", run_dir, tmp_path / "other", tmp_path / "out") == 0
    served = tf.saved_model.load(str(tmp_path / "out" / "1")).signatures["serving_default"]
    images = np.random.default_rng(3).normal(size=(4, 12, 10, 3)).astype(np.float32)
    expected = np.mean([x.predict(images, verbose=0) for x in (network, other)], axis=0)
    np.testing.assert_allclose(served(images=images)["probabilities"], expected, atol=1e-6)
    told = json.loads((tmp_path / "out" / "1" / "assets" / "provenance.json").read_text())
    assert told["verification"]["examples"] == "2 images of a folder"
    assert [source["run"] for source in told["sources"]] == ["run", "other"]
    (tmp_path / "other" / "labels.txt").write_text("\n".join(reversed(LABELS)) + "\n")
    assert export(run_dir, tmp_path / "other", tmp_path / "none") == 1
    assert "have different labels.txt: the members" in capsys.readouterr().err


def keras_file(folder: Path, activation: str | None) -> tuple[Path, keras.Model]:
    body = small_network()
    x = keras.layers.Dense(3, activation=activation, name="top")(body.get_layer("pool").output)
    model = keras.Model(body.input, x)
    model.compile("adam", "mse")
    model.fit(np.ones((2, 12, 10, 3)), np.ones((2, 3)), verbose=0)
    model.save(folder / "model.keras")
    return folder / "model.keras", model


def test_a_keras_file_of_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, model = keras_file(tmp_path, None)
    assert export(f"--keras_model={file}", tmp_path / "out") == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert "are no class probabilities: for an example they sum to " in error
    assert "its last layer is 'top' with activation linear. --outputs=logits puts" in error
    assert list((tmp_path / "out").glob("*")) == []
    labels = tmp_path / "names.json"  # By what it is for, not by how it is called.
    for wrong, count in (("x\ny\n", 2), ("x\ny\nz\nw\n", 4), ("", 0)):
        labels.write_text(wrong)
        arguments = (f"--keras_model={file}", "--outputs=logits", f"--labels={labels}")
        assert export(*arguments, tmp_path / "out") == 1
        assert f"has 3 classes, but there are {count} labels: " in capsys.readouterr().err
    assert list((tmp_path / "out").glob("*")) == []
    # Some editors begin a text with a mark of the byte order, which is no part of a name.
    labels.write_text("x\ny\nz\n", encoding="utf-8-sig")
    preprocessing = tmp_path / "given.json"
    preprocessing.write_text(PREPROCESSING.to_json())
    assert export(f"--keras_model={file}", "--outputs=logits", tmp_path / "out") == 0
    assert (
        export(
            f"--keras_model={file}",
            "--outputs=logits",
            f"--labels={labels}",
            f"--preprocessing={preprocessing}",
            tmp_path / "out",
        )
        == 0
    )
    images = np.random.default_rng(3).normal(size=(4, 12, 10, 3)).astype(np.float32)
    logits = model.predict(images, verbose=0).astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for version, signatures, classes in (
        ("1", {"serving_default"}, "012"),
        ("2", {"serving_default", "serving_uint8", "serving_bytes"}, "xyz"),
    ):
        served = tf.saved_model.load(str(tmp_path / "out" / version)).signatures
        assert set(served) == signatures
        answer = served["serving_default"](images=images)
        np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-5)
        best = [classes[index].encode() for index in expected.argmax(axis=1)]
        assert answer["classes"].numpy()[:, 0].tolist() == best
        assert set(answer["classes"].numpy().ravel()) == {name.encode() for name in classes}
    assets = {path.name for path in (tmp_path / "out" / "2" / "assets").iterdir()}
    assert assets == {"labels.txt", "preprocessing.json", "provenance.json"}
    assert (tmp_path / "out" / "2" / "assets" / "labels.txt").read_bytes() == b"x\ny\nz\n"


def test_a_softmax_gets_no_second_and_a_sigmoid_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("softmax", "sigmoid"):
        (tmp_path / kind).mkdir()
    softmax, _ = keras_file(tmp_path / "softmax", "softmax")
    assert export(f"--keras_model={softmax}", "--outputs=logits", tmp_path / "out") == 1
    assert "is for a network without softmax; its last layer is 'top'" in capsys.readouterr().err
    sigmoid, _ = keras_file(tmp_path / "sigmoid", "sigmoid")
    assert export(f"--keras_model={sigmoid}", tmp_path / "out") == 1
    assert "--outputs=independent is for a probability of each class" in capsys.readouterr().err
    assert export(f"--keras_model={sigmoid}", "--outputs=independent", tmp_path / "out") == 0


def test_a_dict_of_outputs_keeps_its_names_and_a_map_needs_to_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = small_network()
    pool, relu = body.get_layer("pool").output, body.get_layer("relu_1").output
    keras.Model(body.input, {"embedding": pool, "map": relu}).save(tmp_path / "dict.keras")
    keras.Model(body.input, relu).save(tmp_path / "map.keras")
    assert export(f"--keras_model={tmp_path / 'dict.keras'}", tmp_path / "out") == 0
    served = tf.saved_model.load(str(tmp_path / "out" / "1")).signatures["serving_default"]
    answer = served(images=tf.zeros((11, 12, 10, 3)))
    assert {name: x.shape[0] for name, x in answer.items()} == {"embedding": 11, "map": 11}
    assert export(f"--keras_model={tmp_path / 'map.keras'}", tmp_path / "out") == 1
    assert "--outputs=any serves it as it is" in capsys.readouterr().err
    assert export(f"--keras_model={tmp_path / 'map.keras'}", "--outputs=any", tmp_path / "out") == 0


def test_many_exports_in_one_process_keep_names_and_memory(run_dir: Path, tmp_path: Path) -> None:
    """BNZOO_TEST_EXPORTS says how many; the first ones fill caches."""
    psutil = pytest.importorskip("psutil")
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("needs glibc")
    count = int(os.environ.get("BNZOO_TEST_EXPORTS", "4"))
    names, memory = set(), []
    for number in range(count):
        run = write_run(tmp_path / f"run_{number}", small_network())
        assert export(run, tmp_path / "out") == 0
        model = tf.saved_model.load(str(tmp_path / "out" / str(number + 1)))
        for name, function in sorted(model.signatures.items()):
            inputs = tuple(function.structured_input_signature[1])
            names.add((name, inputs, tuple(sorted(function.structured_outputs))))
        del model
        # What is freed malloc keeps for a while, in each thread: it comes and goes by 20 MiB.
        ctypes.CDLL(None).malloc_trim(0)
        memory.append(psutil.Process().memory_info().rss / 2**20)
    print(memory)
    assert len(names) == 3
    # MiB a further export; the network itself is 3 kB.
    assert (memory[-1] - memory[1]) / (count - 2) < 12


def test_killed_at_any_moment_a_version_is_absent_or_complete(
    run_dir: Path, tmp_path: Path
) -> None:
    """BNZOO_TEST_KILLS says how often."""
    kills = int(os.environ.get("BNZOO_TEST_KILLS", "2"))
    command = [sys.executable, "-m", "export.saved_model", str(run_dir), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    chance = random.Random(5)

    def written() -> list[str]:
        return [entry.name for entry in tmp_path.iterdir() if ".writing" in entry.name]

    complete = None
    for _ in range(kills):
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            # Starting takes longest and leaves nothing: the clock runs from the first file on.
            before = set(written())
            while process.poll() is None and not set(written()) - before:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 4))
            process.kill()
        for entry in tmp_path.iterdir():
            if entry.name.isdecimal():
                found = {str(path.relative_to(entry)) for path in entry.rglob("*")}
                complete = complete or found
                assert "assets/provenance.json" in found
                assert found == complete
    assert export(run_dir, tmp_path) == 0
    assert written() == []
