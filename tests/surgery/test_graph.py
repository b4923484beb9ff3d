"""Graphs are read as they are, and models built from them do and are the same."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.surgery.graph import layers_in, read_graphs
from bnzoo.surgery.rebuild import copy_layer, copy_state, rebuild

from .models import example, randomize, relative_error, run

L = keras.layers
SLOPE = 0.3  # A name that a function of a Lambda refers to.


def _rebuild(model: keras.Model) -> keras.Model:
    copy, pairs = rebuild(read_graphs(model), copy_layer)
    for old, new in pairs:
        copy_state(old, new)
    return copy


def _names(model: keras.Model) -> list[str]:
    return [layer.name for layer in model._flatten_layers()]


def _everything() -> keras.Model:
    """Nested structures, operations that are no layers, shared layers, nested models."""
    a = keras.Input((6, 6, 2), name="a")
    b = keras.Input((6, 6, 2), name="b")
    unused = keras.Input((3,), name="unused")
    conv = L.Conv2D(2, 3, padding="same", name="shared")
    inner_inputs = [keras.Input((6, 6, 2), name="left"), keras.Input((6, 6, 2), name="right")]
    inner_sum = L.Add(name="add")(inner_inputs)
    inner = keras.Model(
        inner_inputs, {"sum": inner_sum, "conv": L.Conv2D(2, 1, name="c")(inner_sum)}, name="inner"
    )
    sequential = keras.Sequential(
        [L.Dense(3, name="d"), L.BatchNormalization(name="bn")], name="sequential"
    )
    x = conv(a) + conv(b) * np.array([0.5, -2.0], "float32")
    first = inner([x, a])
    second = inner([first["sum"], first["conv"]])
    x = L.Lambda(lambda t: tf.nn.leaky_relu(t, SLOPE), name="leaky")(second["conv"][:, 1:])
    x = keras.ops.reshape(x, (-1, 5, 12))
    y = L.TimeDistributed(sequential, name="over_rows")(x)
    z = sequential(keras.ops.mean(x, axis=1))
    inputs = {"a": a, "rest": [b, unused]}
    return randomize(keras.Model(inputs, {"y": y, "z": (z, [first["sum"]])}, name="everything"))


def test_computes_the_same() -> None:
    model = _everything()
    copy = _rebuild(model)
    # The same operations on the same numbers.
    assert relative_error(model, copy) == 0


def test_keeps_names_and_structure() -> None:
    model = _everything()
    copy = _rebuild(model)
    assert _names(copy) == _names(model)
    assert [v.name for v in copy.variables] == [v.name for v in model.variables]
    assert copy.output_names == model.output_names
    assert [x.name for x in copy.inputs] == [x.name for x in model.inputs]
    keras.tree.assert_same_structure(copy.input, model.input)
    keras.tree.assert_same_structure(copy.output, model.output)


def test_shares_what_was_shared() -> None:
    model = _everything()
    copy = _rebuild(model)
    assert copy.count_params() == model.count_params()
    assert copy.get_layer("over_rows").layer is copy.get_layer("sequential")


def test_does_not_touch_the_model() -> None:
    model = _everything()
    model.compile("adam", loss=lambda y_true, y_pred: 0.0)
    inputs = example(model)
    before = run(model, inputs)
    nodes = [len(layer._inbound_nodes) for layer in model._flatten_layers()]
    copy = _rebuild(model)
    for variable in copy.variables:
        variable.assign(tf.zeros_like(variable))
    assert [len(layer._inbound_nodes) for layer in model._flatten_layers()] == nodes
    assert model.compiled
    assert not copy.compiled
    for expected, got in zip(before, run(model, inputs), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_graph_of_calls() -> None:
    model = _everything()
    graphs = {graph.model.name: graph for graph in read_graphs(model)}
    assert next(iter(graphs)) == "everything"
    assert set(graphs) == {"everything", "inner", "sequential"}
    outer = graphs["everything"]
    names = [call.operation.name for call in outer.calls]
    assert names.count("shared") == 2
    assert names.count("inner") == 2
    first = outer.calls[names.index("inner")]
    assert all(outer.producer(tensor) is not first for tensor in first.inputs)
    summed, conv = first.outputs["sum"], first.outputs["conv"]
    assert outer.is_output(summed)
    assert not outer.is_output(conv)
    assert [call.operation.name for call in outer.consumers(conv)] == ["inner"]
    assert outer.producer(outer.inputs["a"]) is None


def test_paths_of_layers() -> None:
    paths = {path for _, path in layers_in(read_graphs(_everything()))}
    assert paths == {"shared", "inner/add", "inner/c", "leaky", "sequential/d", "sequential/bn"}


@pytest.mark.parametrize(
    ("inner_training", "outer_training", "expected"),
    [(None, None, False), (None, True, True), (False, True, False), (True, None, True)],
)
def test_calls_in_training_mode(
    inner_training: bool | None, outer_training: bool | None, expected: bool
) -> None:
    inputs = keras.Input((3,))
    norm = L.BatchNormalization(name="bn")
    inner = keras.Model(inputs, norm(inputs, training=inner_training), name="inner")
    outer_inputs = keras.Input((3,))
    outer = keras.Model(outer_inputs, inner(outer_inputs, training=outer_training))
    graphs = read_graphs(outer)
    assert graphs[1].calls[0].trains is expected
    assert relative_error(outer, _rebuild(outer)) == 0


def test_trainable_flags() -> None:
    inner = keras.Sequential([keras.Input((3,)), L.Dense(3, name="d1"), L.Dense(3, name="d2")])
    inputs = keras.Input((3,))
    model = keras.Model(inputs, L.Dense(2, name="d3")(inner(inputs)))
    inner.trainable = False
    inner.get_layer("d2").trainable = True
    model.get_layer("d3").bias.trainable = False
    copy = _rebuild(model)
    flags = [layer.trainable for layer in model._flatten_layers()]
    assert [layer.trainable for layer in copy._flatten_layers()] == flags
    inner = copy.get_layer(inner.name)
    assert (inner.trainable, [layer.trainable for layer in inner.layers]) == (False, [False, True])
    assert copy.get_layer("d3").bias.trainable is False
    assert copy.get_layer("d3").kernel.trainable is True


def test_dtype_policies() -> None:
    inputs = keras.Input((3,), dtype="float16")
    x = L.Dense(3, dtype="mixed_float16")(inputs)
    model = keras.Model(inputs, L.BatchNormalization(dtype="float64")(x))
    model.dtype_policy = "mixed_bfloat16"
    copy = _rebuild(model)
    policies = [layer.dtype_policy for layer in model._flatten_layers()]
    assert [layer.dtype_policy for layer in copy._flatten_layers()] == policies
    assert copy.dtype_policy.name == "mixed_bfloat16"
    assert copy.inputs[0].dtype == "float16"


def test_inputs_keep_their_kind() -> None:
    inputs = keras.Input(batch_shape=(4, 3), sparse=True, name="sparse", dtype="float64")
    optional = keras.Input((3,), optional=True, name="optional")
    model = keras.Model([inputs, optional], L.Dense(2, dtype="float64")(inputs))
    copy = _rebuild(model)
    assert copy.inputs[0].sparse
    assert copy.inputs[0].shape == (4, 3)
    assert copy.inputs[0].dtype == "float64"
    assert copy.get_layer("optional").optional


def test_state_that_is_not_weights() -> None:
    normalization, dropout = L.Normalization(), L.Dropout(0.5, seed=3)
    model = keras.Sequential([keras.Input((3,)), normalization, dropout])
    data = np.random.default_rng(0).normal(3, 2, (20, 3)).astype("float32")
    normalization.adapt(data)
    copy = _rebuild(model)
    np.testing.assert_array_equal(copy(data), model(data))
    model(data, training=True)
    state = _rebuild(model).layers[1].seed_generator.state
    np.testing.assert_array_equal(state, dropout.seed_generator.state)


def test_operation_without_a_configuration() -> None:
    class Shift(keras.Operation):
        def __init__(self, by: Any) -> None:
            super().__init__()
            self.by = by

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x + self.by

    inputs = keras.Input((3,))
    model = keras.Model(inputs, Shift(tf.constant([1.0, 2.0, 3.0]))(L.Dense(3)(inputs)))
    assert relative_error(model, _rebuild(model)) == 0


class WithStep(keras.Model):
    """Made from inputs and outputs, as keras.Model is."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {}


