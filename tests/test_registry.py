"""What every layer and model of the registry must do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.registry import LAYERS, MODELS, Instance, as_model, inputs_for

INSTANCES = {**LAYERS, **MODELS}
every = pytest.mark.parametrize("instance", INSTANCES.values(), ids=INSTANCES)
every_layer = pytest.mark.parametrize("instance", LAYERS.values(), ids=LAYERS)


@every
def test_number_of_weights(instance: Instance) -> None:
    model = as_model(instance)
    weights = [w for w in model.weights if "seed_generator" not in w.path]
    assert len(weights) == instance.weights


@every_layer
def test_configuration_round_trip(instance: Instance) -> None:
    layer = instance.make()
    config = layer.get_config()
    again = type(layer).from_config(config)
    assert again.get_config() == config
    # What a file holds: JSON makes lists of tuples.
    serialized = keras.saving.serialize_keras_object(layer)
    assert keras.saving.deserialize_keras_object(serialized).get_config() == config


@every
def test_an_unknown_batch(instance: Instance) -> None:
    model = as_model(instance)
    x = inputs_for(instance, 3)
    compiled = tf.function(model, input_signature=[tf.TensorSpec([None, *x.shape[1:]])])
    together = compiled(x)
    assert together.shape == (3, *model.output_shape[1:])
    # Inference treats each example on its own.
    np.testing.assert_allclose(compiled(x[:1]), together[:1], rtol=1e-4, atol=1e-5)


@every
def test_xla(instance: Instance) -> None:
    model = as_model(instance)
    x = inputs_for(instance, 2)
    compiled = tf.function(model, jit_compile=True)
    # The same float32 operations in another order.
    np.testing.assert_allclose(compiled(x), model(x), rtol=1e-3, atol=1e-4)


@every
def test_training_moves_every_trainable_weight(instance: Instance) -> None:
    model = as_model(instance)
    x = inputs_for(instance, 4)
    with tf.GradientTape() as tape:
        y = model(x, training=True)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2 * tf.range(1.0, y.shape[-1] + 1))
    weights = model.trainable_variables
    for weight, gradient in zip(
        weights, tape.gradient(loss, [w.value for w in weights]), strict=True
    ):
        assert gradient is not None, weight.path
        assert np.isfinite(gradient).all(), weight.path


@every
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(instance: Instance, policy: str) -> None:
    expected = as_model(instance)(inputs_for(instance, 2))
    keras.config.set_dtype_policy(policy)
    try:
        model = as_model(instance)
    finally:
        keras.config.set_dtype_policy("float32")
    assert all(w.dtype == "float32" for w in model.weights if "seed_generator" not in w.path)
    y = model(inputs_for(instance, 2))
    # Networks give their probabilities in float32 under every policy.
    assert y.dtype == ("float32" if instance in MODELS.values() else policy.removeprefix("mixed_"))
    # bfloat16 keeps 8 bits: 1/256 a step, through at most a few dozen layers.
    scale = float(tf.reduce_max(tf.abs(expected)))
    np.testing.assert_allclose(tf.cast(y, tf.float32), expected, rtol=0, atol=0.1 * scale)


@every
def test_two_replicas(instance: Instance) -> None:
    strategy = tf.distribute.MirroredStrategy(
        [device.name for device in tf.config.list_logical_devices("CPU")],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        model = as_model(instance)
    alone = as_model(instance)
    x = inputs_for(instance, 4)
    halves = strategy.experimental_distribute_values_from_function(
        lambda context: x[context.replica_id_in_sync_group :: 2]
    )

    @tf.function
    def infer(parts: tf.distribute.DistributedValues) -> tf.distribute.DistributedValues:
        return strategy.run(model, (parts,))

    parts = strategy.experimental_local_results(infer(halves))
    for index, part in enumerate(parts):
        np.testing.assert_allclose(part, alone(x[index::2]), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each instance as .keras, its SavedModel, its inputs and its outputs."""
    folder = tmp_path_factory.mktemp("saved")
    for name, instance in INSTANCES.items():
        model = as_model(instance)
        x = inputs_for(instance, 2)
        model.save(folder / f"{name}.keras")
        model.export(folder / name, verbose=False)
        np.savez(folder / f"{name}.npz", x=x.numpy(), y=model(x).numpy())
    return folder


def run_in_new_process(
    script: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_keras_files_load_in_a_new_process(saved: Path) -> None:
    """Case 45: no custom_objects are needed, only the import."""
    script = """
import sys, pathlib, numpy as np, keras, bnzoo
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.keras")):
    model = keras.models.load_model(path)
    example = np.load(path.with_suffix(".npz"))
    np.testing.assert_allclose(model(example["x"]), example["y"], rtol=1e-5, atol=1e-6)
    print(path.stem)
"""
    result = run_in_new_process(script, str(saved))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == sorted(INSTANCES)


@pytest.mark.parametrize(
    "imports",
    [
        "import bnzoo, keras",
        "import bnzoo.surgery, keras",
        "import bnzoo, tensorflow as tf; keras = tf.keras",
    ],
)
def test_case_45_whichever_is_imported_first(saved: Path, imports: str) -> None:
    script = f"""
import sys
{imports}
found = keras.models.load_model(sys.argv[1]).get_layer("it")
assert type(found) is bnzoo.layers.BatchNormalization
print([type(finder).__name__ for finder in sys.meta_path], keras.__loader__.exec_module)
"""
    result = run_in_new_process(script, str(saved / "batch_normalization.keras"))
    assert result.returncode == 0, result.stderr
    assert "_AfterKeras" not in result.stdout
    assert "bound method" in result.stdout  # Keras' loader is as it was.


@pytest.mark.peers
def test_another_backend_is_refused_when_bnzoo_is_used() -> None:
    pytest.importorskip("torch")
    script = """
import sys, bnzoo, keras
def attempt(imports):
    try:
        exec(imports)
    except ImportError as error:
        print(error)
attempt("bnzoo.layers")
attempt("import bnzoo.models.mlp")
attempt("from bnzoo.initializers import HeNormal")
del sys.modules["bnzoo"]
attempt("import bnzoo")
"""
    result = run_in_new_process(script, KERAS_BACKEND="torch")
    assert result.returncode == 0, result.stderr
    message = (
        "bnzoo needs Keras' TensorFlow backend: set KERAS_BACKEND=tensorflow before Keras is "
        "imported. Received: torch"
    )
    assert result.stdout.splitlines() == [message] * 4


def test_case_45_without_the_import_the_error_names_bnzoo(saved: Path) -> None:
    script = "import sys, keras; keras.models.load_model(sys.argv[1])"
    result = run_in_new_process(script, str(saved / "prelu.keras"))
    assert result.returncode != 0
    assert "bnzoo" in result.stderr


def test_saved_models_load_without_bnzoo_and_keras(saved: Path) -> None:
    script = """
import sys, pathlib, numpy as np
sys.modules["bnzoo"] = sys.modules["keras"] = None  # Importing either now fails.
import tensorflow as tf
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.npz")):
    serve = tf.saved_model.load(str(path.with_suffix(""))).signatures["serving_default"]
    example = np.load(path)
    (y,) = serve(tf.constant(example["x"])).values()
    np.testing.assert_allclose(y, example["y"], rtol=1e-5, atol=1e-6)
    (y,) = serve(tf.constant(example["x"][:1])).values()
    np.testing.assert_allclose(y, example["y"][:1], rtol=1e-4, atol=1e-5)
    print(path.stem)
"""
    result = run_in_new_process(script, str(saved))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == sorted(INSTANCES)
