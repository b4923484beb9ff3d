from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.surgery import fold_batch_norm
from export import saved_model, verify_export
from export.errors import ExportFailed
from export.plain_tensorflow import read_signatures
from export.signatures import build_signatures, save_signatures
from export.warmup import FILE, MOST_RECORDS, check_warmup, write_warmup
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
        if inputs[key].dtype.is_floating:
            assert np.isfinite(inputs[key]).all()
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


def test_inputs_that_are_no_images(tmp_path: Path) -> None:
    """A table of 50 rows, and truth: what a server runs must be something that they take."""
    row, chosen = (
        keras.Input((2,), dtype="int32", name="row"),
        keras.Input((1,), dtype="bool", name="chosen"),
    )
    x = keras.layers.Flatten()(keras.layers.Embedding(50, 4)(row))
    x = keras.layers.Concatenate()([x, keras.ops.cast(chosen, "float32")])
    network = keras.Model({"row": row, "chosen": chosen}, keras.layers.Softmax()(x))
    save_signatures(build_signatures(network), [], tmp_path)
    assert write_warmup(tmp_path, [1, 2], b"") == 2
    assert check_warmup(tmp_path) == ("2 warm-up records; of each signature the smallest was run")
    first, second = (log.predict_log.request.inputs for log in read(tmp_path))
    assert tf.make_ndarray(first["row"]).tolist() == [[0, 0]]
    assert tf.make_ndarray(second["chosen"]).tolist() == [[False], [False]]


def failing(folder: Path) -> Path:
    """A SavedModel that refuses 0."""
    row = tf.TensorSpec((None,), tf.int32, "row")

    def above_0(row: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(row > 0), ["no 0"])]):
            return {"same": tf.identity(row)}

    function = tf.function(above_0, autograph=False).get_concrete_function(row=row)
    save_signatures({"serving_default": function}, [], folder)
    return folder


def test_records_that_a_server_would_refuse_are_not_written(tmp_path: Path) -> None:
    match = r"^a warm-up record for serving_default fails, .* refuse the version: .*no 0"
    with pytest.raises(ExportFailed, match=match):
        write_warmup(failing(tmp_path), [4], b"")
    assert not (tmp_path / FILE).exists()


def test_what_is_wrong_with_records(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_warmup(tmp_path) == ""
    failing(tmp_path)
    path = tmp_path / FILE
    path.parent.mkdir()

    def write(*records: bytes) -> None:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)

    def problem() -> str:
        with pytest.raises(ExportFailed) as caught:
            check_warmup(tmp_path)
        return str(caught.value).replace(f"{path}", "FILE")

    for garbage in (b"garbage", bytes(range(200)), (folder / FILE).read_bytes()[:-5]):
        path.write_bytes(garbage)
        assert problem() == "FILE is damaged: it does not hold TFRecords alone"
    write(b"garbage")
    assert problem() == "FILE is damaged: a record is no PredictionLog"
    write(*[b""] * (MOST_RECORDS + 1))
    assert problem() == "FILE has 1001 records, and TensorFlow Serving takes 1000"
    log = prediction_log_pb2.PredictionLog()
    request = log.predict_log.request
    request.inputs["row"].CopyFrom(tf.make_tensor_proto([0, 0]))
    write(log.SerializeToString())
    assert problem().startswith("a record of FILE for serving_default fails, so that a server ")
    request.inputs["row"].CopyFrom(tf.make_tensor_proto([0.5]))
    write(log.SerializeToString())
    assert problem().startswith("a record of FILE for serving_default fails, so that a server ")
    request.model_spec.signature_name = "serving_bytes"
    write(log.SerializeToString())
    assert problem() == "a record of FILE is for serving_bytes, which the model has not"
    # The smallest is run, and only that: the larger would fail here.
    request.model_spec.signature_name = ""
    smallest = prediction_log_pb2.PredictionLog()
    smallest.predict_log.request.inputs["row"].CopyFrom(tf.make_tensor_proto([7]))
    request.inputs["row"].CopyFrom(tf.make_tensor_proto([0, 0]))
    write(log.SerializeToString(), smallest.SerializeToString(), log.SerializeToString())
    assert check_warmup(tmp_path).startswith("3 warm-up records; ")
    monkeypatch.setitem(sys.modules, "tensorflow_serving.apis", None)
    assert check_warmup(tmp_path).startswith("3 warm-up records, not run: ")


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


def test_the_flag_of_bnzoo_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, out = write_run(tmp_path / "run"), tmp_path / "models"
    assert saved_model.main(["bnzoo-export", "--warmup=8, 2,8", str(run_dir), str(out)]) == 0
    requests = [log.predict_log.request for log in read(out / "1")]
    assert [request.inputs.popitem()[1].tensor_shape.dim[0].size for request in requests] == [
        *(8, 2, 8, 2, 8, 2)
    ]
    verify = ["bnzoo-verify-export", "--batch_sizes=", str(out)]
    capsys.readouterr()
    assert verify_export.main(verify) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("6 warm-up records; ")
    (out / "1" / FILE).write_bytes(b"garbage")
    assert verify_export.main(verify) == 1
    assert capsys.readouterr().err == (
        f"bnzoo-verify-export: {out / '1' / FILE} is damaged: it does not hold TFRecords alone\n"
    )


@pytest.mark.parametrize("sizes", ["0", "1,-8", "1,,8", "all", "1.5"])
def test_sizes_that_are_none(
    sizes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert saved_model.main(["bnzoo-export", f"--warmup={sizes}", "run", str(tmp_path / "a")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bnzoo-export: --warmup must be ")
    assert sizes in line
