"""What the inputs of `serving_default` are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from export import saved_model
from export.chunks import step_size
from tests.export.runs import PREPROCESSING, small_network

SHAPES = {"picture": (12, 10, 3), "age": (4,)}


def network(keys: dict[str, str] | None) -> keras.Model:
    """Two inputs, by `keys`, or as a list; Keras sorts the keys."""
    inputs = {name: keras.Input(shape, name=name) for name, shape in SHAPES.items()}
    body = small_network()
    body = keras.Model(body.input, body.get_layer("pool").output)
    joined = keras.layers.Concatenate()([body(inputs["picture"]), inputs["age"]])
    output = keras.layers.Dense(3, activation="softmax", name="top")(joined)
    structure: Any = list(inputs.values())
    if keys is not None:
        structure = {key: inputs[name] for key, name in keys.items()}
    return keras.Model(structure, output)


def exported(model: keras.Model, folder: Path, *flags: str) -> dict[str, Any]:
    model.save(folder / "model.keras")
    argv = ["bnzoo-export", f"--keras_model={folder / 'model.keras'}", *flags, str(folder / "out")]
    assert saved_model.main(argv) == 0
    loaded = tf.saved_model.load(str(folder / "out" / "1"))
    return {"model": loaded, **loaded.signatures}


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"picture": "picture", "age": "age"}, {"picture": "picture", "age": "age"}),
        # The keys are what callers of the network use, whatever its layers are called.
        ({"before": "picture", "behind": "age"}, {"before": "picture", "behind": "age"}),
        (None, {"picture": "picture", "age": "age"}),
    ],
    ids=["keys of layers", "other keys", "list"],
)
@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_several_inputs(keys: dict[str, str] | None, names: dict[str, str], tmp_path: Path) -> None:
    model = network(keys)
    served = exported(model, tmp_path, "--features=pooled")["serving_default"]
    random = np.random.default_rng(5)
    values = {
        key: random.normal(size=(5, *SHAPES[name])).astype(np.float32)
        for key, name in names.items()
    }
    assert set(served.structured_input_signature[1]) == set(names)
    given = values if keys is not None else [values["picture"], values["age"]]
    # Folding reorders float32 sums; the probabilities are of order 0.3.
    expected = model.predict(given, verbose=0)
    np.testing.assert_allclose(served(**values)["probabilities"], expected, atol=1e-6)


def test_a_dict_of_one_input(tmp_path: Path) -> None:
    body = small_network()
    model = keras.Model({"image": body.input}, body.output)
    images = np.random.default_rng(5).normal(size=(5, 12, 10, 3)).astype(np.float32)
    expected = body.predict(images, verbose=0)
    (tmp_path / "alone").mkdir()
    served = exported(model, tmp_path / "alone")["serving_default"]
    np.testing.assert_allclose(served(image=images)["probabilities"], expected, atol=1e-6)
    # Where images are prepared, too, all signatures call them by one name.
    (tmp_path / "preprocessing.json").write_text(PREPROCESSING.to_json())
    flag = f"--preprocessing={tmp_path / 'preprocessing.json'}"
    served = exported(model, tmp_path, flag)
    answer = served["serving_default"](images=images)
    np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-6)
    assert set(served["serving_uint8"].structured_input_signature[1]) == {"images"}


def test_a_step_is_as_small_as_the_largest_input_needs() -> None:
    large, small = keras.Input((448, 448, 3), name="large"), keras.Input((2,), name="a")
    pooled = keras.layers.GlobalAveragePooling2D()(large)
    model = keras.Model({"large": large, "a": small}, [pooled, small])
    assert step_size(model) == 4


def test_a_sequential_network_that_keras_reads_without_calling_it(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((12, 10, 3)), *small_network().layers[1:]])
    images = np.random.default_rng(5).normal(size=(5, 12, 10, 3)).astype(np.float32)
    expected = model.predict(images, verbose=0)
    served = exported(model, tmp_path, "--features=pooled")["serving_default"]
    (name,) = served.structured_input_signature[1]
    answer = served(**{name: images})
    np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-6)
    assert set(answer) >= {"probabilities", "features"}
