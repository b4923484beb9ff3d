from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from bnzoo.surgery import fold_batch_norm
from export import saved_model
from export.errors import ExportFailed
from export.plain_tensorflow import read_signatures
from export.signatures import build_signatures, save_signatures
from export.warmup import FILE, MOST_RECORDS, write_warmup
from tests.export.runs import LABELS, PREPROCESSING, encoded_image, small_network, write_run

prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")

IMAGE = encoded_image(5, 70, 90)
SIZES = (1, 4, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warmup") / "1"
    signatures = build_signatures(fold_batch_norm(small_network()), PREPROCESSING, LABELS)
    save_signatures(signatures, [], folder)
    assert write_warmup(folder, SIZES, IMAGE) == 9
    return folder


def read(folder: Path) -> list:
    records = tf.data.TFRecordDataset(str(folder / FILE))
    return [prediction_log_pb2.PredictionLog.FromString(record.numpy()) for record in records]


def test_one_record_for_each_signature_and_batch_size_and_all_run(folder: Path) -> None:
    assert FILE.as_posix() == "assets.extra/tf_serving_warmup_requests"
    model = tf.saved_model.load(str(folder))
    found = []
    for log in read(folder):
        assert log.WhichOneof("log_type") == "predict_log"
        request = log.predict_log.request
        name = request.model_spec.signature_name
        # As a server does: TensorFlow's own reading of the message, in C++.
        inputs = {
            key: tf.io.parse_tensor(value.SerializeToString(), value.dtype)
            for key, value in request.inputs.items()
        }
        (key,) = inputs
        np.testing.assert_array_equal(inputs[key], tf.make_ndarray(request.inputs[key]))
        outputs = model.signatures[name](**inputs)
        size = len(outputs["probabilities"])
        assert {len(value) for value in outputs.values()} == {size}
        np.testing.assert_allclose(outputs["probabilities"].numpy().sum(axis=-1), 1, atol=1e-5)
        if name == "serving_bytes":
            assert inputs[key].numpy().tolist() == [IMAGE] * size
        found.append((name, size))
    names = ("serving_bytes", "serving_default", "serving_uint8")
    assert found == [(name, size) for name in names for size in SIZES]


def test_records_are_small_and_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    written = (folder / FILE).read_bytes()
    # A batch of 32 stores its image once: three records have it, and nine have names and shapes.
    assert len(written) < 3 * len(IMAGE) + 9 * 200
    write_warmup(folder, SIZES, IMAGE)
    assert (folder / FILE).read_bytes() == written


def test_the_model_is_as_before(folder: Path) -> None:
    assert list(read_signatures(folder)) == ["serving_bytes", "serving_default", "serving_uint8"]


def test_too_many(folder: Path) -> None:
    with pytest.raises(
        ExportFailed,
        match=f"334 batch sizes and 3 signatures make 1002 warm-up records, more than .* "
        f"{MOST_RECORDS}$",
    ):
        write_warmup(folder, range(1, 335), IMAGE)


@pytest.mark.parametrize(
    ("flag", "missing", "needed"),
    [
        (
            "--warmup=1",
            "tensorflow_serving.apis",
            "tensorflow-serving-api: pip install 'bnzoo[serving]'",
        ),
        ("--onnx", "tf2onnx", "tf2onnx and onnxruntime: pip install 'bnzoo[onnx]'"),
        ("--onnx", "onnxruntime", "tf2onnx and onnxruntime: pip install 'bnzoo[onnx]'"),
    ],
)
def test_a_missing_package_is_told_before_anything_is_done(
    flag: str,
    missing: str,
    needed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    # There is not even a run: nothing was read, folded and compared.
    assert saved_model.main(["bnzoo-export", flag, "no_run", str(tmp_path / "models")]) == 1
    error = capsys.readouterr().err
    assert error == f"bnzoo-export: {flag.partition('=')[0]} needs {needed}\n"
    assert not (tmp_path / "models").exists()


def test_the_flag_of_bnzoo_export(tmp_path: Path) -> None:
    run_dir, out = write_run(tmp_path / "run"), tmp_path / "models"
    assert saved_model.main(["bnzoo-export", "--warmup=8, 2,8", str(run_dir), str(out)]) == 0
    requests = [log.predict_log.request for log in read(out / "1")]
    assert [request.inputs.popitem()[1].tensor_shape.dim[0].size for request in requests] == [
        *(8, 2, 8, 2, 8, 2)
    ]


@pytest.mark.parametrize("sizes", ["0", "1,-8", "1,,8", "all", "1.5"])
def test_sizes_that_are_none(
    sizes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert saved_model.main(["bnzoo-export", f"--warmup={sizes}", "run", str(tmp_path / "a")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bnzoo-export: --warmup must be ")
    assert sizes in line
