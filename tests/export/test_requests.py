"""The requests of docs/serving.md, read and answered by TensorFlow Serving's rules."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from export import saved_model
from tests.export.rest_rules import Refused, Server
from tests.export.runs import PREPROCESSING, encoded_image, small_network, write_run

SERVING = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
LABELS = ("rose", "tulip", "daisy")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SERVING, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/flowers/1 beside the images that the examples send, which differ in size."""
    folder = tmp_path_factory.mktemp("requests")
    keras.utils.set_random_seed(2)
    run_dir = write_run(folder / "run", small_network(len(LABELS)), examples=0)
    (run_dir / "labels.txt").write_text("\n".join(LABELS) + "\n")
    out = folder / "models" / "flowers"
    assert saved_model.main(["bnzoo-export", str(run_dir), str(out)]) == 0
    (folder / "tulip.png").write_bytes(encoded_image(3, 31, 17))
    rose = tf.io.decode_png(encoded_image(2, 40, 52))
    (folder / "rose.jpg").write_bytes(tf.io.encode_jpeg(rose).numpy())
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Server:
    return Server(folder / "models" / "flowers" / "1")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, np.ndarray]:
    """The probabilities of each image by the network of the run, nothing folded."""
    network = small_network(len(LABELS))
    network.load_weights(folder / "run" / "model.keras")

    def evaluated(image: tf.Tensor) -> np.ndarray:
        return network(PREPROCESSING(image)[None], training=False).numpy()[0]

    read = {name: (folder / name).read_bytes() for name in ("rose.jpg", "tulip.png")}
    found = {name: evaluated(PREPROCESSING.decode(contents)) for name, contents in read.items()}
    assert np.abs(found["rose.jpg"] - found["tulip.png"]).max() > 0.01
    return {**found, "pixels": evaluated(tf.constant(PIXELS, tf.uint8))}


PIXELS = [[[255, 0, 0], [250, 8, 0]], [[249, 0, 9], [255, 3, 3]]]


def filled(request: str, folder: Path) -> str:
    """An example with the images in it that it only names."""
    return re.sub(
        r"\(base64 of ([\w.]+)\)",
        lambda found: base64.b64encode((folder / found[1]).read_bytes()).decode(),
        request,
    )


