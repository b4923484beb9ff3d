"""How the choice between the kernel and the equations lies in a graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

# No public name gives it; who freezes graphs for other runtimes has it from here.
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from bnzoo.layers import BatchNormalization, kernel_or_equations

EPSILON = 1e-3


def training_step(layers: int) -> tf.types.experimental.ConcreteFunction:
    """A forward and a backward pass through as many layers, of different sizes."""
    stack = [BatchNormalization() for _ in range(layers)]

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for layer in stack:
                y = tf.pad(layer(y, training=True), [[0, 0], [0, 1], [0, 0], [0, 2]])
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, x)

    return step.get_concrete_function(tf.TensorSpec([4, 3, 5, 2]))


def choices(step: tf.types.experimental.ConcreteFunction) -> list[tf.Operation]:
    return [op for op in step.graph.get_operations() if op.type == "StatelessIf"]


def test_all_layers_of_a_network_share_the_branches() -> None:
    """A large network has no more functions to trace and to keep than a small one."""
    few, many = training_step(2), training_step(6)
    assert [len(choices(step)) for step in (few, many)] == [4, 12]
    for step in (few, many):
        for name in ("then_branch", "else_branch"):
            assert len({op.get_attr(name).name for op in choices(step)}) == 2


def test_a_network_that_cannot_be_frozen_does_not_break_the_others() -> None:
    """TensorFlow refuses it late, when it has taken away the functions that the graph has."""
    before = training_step(2)
    with pytest.raises(ValueError, match="incompatible with expected resource"):
        convert_variables_to_constants_v2(training_step(2))
    x = tf.constant(np.random.default_rng(1).normal(size=(4, 3, 5, 2)), tf.float32)
    for step in (before, training_step(2)):
        assert np.isfinite(step(x)).all()


def test_forward_mode_of_small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the equations; the kernel has no derivatives of this kind."""
    monkeypatch.setattr(kernel_or_equations, "KERNEL_MIN_VALUES", 1 << 30)
    rng = np.random.default_rng(2)
    x, tangent = (tf.constant(rng.normal(size=(4, 3, 5, 2)), tf.float32) for _ in range(2))
    layer = BatchNormalization()
    layer.build(x.shape)
    found = []
    for forward in (lambda x: layer(x, training=True), _written_out):
        with tf.autodiff.ForwardAccumulator(x, tangent) as accumulator:
            y = tf.function(forward)(x)
        found.append(accumulator.jvp(y))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def _written_out(x: tf.Tensor) -> tf.Tensor:
    mean = tf.reduce_mean(x, [0, 1, 2])
    return (x - mean) / tf.sqrt(tf.reduce_mean((x - mean) ** 2, [0, 1, 2]) + EPSILON)


def test_the_choice_is_a_part_of_the_graph() -> None:
    """As a call, each would cost 0.1 ms. The mark has no public name: a version may drop it."""
    marks = [op.get_attr("_lower_using_switch_merge") for op in choices(training_step(1))]
    assert marks == [True, True]


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("batch", [4, None])
def test_gradients_have_the_shapes_that_are_known(axis: int, batch: int | None) -> None:
    layer = BatchNormalization(axis=axis)
    layer.build((None, 3, 5, 2))

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        return tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])

    shapes = [g.shape for g in step.get_concrete_function(tf.TensorSpec([batch, 3, 5, 2])).outputs]
    channels = [3 if axis == 1 else 2]
    assert [shape.as_list() for shape in shapes] == [[batch, 3, 5, 2], channels, channels]


