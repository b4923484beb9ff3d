from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing
from export import plain_tensorflow, saved_model, verification, verify_export
from tests.export.runs import LABELS, encoded_image, small_network, write_run

SIGNATURES = ["serving_bytes", "serving_default", "serving_uint8"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def models(run_dir: Path) -> Path:
    out = run_dir.parent / "models"
    made = ["--version=3", "--features=pooled"]
    assert saved_model.main(["bnzoo-export", *made, str(run_dir), str(out)]) == 0
    # Neither a version nor one that is complete under its name.
    (out / "12.old").mkdir()
    return out


def verify(*arguments: object) -> int:
    return verify_export.main(["bnzoo-verify-export", "--seconds=0", *map(str, arguments)])


def only_error(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("bnzoo-verify-export: ")


def test_the_report_for_machines(
    run_dir: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify("--json", "--batch_sizes=1,5", models, run_dir) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["problem"] is None
    folder = models / "3"
    assert report["folder"] == str(folder)
    assert report["tensorflow"] == tf.__version__
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert report["size"]["all"] == sum(file.stat().st_size for file in files)
    assert report["size"]["saved_model.pb"] == (folder / "saved_model.pb").stat().st_size
    assert list(report["signatures"]) == SIGNATURES
    assert report["signatures"]["serving_uint8"]["inputs"] == {
        "images": {"dtype": "uint8", "shape": [None, None, None, 3]}
    }
    assert report["signatures"]["serving_bytes"]["outputs"]["probabilities"] == {
        "dtype": "float32",
        "shape": [None, len(LABELS)],
    }
    assert report["signatures"]["serving_bytes"]["outputs"]["features"]["shape"] == [None, 8]
    for found in report["difference"].values():
        # Folding reorders float32 sums.
        assert 0 <= found["mean"] <= found["largest"] < 1e-6
        assert found["agreement"] == 1
    assert [(row["signature"], row["batch"]) for row in report["latency"]] == [
        (name, size) for name in SIGNATURES for size in (1, 5)
    ]
    for row in report["latency"]:
        assert 0 < row["median"] <= row["p95"] < 60
        assert row["runs"] >= 20
    memory = report["memory"]
    assert 50 < memory["tensorflow"] <= memory["loaded"] <= memory["peak"] < 20_000


def test_the_report_for_readers(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--batch_sizes=2", models / "3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{models / '3'}: ")
    assert " on disk (saved_model.pb " in lines[0]
    assert lines[1:3] == [
        "  serving_bytes: image_bytes string [any]",
        "    -> classes string [any, 5], features float32 [any, 8], "
        "probabilities float32 [any, 7], scores float32 [any, 5]",
    ]
    assert lines[7].startswith("Loaded in ")
    assert lines[8] == "Not compared with the trained network: no RUN was given"
    assert lines[9].split() == ["ms", "a", "batch", "median", "p95", "images/s", "peak", "MiB"]
    assert [line.split()[:2] for line in lines[10:]] == [[name, "2"] for name in SIGNATURES]


def test_an_average_over_crops_is_compared_with_that_of_the_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`serving_default` gets what the network takes, the others images: their answers differ."""
    run_dir, out = write_run(tmp_path / "run"), tmp_path / "models"
    # Of blobs of 20 pixels the crops of 12x10 show different ones.
    preprocessing = Preprocessing((12, 10), crop_fraction=0.5, mean=(120, 110, 100), scale=60)
    (run_dir / "preprocessing.json").write_text(preprocessing.to_json())
    assert saved_model.main(["bnzoo-export", "--crops=10", str(run_dir), str(out)]) == 0
    capsys.readouterr()
    assert verify("--json", "--batch_sizes=", out, run_dir) == 0
    difference = json.loads(capsys.readouterr().out)["difference"]
    # Folding reorders float32 sums.
    assert {name: found["largest"] < 1e-5 for name, found in difference.items()} == dict.fromkeys(
        SIGNATURES, True
    )


def test_an_ensemble_in_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = small_network()
    other.get_layer("bn_1").beta.assign_add([1.0] * 8)
    runs = [write_run(tmp_path / "one", examples=2), write_run(tmp_path / "two", other)]
    made = ["--precision=bfloat16", "--variables=constants", "--top_k=2"]
    out = tmp_path / "models"
    assert saved_model.main(["bnzoo-export", *made, *map(str, runs), str(out)]) == 0
    capsys.readouterr()
    assert verify("--json", "--batch_sizes=", out, *runs) == 0
    report = json.loads(capsys.readouterr().out)
    outputs = report["signatures"]["serving_bytes"]["outputs"]
    assert outputs["scores"]["shape"] == [None, 2]
    # Of bfloat16, so not what rounding explains in float32; and of both runs.
    assert all(1e-4 < found["largest"] < 8e-2 for found in report["difference"].values())
    assert {found["examples"] for found in report["difference"].values()} == {2}
    assert verify("--batch_sizes=", out, runs[0]) == 1
    assert "differs from the unfolded network by" in capsys.readouterr().err


def test_another_network_than_that_of_the_run(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = small_network()
    network.get_layer("bn_1").gamma.assign_add([0.01] * 8)
    run_dir = write_run(tmp_path / "run", network, examples=0)
    assert verify("--batch_sizes=", "--max_difference=0.001", models, run_dir) == 1
    out, err = capsys.readouterr()
    assert "Difference to the unfolded network on 8 images of noise:" in out
    # Of the two outputs it is the one that differs more.
    assert re.fullmatch(
        r"bnzoo-verify-export: (output features of )?serving_bytes differs from the unfolded "
        r"network by .*, more than --max_difference=0\.001\n",
        err,
    )


def test_an_example_that_the_export_would_refuse(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bnzoo-export", "--max_megapixels=0.0004", str(run_dir), str(tmp_path / "out")]
    assert saved_model.main(argv) == 0
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "a.png").write_bytes(encoded_image(1, 30, 20))
    capsys.readouterr()
    assert verify("--batch_sizes=", f"--examples={tmp_path / 'large'}", tmp_path / "out", run_dir)
    assert only_error(capsys).endswith(
        "has 30x20 pixels, which serving_bytes would refuse by "
        "--max_megapixels=0.0004: export with a higher one, or give other --examples"
    )


def test_a_run_of_another_size(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = keras.Input((16, 16, 1))
    x = keras.layers.GlobalAveragePooling2D()(image)
    network = keras.Model(image, keras.layers.Dense(len(LABELS), activation="softmax")(x))
    run_dir = write_run(tmp_path / "run", network, examples=0)
    preprocessing = Preprocessing(image_size=(16, 16), channels=1)
    (run_dir / "preprocessing.json").write_text(preprocessing.to_json())
    assert verify("--batch_sizes=", models, run_dir) == 1
    assert only_error(capsys) == (
        "serving_default takes [any, 12, 10, 3], but the network of the run [any, 16, 16, 1]: it "
        "was not exported from this run"
    )


def test_only_tensorflow_can_be_imported(models: Path, tmp_path: Path) -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "for name in ('keras', 'bnzoo', 'tf_keras'):\n"
        "    try: __import__(name)\n"
        "    except ImportError: print(name, 'is absent')\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-c", program, plain_tensorflow.__file__),
            *(str(models / "3"), "", str(tmp_path / "answers.npz"), "", "0"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[-3:] == ["keras is absent", "bnzoo is absent", "tf_keras is absent"]
    events = [json.loads(line)["event"] for line in lines[:-3]]
    assert events == ["started", "signatures", "loaded", "answered"]


def _foreign(folder: Path) -> None:
    """As Keras' own export names things."""
    shutil.rmtree(folder)
    module = tf.Module()
    spec = tf.TensorSpec((None, 12, 10, 3), tf.float32, "images")
    function = tf.function(lambda images: {"output_0": images[:, 0, 0]}, input_signature=[spec])
    tf.saved_model.save(module, str(folder), signatures=function)


def _cut_variables(folder: Path) -> None:
    (data,) = (folder / "variables").glob("variables.data*")
    data.write_bytes(data.read_bytes()[:100])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "foreign": (_foreign, "signature serving_default has no output probabilities, has output_0: "),
    "garbage": (
        lambda folder: (folder / "saved_model.pb").write_bytes(b"\xff\x00 no SavedModel"),
        "is damaged or no SavedModel that TensorFlow alone can run: DecodeError: ",
    ),
    "variables cut short": (_cut_variables, "is damaged or no SavedModel that TensorFlow alone "),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged(
    damage: Callable[[Path], object],
    message: str,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(models / "3", tmp_path / "models" / "3")
    damage(folder)
    assert verify("--json", "--batch_sizes=", folder) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["ok"] is False
    assert message in report["problem"]
    assert err == f"bnzoo-verify-export: {report['problem']}\n"


def test_an_error_of_a_graph_is_told_by_its_reason() -> None:
    @tf.function
    def divide(x: tf.Tensor) -> tf.Tensor:
        return tf.constant(1) // x

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        divide(tf.constant(0))
    assert str(caught.value).startswith("Graph execution error")
    assert plain_tensorflow.reason(caught.value) == "Integer division by zero"
    assert plain_tensorflow.reason(ValueError("one\ntwo")) == "one"
    assert plain_tensorflow.reason(ValueError()) == "no more is known"


def test_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(tmp_path / "none") == 1
    assert only_error(capsys) == f"no folder {tmp_path / 'none'}"
    assert verify(tmp_path) == 1
    assert only_error(capsys) == (
        f"no SavedModel in {tmp_path}: neither saved_model.pb nor a folder named as a version"
    )
    (tmp_path / "2").mkdir()
    (tmp_path / "10").mkdir()
    assert verify(tmp_path) == 1
    assert only_error(capsys) == f"no saved_model.pb in {tmp_path / '10'}, the highest version"


def test_a_process_that_dies_is_told(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dying = tmp_path / "dying.py"
    dying.write_text("import os, sys; print('no memory', file=sys.stderr, flush=True); os.abort()")
    monkeypatch.setattr(verification, "_PROGRAM", dying)
    assert verify(models) == 1
    assert only_error(capsys) == (f"the process that runs {models / '3'} ended with -6: no memory")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a folder is needed, DIR, and may be followed by RUN. Received: none"),
        (("a", ""), "a folder is needed, DIR, and may be followed by RUN. Received: a "),
        (("a", "--examples=b"), "--examples needs RUN, the run directory to compare with"),
        (("a", "--max_difference=1"), "--max_difference needs RUN, the run directory to compare"),
        (("a", "b", "--max_difference=nan"), "--max_difference must be a number of at least 0."),
        (("a", "--seconds=-1"), "--seconds must be a number of at least 0. Received: --seconds=-1"),
        (
            ("a", "--batch_sizes=1,0"),
            "--batch_sizes must be whole numbers above 0 with commas between. Received: 1,0",
        ),
        (("a", "--jsn"), "Unknown command line flag 'jsn'. Did you mean: json ?"),
    ],
)
def test_bad_flags(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(*arguments) == 2
    assert only_error(capsys).startswith(message)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--help") == 0
    text = capsys.readouterr().out
    assert text.startswith("bnzoo-verify-export [FLAGS] DIR [RUN ...]\n")
    for flag in ("json", "batch_sizes", "seconds", "examples", "max_difference"):
        assert f"--{flag}" in text or f"--[no]{flag}" in text


@pytest.mark.parametrize("kind", ["float64", "map", "scores of any sign"])
def test_what_is_exported_is_not_called_wrong(kind: str, tmp_path: Path) -> None:
    image = keras.Input((12, 10, 3))
    x = keras.layers.Dense(4, name="probabilities")(image)
    if kind != "map":
        x = keras.layers.GlobalAveragePooling2D()(image)
        activation, dtype = ("softmax", "float64") if kind == "float64" else (None, "float32")
        x = keras.layers.Dense(4, activation, name="probabilities", dtype=dtype)(x)
    keras.Model(image, x).save(tmp_path / "model.keras")
    outputs = "--outputs=" + ("probabilities" if kind == "float64" else "any")
    argv = ["bnzoo-export", f"--keras_model={tmp_path / 'model.keras'}", outputs]
    assert saved_model.main([*argv, str(tmp_path / "out")]) == 0
    report = verification.verify(tmp_path / "out", batch_sizes=(), say=lambda line: None)
    served = report["signatures"]["serving_default"]["outputs"]
    assert served["probabilities"]["dtype"] == "float32"
    assert ("scores" in served) == (kind != "map")