def shape(value: Any) -> Any:
    """What a value is made of, without what it says."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else type(value).__name__


def check(answer: dict[str, Any], expected: np.ndarray) -> None:
    # Folding reorders float32 sums; the probabilities are of order 0.1.
    np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-6)
    order = np.argsort(-expected)
    assert answer["classes"] == [LABELS[place] for place in order]
    np.testing.assert_allclose(answer["scores"], expected[order], atol=1e-6)


def test_the_json_examples(folder: Path, server: Server, expected: dict[str, np.ndarray]) -> None:
    rows, rows_answer, columns, columns_answer, pixels, pixels_answer = blocks("json")
    answer = json.loads(server.predict_json(filled(rows, folder)))
    assert shape(answer) == shape(json.loads(rows_answer))
    rose, tulip = answer["predictions"]
    check(rose, expected["rose.jpg"])
    check(tulip, expected["tulip.png"])

    answer = json.loads(server.predict_json(filled(columns, folder)))
    assert shape(answer) == shape(json.loads(columns_answer))
    check({key: value[0] for key, value in answer["outputs"].items()}, expected["rose.jpg"])

    answer = json.loads(server.predict_json(pixels))
    assert shape(answer) == shape(json.loads(pixels_answer))
    assert json.loads(pixels)["instances"] == [PIXELS]
    check(answer["predictions"][0], expected["pixels"])


def test_the_curl_example(folder: Path, server: Server, expected: dict[str, np.ndarray]) -> None:
    (command,) = blocks("sh")
    # A curl that prints what it would send.
    done = subprocess.run(
        ["bash", "-c", 'curl() { printf "%s" "$3"; }\n' + command],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    (answer,) = json.loads(server.predict_json(done.stdout))["predictions"]
    check(answer, expected["rose.jpg"])


@pytest.fixture
def address(server: Server) -> Iterator[str]:
    """A gRPC service that predicts as TensorFlow Serving does."""
    grpc = pytest.importorskip("grpc")
    predict_pb2 = pytest.importorskip("tensorflow_serving.apis.predict_pb2")
    from tensorflow_serving.apis import prediction_service_pb2_grpc as service

    class Service(service.PredictionServiceServicer):
        def Predict(self, request: Any, context: Any) -> Any:
            if request.model_spec.name != "flowers":
                context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
            inputs = {
                key: tf.io.parse_tensor(value.SerializeToString(), value.dtype)
                for key, value in request.inputs.items()
            }
            try:
                outputs = server.predict(request.model_spec.signature_name, inputs)
            except (Refused, tf.errors.InvalidArgumentError) as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            answer = predict_pb2.PredictResponse()
            for key in request.output_filter or outputs:
                answer.outputs[key].CopyFrom(tf.make_tensor_proto(outputs[key]))
            return answer

    running = grpc.server(futures.ThreadPoolExecutor(1))
    service.add_PredictionServiceServicer_to_server(Service(), running)
    port = running.add_insecure_port("localhost:0")
    running.start()
    yield f"localhost:{port}"
    running.stop(None).wait()


def test_the_grpc_example(
    folder: Path,
    address: str,
    expected: dict[str, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import grpc

    (code,) = [block for block in blocks("python") if "grpc" in block]
    assert code.count("localhost:8500") == 1
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(code.replace("localhost:8500", address), "serving.md", "exec"), names)
    assert set(names["answer"].outputs) == {"classes", "scores"}
    for row, image in enumerate(("rose.jpg", "tulip.png")):
        best = expected[image].argmax()
        assert names["classes"][row, 0].decode() == LABELS[best]
        assert names["scores"][row, 0] == pytest.approx(expected[image][best], abs=1e-6)
    assert capsys.readouterr().out.split()[0] == names["classes"][0, 0].decode()

    request = names["request"]
    request.inputs["image_bytes"].CopyFrom(tf.make_tensor_proto([b"no image"]))
    with pytest.raises(grpc.RpcError) as caught:
        names["stub"].Predict(request, timeout=10.0)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    request.inputs["image_bytes"].CopyFrom(tf.make_tensor_proto([], tf.string, shape=[0]))
    empty = names["stub"].Predict(request, timeout=10.0)
    assert tf.make_ndarray(empty.outputs["scores"]).shape == (0, 3)


def send(server: Server, signature: str, **form: Any) -> Any:
    return json.loads(server.predict_json(json.dumps({"signature_name": signature, **form})))


def test_empty_batches(server: Server) -> None:
    with pytest.raises(Refused, match="at least one element"):
        send(server, "serving_bytes", instances=[])
    outputs = {"probabilities": [], "classes": [], "scores": []}
    assert send(server, "serving_bytes", inputs=[]) == {"outputs": outputs}


def test_a_string_that_is_no_image_fails_and_the_next_request_is_served(
    folder: Path, server: Server, expected: dict[str, np.ndarray]
) -> None:
    rose = {"b64": base64.b64encode((folder / "rose.jpg").read_bytes()).decode()}
    for wrong in ("no image", {"b64": "bm8gaW1hZ2U="}, ""):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"at position\] \[1\]"):
            send(server, "serving_bytes", instances=[rose, wrong])
    # The alphabet for URLs is another one.
    with pytest.raises(Refused, match="base64"):
        send(server, "serving_bytes", instances=[{"b64": "_-_-"}])
    named = send(server, "serving_bytes", instances=[{"image_bytes": rose}])
    check(named["predictions"][0], expected["rose.jpg"])


def test_images_of_one_request_have_one_size_unless_encoded(server: Server) -> None:
    with pytest.raises(Refused, match="different shapes"):
        send(server, "serving_uint8", instances=[PIXELS, [*PIXELS, PIXELS[0]]])
    floats = np.zeros((2, 12, 10, 3)).tolist()
    assert len(send(server, "serving_default", instances=floats)["predictions"]) == 2
    # Without a name it is serving_default, too.
    assert len(json.loads(server.predict_json(json.dumps({"inputs": floats})))["outputs"]) == 3


def test_the_rules_refuse_what_a_server_refuses(server: Server) -> None:
    for form, message in (
        ({}, "missing inputs or instances"),
        ({"instances": [PIXELS], "inputs": [PIXELS]}, "only one of"),
        ({"instances": [{"image": PIXELS}]}, "keys of each instance"),
        ({"instances": [PIXELS, {"images": PIXELS}]}, "all objects or none"),
        ({"inputs": {"image": [PIXELS]}}, "missing named input"),
        ({"inputs": [[[[1.5, 0, 0]]]]}, "1.5 is not of expected type uint8"),
        ({"inputs": [[[[1, 0, 0], [1, 0]]]]}, "a list of 2 where the first has 3"),
        ({"inputs": [[[[1, 0, 0], 7]]]}, "nested to different depths"),
    ):
        with pytest.raises(Refused, match=message):
            send(server, "serving_uint8", **form)
    with pytest.raises(Refused, match="'serving_jpeg' not found"):
        send(server, "serving_jpeg", inputs=[])


def test_the_configurations() -> None:
    text_format = pytest.importorskip("google.protobuf.text_format")
    config_pb2 = pytest.importorskip("tensorflow_serving.config.model_server_config_pb2")
    batching, models, monitoring = blocks("proto")
    (config,) = text_format.Parse(models, config_pb2.ModelServerConfig()).model_config_list.config
    assert config.base_path == f"/models/{config.name}"
    assert set(config.version_labels.values()) == set(config.model_version_policy.specific.versions)
    # Their messages are not in tensorflow-serving-api.
    sizes = [int(size) for size in re.findall(r"^allowed_batch_sizes: (\d+)$", batching, re.M)]
    assert sizes == sorted(set(sizes))
    values = dict(re.findall(r"^(\w+) \{ value: (\d+) \}$", batching, re.M))
    assert list(values) == [
        *("max_batch_size", "batch_timeout_micros", "max_enqueued_batches", "num_batch_threads")
    ]
    assert len(batching.splitlines()) == len(sizes) + len(values)
    assert sizes[-1] == int(values["max_batch_size"])
    (warmup,) = re.findall(r"bnzoo-export --warmup=([\d,]+) ", SERVING)
    assert [int(size) for size in warmup.split(",")] == sizes
    assert re.fullmatch(r'prometheus_config \{ enable: true path: "/[\w/]+" \}\n', monitoring)


def test_saved_model_cli_shows_what_the_document_says(folder: Path) -> None:
    command = Path(sys.executable).with_name("saved_model_cli")
    shown = subprocess.run(
        [command, "show", "--dir", folder / "models" / "flowers" / "1", "--all"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in ("serving_bytes", "serving_uint8", "serving_default"):
        assert f"signature_def['{name}']:" in shown
    assert shown.count("Method name is: tensorflow/serving/predict") == 3
    # What the C client is given in the document.
    (names,) = re.findall(r"^\./client \S+ rose\.jpg (.*)$", SERVING, re.MULTILINE)
    described = shown[shown.index("signature_def['serving_bytes']") :]
    described = described[: described.index("Method name")]
    image_bytes, classes, _, scores = re.findall(r"name: (\S+)", described)
    assert names.split() == [image_bytes, classes, scores]


def test_a_version_has_its_name_on_the_server_when_all_is_there(tmp_path: Path) -> None:
    """The release script of the documentation, with a folder for the server."""
    (script,) = blocks("bash")
    for part in ("saved_model.pb", "variables/variables.index"):
        (tmp_path / "models" / "flowers" / "2" / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / "flowers" / "2" / part).touch()
    (tmp_path / "server" / "models" / "flowers" / "1").mkdir(parents=True)
    stand_ins = """
        set -e
        bnzoo-verify-export() { test -f "$2/saved_model.pb"; }
        rsync() { to="${3/server:/server/}"; cp -r "$2" "$to"; ls -A "${to%/*/}" > while_copying; }
        ssh() { (cd "$1"; shift; "$@"); }
    """
    subprocess.run(["bash", "-c", stand_ins + script], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "while_copying").read_text().split() == [".2.copying", "1"]
    served = tmp_path / "server" / "models" / "flowers"
    assert sorted(path.name for path in served.iterdir()) == ["1", "2"]
    assert sorted(path.name for path in (served / "2").iterdir()) == ["saved_model.pb", "variables"]
