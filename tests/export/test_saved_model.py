from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import bnzoo.surgery
from export import saved_model
from tests.export.runs import LABELS, encoded_image, small_network, write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run")


def export(*arguments: object) -> int:
    return saved_model.main(["bnzoo-export", *map(str, arguments)])


def test_exports_folded_and_says_what_it_did(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models" / "small"
    assert export(run_dir, out) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 BatchNormalization: 2 folded, 0 affine, 0 kept; parameters ")
    assert lines[1] == (
        f"Difference to the unfolded network on 3 images of {run_dir / 'examples'}:"
    )
    assert [line.split(":")[0] for line in lines[2:5]] == [
        "  serving_default",
        "  serving_uint8",
        "  serving_bytes",
    ]
    assert lines[5] == f"Wrote {out / '1'}"
    assert [entry.name for entry in out.iterdir()] == ["1"]
    assert sorted(asset.name for asset in (out / "1" / "assets").iterdir()) == [
        "config.json",
        "labels.txt",
        "preprocessing.json",
        "provenance.json",
    ]
    images = np.random.default_rng(3).normal(size=(4, 12, 10, 3)).astype(np.float32)
    served = tf.saved_model.load(str(out / "1")).signatures["serving_default"](images=images)
    expected = small_network()
    expected.load_weights(run_dir / "model.keras")
    # Folding reorders float32 sums; the probabilities are of order 0.1.
    np.testing.assert_allclose(
        served["probabilities"], expected.predict(images, verbose=0), atol=1e-6
    )


def test_versions(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(run_dir, tmp_path, "--version=4") == 0
    assert export(run_dir, tmp_path, "--version=4") == 1
    error = capsys.readouterr().err
    assert error == (
        f"bnzoo-export: {tmp_path / '4'} exists already: ask for a new version with "
        "--version=next, the default\n"
    )
    assert export(run_dir, tmp_path) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["4", "5"]


def test_noise_where_there_are_no_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run", examples=0)
    assert export(run_dir, tmp_path / "out") == 0
    assert "unfolded network on 8 images of noise:" in capsys.readouterr().out


def test_examples_of_another_folder(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "photographs"
    folder.mkdir()
    assert export(run_dir, tmp_path / "out", f"--examples={folder}") == 1
    assert capsys.readouterr().err == f"bnzoo-export: no images in {folder}\n"
    (folder / "a.png").write_bytes(encoded_image(9))
    assert export(run_dir, tmp_path / "out", f"--examples={folder}") == 0
    assert f"on 1 images of {folder}:" in capsys.readouterr().out


def test_an_example_above_the_limit_of_pixels(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The examples have 320, 336 and 352 pixels.
    assert export("--max_megapixels=0.00034", run_dir, tmp_path) == 1
    assert capsys.readouterr().err == (
        f"bnzoo-export: one of the images of {run_dir / 'examples'} has 22x16 pixels, which "
        "serving_bytes would refuse by --max_megapixels=0.00034: export with a higher one, or "
        "give other --examples\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_fold_is_not_published(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fold = bnzoo.surgery.fold_batch_norm

    def fold_wrongly(*arguments: object, **options: object) -> object:
        folded, report = fold(*arguments, **options)
        folded.get_layer("conv_0").bias.assign_add(np.full(6, 0.01))
        return folded, report

    monkeypatch.setattr(bnzoo.surgery, "fold_batch_norm", fold_wrongly)
    assert export(run_dir, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert error.startswith("bnzoo-export: serving_default differs from the unfolded network by ")
    assert ", more than --max_difference=0.0001; it starts at layer 'conv_0', which" in error
    assert error.endswith(": nothing was published\n")
    assert list((tmp_path / "out").iterdir()) == []


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(tmp_path / "none", tmp_path / "out") == 1
    assert capsys.readouterr().err == (
        f"bnzoo-export: no model.keras in {tmp_path / 'none'}: give the folder of a finished "
        "bnzoo-train\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "two folders are needed, RUN and OUT. Received: none"),
        (("run",), "two folders are needed, RUN and OUT. Received: run"),
        (
            ("a", "b", "--version=v1"),
            "--version must be next or a whole number of at most 18 digits, without zeros before "
            "it. Received: --version=v1",
        ),
        (
            ("a", "b", "--max_difference=-1"),
            "--max_difference must be a number of at least 0. Received: --max_difference=-1.0",
        ),
        (
            ("a", "b", "--max_difference=nan"),
            "--max_difference must be a number of at least 0. Received: --max_difference=nan",
        ),
        (
            ("run", "models/lr=[0.1]"),
            "OUT must not have any of * ? [ ] \\ in it: TensorFlow takes the name of a SavedModel "
            "for a pattern, and would not find its variables. Received: models/lr=[0.1]",
        ),
        (
            ("--keras_model=m.keras", "a", "b"),
            "with --keras_model one folder is needed, OUT. Received: a b",
        ),
        (
            ("--keras_model=m.keras", "a", "--crops=10"),
            "--examples and --crops need --preprocessing where there is no run",
        ),
        (
            ("a", "b", "--labels=labels.txt"),
            "--labels is for --keras_model: a run has its own",
        ),
        *(
            (
                ("a", "b", f"--max_megapixels={wrong}"),
                "--max_megapixels must be a number of at least 1e-6, one pixel, and at most "
                f"536.871. Received: --max_megapixels={wrong}",
            )
            for wrong in ("0", "nan", "1000")
        ),
        (("a", "b", "--top_k=0"), "--top_k must be at least 1. Received: --top_k=0"),
        (
            ("a", "b", "--step=2147483647"),
            "--step must be at most 1048576. Received: --step=2147483647",
        ),
        (
            ("--keras_model=", "b"),
            "--keras_model must be a .keras or .h5 file. Received: --keras_model=",
        ),
        (
            ("a", "b", "--litert=float32,int4"),
            "--litert must be a list of float32, int8, each once. Received: --litert=float32,int4",
        ),
        (
            ("a", "b", "--warmup=1,0"),
            "--warmup must be whole numbers above 0 with commas between. Received: 1,0",
        ),
        (
            ("a", "b", "--warmup=1,99999999999"),
            "--warmup must be at most 2147483647. Received: 1,99999999999",
        ),
        (("a", "b", "--versoin=1"), "Unknown command line flag 'versoin'. Did you mean: version ?"),
    ],
)
def test_bad_flags(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(*arguments) == 2
    assert capsys.readouterr().err == f"bnzoo-export: {message}\n"


def test_a_forgotten_out_is_no_place_to_write(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two runs the second would be taken for OUT."""
    assert export(run_dir, run_dir) == 2
    assert capsys.readouterr().err == (
        f"bnzoo-export: the last folder must be OUT, but {run_dir} is a run directory\n"
    )


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert export("--help") == 0
    text = capsys.readouterr().out
    assert text.startswith("bnzoo-export [FLAGS] RUN [RUN ...] OUT\n")
    for flag in ("--version", "--examples", "--max_difference"):
        assert flag in text


def test_labels_are_in_the_graph(run_dir: Path, tmp_path: Path) -> None:
    assert export(run_dir, tmp_path) == 0
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_bytes"]
    classes = served(image_bytes=tf.constant([encoded_image(4)]))["classes"].numpy()[0]
    assert {name.decode() for name in classes} < set(LABELS)


def _zip_of_something_else(run: Path) -> None:
    with zipfile.ZipFile(run / "model.keras", "w") as archive:
        archive.writestr("notes.txt", "no network")


DAMAGES = {
    "labels that are no text": lambda run: (run / "labels.txt").write_bytes(b"\xff\xfe\xff"),
    "a file that is no archive": lambda run: (run / "model.keras").write_bytes(b"PK\x03\x04 no"),
    "an archive of something else": _zip_of_something_else,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_run(
    damage: Callable[[Path], object],
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    damage(run)
    assert export(run, tmp_path / "out") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bnzoo-export: cannot read {run}: ")
    assert not (tmp_path / "out").exists()


def test_no_place_to_write(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert export(run_dir, tmp_path / "file" / "models") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bnzoo-export: cannot write or read: ")
    assert export(run_dir, "") == 2
    assert "two folders are needed" in capsys.readouterr().err


def test_a_full_disk_is_one_line(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assets = []

    def full(root: tf.Module, *_: object, **__: object) -> None:
        assets.extend(Path(asset.asset_path.numpy().decode()) for asset in root.assets)
        # As TensorFlow 2.21 says it.
        message = "{{function_node __wrapped__SaveV2}} part-0; No space left on device [Op:SaveV2]"
        raise tf.errors.ResourceExhaustedError(None, None, message)

    monkeypatch.setattr(tf.saved_model, "save", full)
    assert export(run_dir, tmp_path) == 1
    assert capsys.readouterr().err == (
        "bnzoo-export: TensorFlow cannot write or run: part-0; No space left on device\n"
    )
    assert list(tmp_path.iterdir()) == []
    # Nothing lies elsewhere, where the next export would not look for what a killed one left.
    assert assets
    assert all(path.is_relative_to(tmp_path) for path in assets)


def test_a_sequential_network(run_dir: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    network = keras.Sequential([keras.Input((12, 10, 3)), small_network()])
    network.save(run / "model.keras")
    assert export(run, tmp_path / "out") == 0
