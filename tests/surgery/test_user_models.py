"""What models of users hold beside layers with weights, and what they do with the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

from bnzoo.population import estimate_population_statistics
from bnzoo.surgery import convert_batch_norm, fold_batch_norm

from .models import batch_norms, randomize, relative_error


def _ending_in_batch_norm() -> keras.Model:
    inner = keras.Sequential([keras.Input((3,)), L.Dense(4), L.BatchNormalization()], name="inner")
    inputs = keras.Input((3,))
    return randomize(keras.Model(inputs, L.BatchNormalization(name="last")(inner(inputs))))


@pytest.mark.parametrize("change", [convert_batch_norm, fold_batch_norm])
def test_the_result_can_be_saved_loaded_and_cloned(change: Callable, tmp_path: Path) -> None:
    model = _ending_in_batch_norm()
    changed = change(model)
    changed.save(tmp_path / "changed.keras")
    loaded = keras.models.load_model(tmp_path / "changed.keras")
    assert relative_error(model, loaded) < 1e-5
    clone = keras.models.clone_model(changed)
    clone.set_weights(changed.get_weights())
    assert relative_error(model, clone) < 1e-5
    assert keras.models.model_from_json(changed.to_json()).output_names == model.output_names


@pytest.mark.parametrize(
    "change",
    [
        convert_batch_norm,
        fold_batch_norm,
        lambda model: estimate_population_statistics(
            model, [tf.constant([["a", "b"], ["c", "a"]]), tf.constant([["b", "b"], ["c", "z"]])]
        ),
    ],
    ids=["convert", "fold", "population"],
)
def test_vocabularies_are_kept(change: Callable) -> None:
    lookup = L.StringLookup(output_mode="multi_hot")
    lookup.adapt([["a", "b", "c"]])
    inputs = keras.Input((2,), dtype="string")
    dense = L.Dense(4)(lookup(inputs))
    model = keras.Model(inputs, L.BatchNormalization()(dense))
    words = tf.constant([["a", "b"], ["c", "z"]])
    before = model(words).numpy()
    changed = change(model)
    kept = next(layer for layer in changed.layers if isinstance(layer, L.StringLookup))
    assert kept.get_vocabulary() == lookup.get_vocabulary()
    assert changed(words).shape == before.shape
    if change in (convert_batch_norm, fold_batch_norm):
        np.testing.assert_allclose(changed(words), before, rtol=1e-5, atol=1e-6)


def _joined(axis: int, shape: tuple[int | None, ...], batch: int | None = None) -> keras.Model:
    inputs = keras.Input(shape, batch_size=batch)
    parts = [L.Conv1D(4, 3, padding="same")(inputs) for _ in range(2)]
    return randomize(keras.Model(inputs, L.BatchNormalization()(L.Concatenate(axis=axis)(parts))))


def test_folds_across_a_concatenation_of_unknown_length() -> None:
    model = _joined(1, (None, 3))
    folded, report = fold_batch_norm(model, return_report=True)
    assert relative_error(model, folded) < 1e-5
    assert report.batch_norms[0].outcome == "folded"


def test_does_not_fold_across_a_concatenation_of_batches() -> None:
    model = _joined(0, (5, 3), batch=2)
    folded, report = fold_batch_norm(model, return_report=True)
    x = np.random.default_rng(3).normal(size=(2, 5, 3)).astype("float32")
    np.testing.assert_allclose(folded(x), model(x), rtol=1e-4, atol=1e-5)
    assert report.batch_norms[0].outcome == "affine"
    assert "joins batches" in report.batch_norms[0].reason
    assert batch_norms(folded) == []
