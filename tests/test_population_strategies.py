"""bnzoo/population.py under tf.distribute: the same statistics everywhere, on every replica."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import bnzoo
from bnzoo.population import PopulationStatistics, estimate_population_statistics

LAYERS = [keras.layers.BatchNormalization, bnzoo.layers.BatchNormalization]
rng = np.random.default_rng(0)
X = np.float32(rng.normal(3 * np.arange(4), 1 + np.arange(4), (24, 4)))


def build(batch_norm: type[keras.layers.Layer], **kwargs: object) -> keras.Model:
    """Two layers that measure, a frozen one between; weights that do not depend on a strategy."""
    kernel = keras.initializers.GlorotUniform(seed=5)
    return keras.Sequential(
        [
            keras.Input((4,)),
            batch_norm(**kwargs),
            batch_norm(trainable=False),
            keras.layers.Dense(3, kernel_initializer=kernel),
            batch_norm(**kwargs),
        ]
    )


def statistics(model: keras.Model) -> list[np.ndarray]:
    """The moving statistics of the two layers that measure."""
    layers = (model.layers[0], model.layers[3])
    return [np.asarray(v) for layer in layers for v in (layer.moving_mean, layer.moving_variance)]


def _assert_equal(results, expected, **tolerance):
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, value, **{"rtol": 1e-6, **tolerance})


@pytest.fixture
def mirrored():
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    assert len(devices) == 2
    # The default cross-device operations mix up the keys of two strategies in one process.
    return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())


@pytest.mark.parametrize("batch_norm", LAYERS)
@pytest.mark.parametrize("in_scope", [True, False])
def test_mirrored_gives_what_one_device_gives(mirrored, batch_norm, in_scope):
    batches = np.split(X, 4)
    expected = statistics(estimate_population_statistics(build(batch_norm), batches))
    with mirrored.scope():
        model = build(batch_norm)
        if in_scope:
            estimated = estimate_population_statistics(model, batches)
    if not in_scope:
        estimated = estimate_population_statistics(model, batches)
    _assert_equal(statistics(estimated), expected)
    for variable in estimated.variables:
        first, second = mirrored.experimental_local_results(variable.value)
        np.testing.assert_array_equal(first, second)
    # It is a model of the strategy, so that it can be trained on.
    assert estimated.distribute_strategy is mirrored


@pytest.mark.parametrize("method", ["algorithm_2", "pooled"])
def test_each_replica_of_a_distributed_dataset_has_a_batch_of_its_own(mirrored, method):
    dataset = tf.data.Dataset.from_tensor_slices({"x": X[:21], "y": X[:21, 0]})
    dataset = dataset.map(lambda row: (row["x"], row["y"])).batch(10)
    distributed = mirrored.experimental_distribute_dataset(dataset)
    # 21 = 5 + 5, 5 + 5 and 1 + nothing.
    batches = np.split(X[:21], [5, 10, 15, 20])
    for kwargs in ({}, {"synchronized": True}):
        with mirrored.scope():
            model = build(bnzoo.layers.BatchNormalization, **kwargs)
        estimated = estimate_population_statistics(model, distributed, method=method)
        alone = build(bnzoo.layers.BatchNormalization)
        expected = estimate_population_statistics(alone, batches, method=method)
        _assert_equal(statistics(estimated), statistics(expected))


def test_callback_in_a_mirrored_fit(mirrored):
    batches = np.split(X, 4)
    with mirrored.scope():
        model = build(bnzoo.layers.BatchNormalization)
        model.compile(keras.optimizers.SGD(0.01), "mse")
    callback = PopulationStatistics(batches, every=1)
    y = X[:, :3]
    model.fit(
        X, y, batch_size=12, epochs=2, verbose=0, validation_data=(X, y), callbacks=[callback]
    )
    alone = build(bnzoo.layers.BatchNormalization)
    alone.set_weights(model.get_weights())
    _assert_equal(statistics(model), statistics(estimate_population_statistics(alone, batches)))


def _run_cluster(tasks: dict[str, int], waits_for: str) -> list[list[float]]:
    """Runs this file in a process for each task; what those of `waits_for` printed."""
    ports = {}
    sockets = []
    for kind, number in tasks.items():
        for _ in range(number):
            free = socket.socket()
            free.bind(("localhost", 0))
            sockets.append(free)
            ports.setdefault(kind, []).append(f"localhost:{free.getsockname()[1]}")
    for free in sockets:
        free.close()
    processes = []
    for kind, number in tasks.items():
        for index in range(number):
            config = json.dumps({"cluster": ports, "task": {"type": kind, "index": index}})
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.test_population_strategies"],
                env={**os.environ, "TF_CONFIG": config},
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append((kind, process))
    try:
        outputs = [
            process.communicate(timeout=300)[0] for kind, process in processes if kind == waits_for
        ]
    finally:
        for _, process in processes:
            process.kill()
            process.wait()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@tf.function
def _count_replicas(strategy: tf.distribute.Strategy) -> tf.Tensor:
    return strategy.reduce("SUM", strategy.run(lambda: tf.constant(1)), axis=None)


def _task() -> None:
    """One process of a cluster: estimates over the batches of its own, prints the statistics."""
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    if task["type"] in ("worker", "ps") and "chief" in os.environ["TF_CONFIG"]:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=task["type"],
            task_index=task["index"],
            protocol="grpc",
        ).join()
    if task["type"] == "chief":
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        batches = np.split(X, 4)
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        # Different numbers of batches, so that a collective in each pass would hang.
        batches = np.split(X, 4)[:1] if task["index"] == 0 else np.split(X, 4)[1:]
    with strategy.scope():
        model = build(bnzoo.layers.BatchNormalization)
        replicas = _count_replicas(strategy)
        estimated = estimate_population_statistics(model, batches)
        # Collectives of training and of the estimate must not get in each other's way.
        assert _count_replicas(strategy) == replicas == strategy.num_replicas_in_sync
    print(json.dumps([value for array in statistics(estimated) for value in array.tolist()]))


@pytest.mark.parametrize(
    ("tasks", "waits_for"),
    [({"worker": 2}, "worker"), ({"chief": 1, "worker": 1, "ps": 1}, "chief")],
    ids=["multi_worker", "parameter_server"],
)
def test_clusters_give_what_one_process_gives(tasks, waits_for):
    results = _run_cluster(tasks, waits_for)
    assert len(results) == tasks[waits_for]
    assert all(result == results[0] for result in results)
    alone = estimate_population_statistics(build(bnzoo.layers.BatchNormalization), np.split(X, 4))
    _assert_equal(results[0], np.concatenate(statistics(alone)))


if __name__ == "__main__":
    _task()