@pytest.mark.parametrize("compiled", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", [[6, 5, 5, 2], [None, None, None, 2]])
def test_xla_may_compile_one_pass_alone(
    compiled: tuple[bool, bool], sizes: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one way leaves of the forward pass is of no use to the other's gradient."""
    monkeypatch.setattr(kernel_or_equations, "KERNEL_MIN_VALUES", 0)
    rng = np.random.default_rng(3)
    x, weights = rng.normal(3, 2, (6, 5, 5, 2)), rng.normal(size=(6, 5, 5, 2))
    layer = BatchNormalization(epsilon=EPSILON)
    layer.build(sizes)

    @tf.function(input_signature=[tf.TensorSpec(sizes)])
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tf.xla.experimental.jit_scope(compiled[0]):
                y = layer(x, training=True)
            loss = tf.reduce_sum(y * tf.constant(weights, tf.float32))
        with tf.xla.experimental.jit_scope(compiled[1]):
            return tape.gradient(loss, x)

    inverse = 1 / np.sqrt(x.var((0, 1, 2)) + EPSILON)
    normalized = (x - x.mean((0, 1, 2))) * inverse
    # Section 3's, simplified; gamma is 1.
    means = weights.mean((0, 1, 2)) + normalized * (weights * normalized).mean((0, 1, 2))
    np.testing.assert_allclose(
        gradient(x.astype(np.float32)), inverse * (weights - means), atol=1e-6
    )


@pytest.mark.parametrize("jit_compile", [False, True])
def test_jacobians(jit_compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow takes the gradients of all outputs in one loop, or as one."""
    monkeypatch.setattr(kernel_or_equations, "KERNEL_MIN_VALUES", 0)
    x = np.random.default_rng(4).normal(size=(3, 2, 2, 2))
    layer = BatchNormalization(epsilon=EPSILON)
    layer.build((None, 2, 2, 2))

    def jacobian_of(forward: Function, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_mean(forward(x) ** 3, [1, 2])
        return tape.jacobian(y, x)

    found = tf.function(
        lambda x: jacobian_of(lambda x: layer(x, training=True), x),
        input_signature=[tf.TensorSpec([None, 2, 2, 2])],
        jit_compile=jit_compile,
    )(x.astype(np.float32))
    np.testing.assert_allclose(found, jacobian_of(_written_out, tf.constant(x)), atol=2e-6)


def test_tracing_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """TensorFlow warns of arguments whose names are none for a node."""
    with caplog.at_level("WARNING", "tensorflow"):
        training_step(1)
    assert not caplog.records


Function = Callable[[tf.Tensor], tf.Tensor]


def _eager(function: Function) -> Function:
    return function


def _xla(function: Function) -> Function:
    return tf.function(function, jit_compile=True)


# What the layer, its gradient, and the gradient of that are each a function of.
WRAPPED = [
    (_eager, _eager, tf.function),
    (_eager, _eager, _xla),
    (tf.function, _eager, _eager),
    (tf.function, _eager, tf.function),
    (tf.function, _eager, _xla),
    (_xla, _eager, _eager),
    (_eager, tf.function, _eager),
    (_eager, tf.function, tf.function),
    (_eager, _xla, _eager),
    (tf.function, tf.function, _xla),
]


@pytest.mark.parametrize("wrappers", WRAPPED, ids=lambda w: "-".join(f.__name__ for f in w))
def test_the_second_derivative_over_functions(wrappers: tuple[Callable[..., Function]]) -> None:
    """Each has a graph of its own, which cannot reach the tensors of the one before the last."""
    of_layer, of_gradient, of_second = wrappers
    rng = np.random.default_rng(5)
    x, weights = rng.normal(3, 2, (4, 5, 5, 2)), rng.normal(size=(4, 5, 5, 2))
    layer = BatchNormalization(epsilon=EPSILON)
    layer.build(x.shape)
    layer.gamma.assign([1.5, -0.5])

    def gradient_of(forward: Function) -> Function:
        def gradient(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(forward(x) * tf.constant(weights, x.dtype))
            return tape.gradient(loss, x)

        return gradient

    def second_of(gradient: Function) -> Function:
        def second(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(gradient(x) ** 3)
            return tape.gradient(loss, x)

        return second

    def written_out(x: tf.Tensor) -> tf.Tensor:
        return _written_out(x) * tf.constant([1.5, -0.5], x.dtype)

    forward = of_layer(lambda x: layer(x, training=True))
    got = of_second(second_of(of_gradient(gradient_of(forward))))(tf.constant(x, tf.float32))
    want = second_of(gradient_of(written_out))(tf.constant(x))
    # Float32 rounds by 6e-8; the sums over a hundred values add some of that.
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())
