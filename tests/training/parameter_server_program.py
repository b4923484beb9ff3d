"""A chief, and what is to be true of its cluster, as JSON lines; run by test_parameter_server.py.

The servers of two workers and a ps are in a second process, together: it is quicker to start than
three.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

from bnzoo.layers import BatchNormalization
from training import data, local_cluster, task_server
from training.atomic_optimizer import AtomicSGD
from training.cluster import Task
from training.command_line import BadFlags, RunFailed
from training.parameter_server import ParameterServers
from training.scheduled_evaluation import make_scheduled_evaluator
from training.steps import make_train_step

from .helpers import settings

STEPS = 300
UPDATES = 400
FACTS = {"flags": {"batch_size": 32}}


def tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def network() -> keras.Model:
    keras.utils.set_random_seed(3)
    image = keras.Input((8, 8, 1))
    x = keras.layers.Flatten()(image)
    for momentum in (None, 0.9):
        x = keras.layers.Dense(32, use_bias=False)(x)
        x = BatchNormalization(momentum=momentum)(x)
        x = keras.layers.ReLU()(x)
    return keras.Model(image, keras.layers.Dense(10, activation="softmax")(x))


def optimizer_of(kind: type, model: keras.Model) -> keras.optimizers.Optimizer:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 50, 0.5)
    optimizer = kind(schedule, momentum=0.9)
    optimizer.build(model.trainable_variables)
    return optimizer


def serve(jobs: dict[str, list[str]]) -> None:
    """Is all servers until its input is closed."""
    tf.io.write_file("ram://bnzoo/facts.json", json.dumps(FACTS))
    spec = tf.train.ClusterSpec(jobs)
    # They share the threads of the process, and wait in them for each other.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=16)
    servers = [
        tf.distribute.Server(spec, job, index, protocol="grpc", config=config)
        for job, index in (("worker", 0), ("worker", 1), ("ps", 0))
    ]
    sys.stdin.read()
    del servers


def main() -> None:
    plan = local_cluster.addresses(workers=2, ps=1)
    jobs = json.dumps(dict(plan.jobs))
    command = [sys.executable, "-m", "tests.training.parameter_server_program", jobs]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as servers:
        try:
            lead(Task({job: tuple(found) for job, found in plan.jobs.items()}, "chief", 0))
        finally:
            servers.kill()


def lead(chief: Task) -> None:
    strategy = task_server.connect(chief, FACTS, timeout=500)
    inputs = data.open_inputs(settings())
    everything = [
        np.concatenate(parts)
        for parts in zip(
            *data.training_batches(inputs, 479, seed=0).take(3).as_numpy_iterator(), strict=True
        )
    ]

    momentum_of_many_workers(strategy, chief)
    whole_steps(strategy, chief, inputs, everything)
    one_at_a_time(strategy, chief, everything)


def engine_of(
    strategy: Any, chief: Task, train_step: Any, optimizer: Any, batches: Any, step: Any = None
) -> ParameterServers:
    if step is None:
        with strategy.scope():
            step = tf.Variable(0, dtype=tf.int64, trainable=False)
    return ParameterServers(strategy, chief, train_step, optimizer, step, batches, patience=10)


def lose_a_result(engine: ParameterServers) -> ParameterServers:
    """As when a worker is killed between the end of its step and the fetching of the result."""
    schedule, lost = engine._coordinator.schedule, []

    def losing(function: Any, args: Any) -> Any:
        value = schedule(function, args=args)
        if lost:
            return value
        lost.append(value)

        def fetch() -> None:
            value.fetch()
            raise tf.errors.UnavailableError(None, None, "from remote target /job:worker/task:1")

        return types.SimpleNamespace(fetch=fetch)

    engine._coordinator.schedule = losing
    return engine


def momentum_of_many_workers(strategy: Any, chief: Task) -> None:
    """With equal gradients the sum of all updates does not depend on their order."""
    with strategy.scope():
        weights = [keras.Variable(np.zeros(3, np.float32)) for _ in range(2)]
        optimizer = AtomicSGD(1.0, momentum=1.0)
        optimizer.build(weights)

    def train_step(gradient: tf.Tensor) -> tuple[tf.Tensor, ...]:
        optimizer.apply([1 * gradient, 2 * gradient], weights)
        return (tf.constant(0.0),) * 3

    def batches(worker: tf.Tensor, position: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((tf.ones(3),)).repeat()

    engine = engine_of(strategy, chief, train_step, optimizer, batches)
    engine.run(0, UPDATES)
    tell(
        test="momentum",
        weights=[weight.numpy().tolist() for weight in weights],
        velocities=[weight.numpy().tolist() for weight in optimizer.momentums],
        iterations=int(optimizer.iterations),
    )
    losing = lose_a_result(
        engine_of(
            strategy, chief, lambda _: tf.unstack(tf.constant([0.5, 0.25, 2.0])), optimizer, batches
        )
    )
    columns = losing.run(0, 5)._asdict()
    tell(
        test="lost",
        columns={name: value.tolist() for name, value in columns.items()},
        report=losing.report(),
    )


def whole_steps(strategy: Any, chief: Task, inputs: Any, everything: Any) -> None:
    with strategy.scope():
        model = network()
        optimizer = optimizer_of(AtomicSGD, model)
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
    train_step = make_train_step(model, optimizer, 32, 1e-4)
    seen: list[str] = []

    def batches(worker: tf.Tensor, position: tf.Tensor) -> tf.data.Dataset:
        seen.append("traced")
        return data.training_batches(inputs, 32, 5 + worker, first_step=position)

    engine = engine_of(strategy, chief, train_step, optimizer, batches, step)
    layer = model.layers[3]
    early = engine.run(0, 20)
    lowest = float(layer.moving_variance.numpy().min())
    first = engine.run(20, 80, ahead=STEPS - 100)
    under_way = len(engine.under_way)
    second = engine.run(100, STEPS - 100)
    tell(
        test="steps",
        lowest=lowest,
        under_way=under_way,
        lengths=[len(column) for column in (*early, *first, *second)],
        losses=[float(early.losses.mean()), float(second.losses[-20:].mean())],
        rates=np.concatenate([early.rates, first.rates, second.rates]).tolist(),
        step=int(step.numpy()),
        iterations=int(optimizer.iterations),
        batches_seen=layer.batches_seen.numpy().min(axis=1).tolist(),
        report=engine.report(),
        traces=engine.step.experimental_get_tracing_count(),
        seen=len(seen),
    )

    evaluate = make_scheduled_evaluator(
        engine, model, inputs.evaluation, inputs.preprocessing, batch_size=32
    )
    found = evaluate()
    held_out = data.evaluation_batches(inputs.evaluation, inputs.preprocessing, 360)
    images, labels, _ = next(held_out.as_numpy_iterator())
    local = network()
    for mine, theirs in zip(local.variables, model.variables, strict=True):
        mine.assign(theirs.numpy())
    scores = np.float64(local(images).numpy())
    picked = scores[np.arange(len(labels)), labels]
    tell(
        test="evaluation",
        found=[found.examples, found.loss, found.accuracy],
        expected=[
            len(labels),
            float(-np.log(picked).mean()),
            float((scores.argmax(1) == labels).mean()),
        ],
        again=evaluate() == found,
    )


def one_at_a_time(strategy: Any, chief: Task, everything: Any) -> None:
    """Of one step at a time, all on one batch, the order is that of one device."""
    images, labels = (values[:64] for values in everything)
    with strategy.scope():
        model = network()
        optimizer = optimizer_of(AtomicSGD, model)
    alone = network()
    keras_sgd = optimizer_of(keras.optimizers.SGD, alone)

    def batches(worker: tf.Tensor, position: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((images, labels)).repeat()

    engine = engine_of(
        strategy, chief, make_train_step(model, optimizer, 64, 1e-4), optimizer, batches
    )
    train_alone = tf.function(make_train_step(alone, keras_sgd, 64, 1e-4))
    start = max(
        float(np.abs(mine.numpy() - theirs.numpy()).max())
        for mine, theirs in zip(alone.variables, model.variables, strict=True)
    )
    differences = []
    for number in range(20):
        mine = train_alone(tf.constant(images), tf.constant(labels))
        theirs = engine.run(number, 1)
        differences.append(
            max(
                abs(float(a) - float(b[0]))
                for a, b in zip(
                    mine, (theirs.losses, theirs.accuracies, theirs.gradient_norms), strict=True
                )
            )
        )
    tell(
        test="one_at_a_time",
        start=start,
        results=max(differences),
        variables=max(
            float(np.abs(mine.numpy() - theirs.numpy()).max())
            for mine, theirs in zip(
                [*alone.variables, *keras_sgd.variables],
                [*model.variables, *optimizer.variables],
                strict=True,
            )
        ),
    )

    def broken(*batch: tf.Tensor) -> tuple[tf.Tensor, ...]:
        tf.debugging.assert_less(tf.reduce_sum(batch[0]), -1.0, message="a broken batch")
        return (tf.constant(0.0),) * 3

    try:
        engine_of(strategy, chief, broken, optimizer, batches).run(0, 5)
    except (tf.errors.OpError, RunFailed) as error:
        tell(test="error", kind=type(error).__name__, text=str(error))
    try:
        task_server.connect(chief, {"flags": {"batch_size": 64}}, timeout=10)
    except BadFlags as error:
        tell(test="facts", text=str(error))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(json.loads(sys.argv[1]))
    else:
        main()