class OfOneArgument(keras.Model):
    """Functional inside, but made from something else."""

    def __init__(self, units: int) -> None:
        inputs = keras.Input((3,))
        super().__init__(inputs, L.Dense(units)(inputs))


class Subclassed(keras.Model):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x


class Doubling(keras.Model):
    """Functional, but `call` does more than the graph says."""

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return 2 * super().call(inputs, training=training, mask=mask)


def test_keeps_a_class_that_is_made_from_inputs_and_outputs() -> None:
    inputs = keras.Input((3,))
    assert type(_rebuild(WithStep(inputs, L.Dense(2)(inputs)))) is WithStep
    model = OfOneArgument(2)
    copy = _rebuild(model)
    assert not isinstance(copy, OfOneArgument)
    assert relative_error(model, copy) == 0


def test_refuses_what_cannot_be_walked() -> None:
    with pytest.raises(TypeError, match=r"`model` must be a keras.Model. Received: Dense"):
        read_graphs(L.Dense(3))
    with pytest.raises(ValueError, match=r"functional or Sequential.*Received: Subclassed 'sub'"):
        read_graphs(Subclassed(name="sub"))
    inputs = keras.Input((3,))
    with pytest.raises(ValueError, match="Received: Doubling 'twice'"):
        read_graphs(Doubling(inputs, L.Dense(2)(inputs), name="twice"))


@pytest.mark.parametrize("layers", [[], [L.Dense(3)]])
def test_refuses_what_is_not_built(layers: list[keras.Layer]) -> None:
    with pytest.raises(ValueError, match=r"must be built.*Received: Sequential 'new', not built"):
        read_graphs(keras.Sequential(layers, name="new"))


def test_sequential_built_by_a_call() -> None:
    model = keras.Sequential([L.Dense(3), L.ReLU()])
    inputs = np.random.default_rng(0).normal(size=(4, 2)).astype("float32")
    model(inputs)
    assert relative_error(model, _rebuild(model), inputs) == 0


def test_names_a_layer_that_cannot_be_copied() -> None:
    class NoConfig(L.Layer):
        def __init__(self, table: Any, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.table = table

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x

    inputs = keras.Input((3,))
    model = keras.Model(inputs, NoConfig(np.ones(3), name="table")(inputs))
    with pytest.raises(ValueError, match="Received: layer 'table' of class NoConfig"):
        _rebuild(model)
