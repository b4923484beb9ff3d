"""Published weights to a run directory, and from there to a served model."""

from __future__ import annotations

import json
import pathlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo import pretrained
from bnzoo.models import FORMS
from bnzoo.preprocessing import Preprocessing
from export import saved_model
from tests.pretrained.seeded import largest_difference
from tests.pretrained.torch_network import answers, torch_network
from training import convert_weights


@pytest.fixture(scope="module")
def network():
    return torch_network()


@pytest.fixture(scope="module")
def path(network, tmp_path_factory):
    import torch

    path = tmp_path_factory.mktemp("torch") / "bn_inception.pth"
    torch.save(network.state_dict(), path)
    return path


def command(*arguments):
    return convert_weights.main(["bnzoo-convert-weights", *map(str, arguments)])


@pytest.mark.peers
@pytest.mark.data
def test_a_photo_through_the_saved_model_gets_the_answer_of_the_torch_network(
    network, path, tmp_path, data_folder, capsys
):
    run, out = tmp_path / "run", tmp_path / "model"
    assert command("torch", path, run) == 0
    assert "form torch, 11315272 parameters, 1000 classes" in capsys.readouterr().out
    assert saved_model.main(["bnzoo-export", str(run), str(out)]) == 0

    photo = min(pathlib.Path(data_folder, "imagenet_sample", "val").glob("*/*.JPEG"))
    pixels = FORMS["torch"].preprocessing
    image = pixels(pixels.decode(photo.read_bytes())).numpy()[None]
    logits = answers(network, image)[0].astype(np.float64)
    expected = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()

    served = tf.saved_model.load(str(out / "1")).signatures["serving_bytes"]
    found = served(image_bytes=tf.constant([photo.read_bytes()]))
    assert largest_difference(found["probabilities"].numpy()[0], expected) < 1e-4
    labels = (run / "labels.txt").read_text().splitlines()
    assert found["classes"][0, 0].numpy().decode() == labels[expected.argmax()]

    # Label 0 is the first of the sorted identifiers, tench.
    assert labels == sorted(labels)
    assert labels[0] == "n01440764"
    assert Preprocessing.from_json((run / "preprocessing.json").read_text()) == pixels
    config = json.loads((run / "config.json").read_text())
    assert config["flags"]["source"] == "torch"
    assert config["data"] == {"form": "torch", "classes": 1000}
    assert keras.models.load_model(run / "model.keras").count_params() == 11_315_272


@pytest.mark.peers
def test_labels_of_another_number_and_a_run_that_is_there(path, tmp_path, capsys):
    (tmp_path / "labels.txt").write_text("one\ntwo\n")
    run = tmp_path / "run"
    assert command("torch", path, run, f"--labels={tmp_path / 'labels.txt'}") == 2
    assert capsys.readouterr().err == (
        "bnzoo-convert-weights: --labels must have 1000 lines, one a class. Received: 2\n"
    )
    assert not run.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["slim", "a.ckpt"], 2, "SOURCE, PATH and RUN must be given. Received: slim a.ckpt"),
        (["caffe", "a.caffemodel", "{new}"], 2, "SOURCE must be one of slim, torch, mxnet, onnx"),
        (["slim", "a.ckpt", "{new}", "--labels=none.txt"], 2, "--labels must be a text file"),
        (["slim", "a.ckpt", "{run}"], 2, "give another, or --overwrite. Received: "),
        (["slim", "a.ckpt", "{other}", "--overwrite"], 2, "it is no run either. Received: "),
        (["slim", "a.ckpt", "{run}", "--overwrite"], 1, "`path` must be a TF-slim checkpoint"),
        (["mxnet", "{other}/file", "{new}"], 1, "`path` must be a params file of MXNet's"),
    ],
)
def test_what_cannot_be_converted_is_told_in_one_line_and_nothing_is_touched(
    arguments, code, message, tmp_path, capsys
):
    folders = {name: tmp_path / name for name in ("new", "run", "other")}
    for name, file in (("run", "config.json"), ("other", "file")):
        folders[name].mkdir()
        (folders[name] / file).write_text("kept")
    assert command(*(argument.format(**folders) for argument in arguments)) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not folders["new"].exists()
    assert (folders["run"] / "config.json").read_text() == "kept"
    assert (folders["other"] / "file").read_text() == "kept"


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    """The weights are read before; here there are none."""
    monkeypatch.setattr(pretrained, "read_checkpoint", mock.Mock())
    monkeypatch.setattr(convert_weights, "_labels", lambda *_: [])
    (tmp_path / "file").write_text("kept")
    assert command("torch", "a.pth", tmp_path / "file" / "run") == 1
    assert capsys.readouterr().err.startswith(
        f"bnzoo-convert-weights: {tmp_path}/file/run cannot be written: Not a directory. "
    )
