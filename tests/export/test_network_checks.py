"""What cannot be served ends in one line, whatever TensorFlow or Keras say of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing
from export import procedure, saved_model, verification, verify_export
from export.errors import one_line
from tests.export.runs import write_run

Tensor = keras.KerasTensor


def top(x: Tensor) -> Tensor:
    return keras.layers.Dense(3, activation="softmax")(keras.layers.Flatten()(x))


def made(function: Callable[[Tensor], object], *shape: int, **options: object) -> keras.Model:
    image = keras.Input(shape or None, **options)  # type: ignore[arg-type]
    return keras.Model(image, function(image))


def two_inputs(name: str) -> keras.Model:
    first, second = keras.Input((4,), name=name), keras.Input((2,), name="other")
    return keras.Model([first, second], top(keras.layers.Concatenate()([first, second])))


def with_table(kind: type[keras.Layer], dtype: str, words: list) -> keras.Model:
    """In a network within the network."""

    def inner(x: Tensor) -> Tensor:
        return keras.layers.Embedding(10, 2)(kind(vocabulary=words, name="words")(x))

    nested = made(inner, 1, dtype=dtype)
    return made(lambda x: top(nested(x)), 1, dtype=dtype)


def refusal(model: keras.Model, folder: Path, capsys: pytest.CaptureFixture, *flags: str) -> str:
    model.save(folder / "model.keras")
    capsys.readouterr()
    argv = ["bnzoo-export", f"--keras_model={folder / 'model.keras'}", *flags, str(folder / "out")]
    assert saved_model.main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    out = folder / "out"
    assert not out.exists() or list(out.iterdir()) == []
    return line.removeprefix("bnzoo-export: ")


@pytest.mark.parametrize("name", ["my input", "b-c.d", "_a", "1a", "self", "lambda"])
def test_inputs_that_tensorflow_cannot_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert refusal(two_inputs(name), tmp_path, capsys).startswith(
        f"the network has an input {name!r}: TensorFlow needs a name of letters, digits and _ "
    )


@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
def test_inputs_that_no_server_can_give(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = with_table(keras.layers.StringLookup, "string", ["a", "b"])
    assert "input 'images' is of type string: only numbers" in refusal(text, tmp_path, capsys)
    numbers = with_table(keras.layers.IntegerLookup, "int64", [1, 2])
    assert refusal(numbers, tmp_path, capsys) == (
        "layer 'words', a IntegerLookup, looks up a table, which is not exported: export the "
        "network behind it"
    )
    (tmp_path / "p.json").write_text(Preprocessing((4, 4), scale=60).to_json())
    pixels = made(lambda x: top(keras.layers.Rescaling(1 / 255)(x)), 4, 4, 3, dtype="uint8")
    line = refusal(pixels, tmp_path, capsys, f"--preprocessing={tmp_path / 'p.json'}")
    assert line.startswith("the network's input is uint8, but what preprocessing makes of an ")


def test_a_batch_of_a_fixed_size_where_it_matters(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fixed = made(lambda x: top(keras.ops.reshape(x, (4, 8))), batch_shape=(4, 8))
    line = refusal(fixed, tmp_path, capsys)
    assert line.startswith("the network was made for batches of 4 and does not run on 8: a server")
    assert "64 values" in line
    free = made(top, batch_shape=(4, 8))
    free.save(tmp_path / "free.keras")
    argv = ["bnzoo-export", f"--keras_model={tmp_path / 'free.keras'}", str(tmp_path / "free")]
    assert saved_model.main(argv) == 0


def test_outputs_whose_names_are_taken_or_of_another_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in ("classes", "scores"):
        taken = made(lambda x, name=name: {"probabilities": top(x), name: x}, 8)  # type: ignore[misc]
        line = refusal(taken, tmp_path, capsys)
        assert line.startswith(f"the network has outputs 'probabilities' and '{name}': ")
    deep = made(lambda x: {"probabilities": keras.layers.Dense(3, "softmax")(x)}, 4, 8)
    assert "output 'probabilities' has shape (None, 4, 3), and" in refusal(deep, tmp_path, capsys)
    for flags in ((), ("--outputs=any",)):
        flat = made(lambda x: {"probabilities": keras.ops.sum(x, axis=1)}, 8)
        assert "has shape (None,), and class probabilities" in refusal(
            flat, tmp_path, capsys, *flags
        )


def test_flags_that_need_probabilities(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    for name, flag in (("labels", f"--labels={tmp_path / 'labels.txt'}"), ("top_k", "--top_k=2")):
        assert refusal(made(top, 8), tmp_path, capsys, "--outputs=any", flag).startswith(
            f"--{name} is for probabilities, and the network's outputs are dense"
        )
    # Outputs that are called so have them, whatever --outputs says.
    named = made(lambda x: {"probabilities": top(x)}, 8)
    named.save(tmp_path / "named.keras")
    argv = [f"--keras_model={tmp_path / 'named.keras'}", "--outputs=any", flag]
    assert saved_model.main(["bnzoo-export", *argv, str(tmp_path / "named")]) == 0


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            tf.errors.OutOfRangeError(None, None, "{{node Save}} part-0; File too large [Op:Save]"),
            "TensorFlow cannot write or run: part-0; File too large",
        ),
        (
            KeyError("^result_grads_0"),
            "the network cannot be exported: KeyError: '^result_grads_0'",
        ),
        (
            ValueError("\x1b[1mException in Dense.\x1b[0m\n\nno\n\nArguments received by Dense:\n"),
            "the network cannot be exported: ValueError: Exception in Dense. no",
        ),
        (AssertionError(), "the network cannot be exported: AssertionError: no more is known"),
        (MemoryError("x" * 900), f"the network cannot be exported: MemoryError: {'x' * 400} ..."),
    ],
)
def test_whatever_is_raised_is_told_in_one_line(
    error: Exception,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(procedure, "make_reproducible", fails)
    assert refusal(made(top, 8), tmp_path, capsys) == told


def test_so_it_is_when_a_file_for_another_runtime_fails_as_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("INVALID_GRAPH")

    monkeypatch.setattr(procedure.other_runtimes, "write", lambda *_: fails)
    line = refusal(made(top, 8), tmp_path, capsys, "--litert=float32")
    assert line == "the network cannot be exported: RuntimeError: INVALID_GRAPH"


def test_so_it_is_by_the_command_that_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no\nsuch layer")

    run_dir, out = write_run(tmp_path / "run", examples=0), tmp_path / "models"
    (out / "1").mkdir(parents=True)
    (out / "1" / "saved_model.pb").touch()
    monkeypatch.setattr(verification, "_reference", fails)
    assert verify_export.main(["bnzoo-verify-export", str(out), str(run_dir)]) == 1
    line = "bnzoo-verify-export: cannot be verified: RuntimeError: no such layer\n"
    assert capsys.readouterr().err == line


def test_where_a_graph_failed_is_left_out() -> None:
    @tf.function(autograph=False)
    def fails(x: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.Assert(x > 0, ["below", x])]):
            return tf.identity(x)

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        fails(tf.constant(-1.0))
    assert one_line(caught.value) == "InvalidArgumentError: assertion failed: [below] [-1]"
