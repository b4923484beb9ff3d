from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from bnzoo.trained_steps import add_step
from export.errors import ExportFailed
from export.provenance import METRICS_OF, of_run
from export.run_directory import read_examples, read_network, read_run, synthetic_examples
from tests.export.runs import LABELS, PREPROCESSING, small_network, write_run


def test_reads_what_training_wrote(tmp_path: Path) -> None:
    network = small_network()
    run = read_run(write_run(tmp_path / "run", network))
    assert run.preprocessing == PREPROCESSING
    assert run.labels == LABELS
    assert [path.name for path in run.assets] == [
        "labels.txt",
        "preprocessing.json",
        "config.json",
    ]
    for read, written in zip(run.network.weights, network.weights, strict=True):
        np.testing.assert_array_equal(read, written)


def test_takes_auxiliary_heads_off(tmp_path: Path) -> None:
    small = small_network()
    head = keras.layers.GlobalAveragePooling2D(name="auxiliary_1_pool")(
        small.get_layer("relu_0").output
    )
    network = keras.Model(small.input, {"predictions": small.output, "auxiliary_1": head})
    run = read_run(write_run(tmp_path / "run", network))
    assert run.network.output_shape == (None, len(LABELS))
    assert not [layer.name for layer in run.network.layers if "auxiliary" in layer.name]


def test_a_run_that_was_made_longer_and_has_not_ended_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "config.json").write_text('{"flags": {"steps": 60}}')
    (folder / "metrics.csv").write_text("step,loss\n20,3\n30,2\n40,1\n")
    assert "step" not in of_run(folder)
    add_step(folder / "model.keras", 30)
    read_run(folder)
    assert capsys.readouterr().out == (
        f"{folder} is not finished: model.keras is the network of step 30, and 60 are to be done\n"
    )
    assert of_run(folder) == {
        "run": "run",
        "step": 30,
        "metrics": {"step": 30, "loss": 2},
        "metrics_of": METRICS_OF,
    }
    (folder / "config.json").write_text('{"flags": {"steps": 30}}')
    read_run(folder)
    assert capsys.readouterr().out == ""


def test_names_of_classes_may_hold_what_divides_lines_elsewhere(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", small_network())
    names = ("a\u2028b", "c\fd", *LABELS[2:])
    (folder / "labels.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    assert read_run(folder).labels == names


@pytest.mark.parametrize("name", ["model.keras", "preprocessing.json", "labels.txt"])
def test_names_the_file_that_is_missing(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    with pytest.raises(ExportFailed, match=rf"^no {name} in .*run: give the folder of a finished"):
        read_run(folder)


@pytest.mark.parametrize("name", ["model.keras", "preprocessing.json"])
def test_a_damaged_file_is_one_line(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_bytes(b"{")
    with pytest.raises(ExportFailed, match=r"^cannot read .*run: [^\n]+$"):
        read_run(folder)


class Tripled(keras.layers.Layer):
    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return 3 * x


@pytest.mark.parametrize("name", ["model.keras", "model.h5"])
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_a_layer_that_nobody_knows_is_named(tmp_path: Path, name: str) -> None:
    image = keras.Input((3,))
    keras.Model(image, Tripled()(image)).save(tmp_path / name)
    with pytest.raises(ExportFailed, match=r"it has a Tripled, which neither Keras nor bnzoo "):
        read_network(tmp_path / name)


def test_a_network_that_was_never_built_is_one_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    keras.Sequential([keras.layers.Dense(len(LABELS))]).save(folder / "model.keras")
    with pytest.raises(ExportFailed, match=r"^the network in .*run has no inputs of its own: "):
        read_run(folder)


def test_a_file_that_is_cut_short_is_not_said_to_be_missing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = (folder / "model.keras").read_bytes()
    (folder / "model.keras").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ExportFailed, match=r"run: model\.keras is no archive, or cut short$"):
        read_run(folder)


def test_refuses_labels_of_another_network(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "labels.txt").write_text("ant\nbee\n")
    with pytest.raises(ExportFailed, match=r"output has shape \(None, 7\), .* need \(None, 2\)$"):
        read_run(folder)


def test_refuses_preprocessing_of_another_network(tmp_path: Path) -> None:
    image = keras.Input((12, 11, 3))
    x = keras.layers.GlobalAveragePooling2D()(image)
    network = keras.Model(image, keras.layers.Dense(len(LABELS), activation="softmax")(x))
    with pytest.raises(
        ExportFailed, match=r"input has shape \(None, 12, 11, 3\), .* need \(None, 12, 10, 3\)$"
    ):
        read_run(write_run(tmp_path / "run", network))


def test_examples_by_name(tmp_path: Path) -> None:
    for name in ("b.png", "a.jpg", "c", ".hidden"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "folder").mkdir()
    assert read_examples(tmp_path) == {"a.jpg": b"a.jpg", "b.png": b"b.png", "c": b"c"}
    assert read_examples(tmp_path / "none") == {}


def test_synthetic_examples_are_varied_and_always_the_same() -> None:
    examples = synthetic_examples(PREPROCESSING)
    assert examples == synthetic_examples(PREPROCESSING)
    images = np.stack([PREPROCESSING.decode(encoded) for encoded in examples])
    assert images.shape == (8, 12, 10, 3)
    assert images.std(axis=(0, 1, 2)).min() > 60
    assert len({image.tobytes() for image in images}) == 8
