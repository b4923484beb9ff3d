"""The learning rate, momentum, and which variables L2 applies to."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import BatchNormalization, PReLU
from training.optimizers import (
    build_optimizer,
    clipped,
    kernels,
    l2_loss,
    learning_rate_schedule,
)
from training.settings import resolve

from .helpers import given, settings


@pytest.mark.parametrize("recipe", ["inception", "bn_x5", "bn_x30", "mnist_bn"])
def test_schedule_is_the_closed_form(recipe: str) -> None:
    chosen = resolve(given(f"--recipe={recipe}"))
    schedule = learning_rate_schedule(chosen, examples=50_000)
    rates = {"inception": 0.0015, "bn_x5": 0.0075, "bn_x30": 0.045, "mnist_bn": 0.1}
    # 4% less every 8 epochs (Szegedy et al. 2014), six times faster with BN, none for MNIST.
    factor = {"inception": 0.96, "mnist_bn": 1.0}.get(recipe, 0.96**6)
    for step in (0, 1, 1000, 12_500, 100_000):
        epochs = step * chosen.batch_size / 50_000
        expected = rates[recipe] * factor ** (epochs / 8)
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-5)


def test_staircase_is_constant_between_the_ends_of_decay_epochs() -> None:
    chosen = settings("--staircase", "--learning_rate=0.1", "--decay_rate=0.5", "--decay_epochs=2")
    schedule = learning_rate_schedule(chosen, examples=10 * chosen.batch_size)
    for step, expected in ((0, 0.1), (19, 0.1), (20, 0.05), (39, 0.05), (40, 0.025)):
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-6)


def test_steps_fall_at_the_boundaries() -> None:
    """He et al. 2015, Section 3: the rate is divided by 10 at given points."""
    chosen = settings(
        "--learning_rate_schedule=steps",
        "--learning_rate=0.01",
        "--decay_rate=0.1",
        "--boundaries=2,2.25,5",
    )
    # An epoch of 9.5 steps: the first boundary is at step 19, the second at 21.4.
    examples = 19 * chosen.batch_size // 2
    schedule = learning_rate_schedule(chosen, examples)
    optimizer = build_optimizer(chosen, examples)
    for step, expected in (
        (0, 1e-2),
        (18, 1e-2),
        (19, 1e-3),
        (21, 1e-3),
        (22, 1e-4),
        (47, 1e-4),
        (48, 1e-5),
        (10**8, 1e-5),
    ):
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-6)
        optimizer.iterations.assign(step)
        np.testing.assert_allclose(optimizer.learning_rate.numpy(), expected, rtol=1e-6)


def test_gradients_are_clipped_by_their_common_norm() -> None:
    random = np.random.default_rng(4)
    gradients = [random.normal(size=shape) for shape in ((3, 4), (5,))]
    norm = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients))
    tensors = [tf.constant(gradient, tf.float32) for gradient in gradients]
    for limit in (0.5 * norm, 2 * norm):
        found = clipped(tensors, tf.constant(norm, tf.float32), limit)
        for one, gradient in zip(found, gradients, strict=True):
            np.testing.assert_allclose(one, gradient * min(1, limit / norm), rtol=1e-6)
    assert all(
        one is tensor
        for one, tensor in zip(clipped(tensors, tf.constant(norm), None), tensors, strict=True)
    )
    # No gradient: no division by 0.
    np.testing.assert_array_equal(clipped([tf.zeros(3)], tf.constant(0.0), 1.0)[0], np.zeros(3))
    # What overflowed under a scale of the loss must be seen by who lowers it.
    infinite = clipped([tf.constant([np.inf, 1.0])], tf.constant(np.inf), 1.0)[0]
    np.testing.assert_array_equal(infinite, [np.inf, 1.0])


def test_momentum_against_numpy() -> None:
    chosen = settings(
        "--momentum=0.9", "--learning_rate=0.1", "--decay_rate=0.5", "--decay_epochs=2"
    )
    optimizer = build_optimizer(chosen, examples=chosen.batch_size)  # One step is one epoch.
    variable = keras.Variable(np.array([1.0, -2.0], np.float32))
    optimizer.build([variable])
    weights, velocity = np.array([1.0, -2.0]), np.zeros(2)
    for step, gradient in enumerate(np.random.default_rng(0).normal(size=(6, 2))):
        optimizer.apply([tf.constant(gradient, tf.float32)], [variable])
        velocity = 0.9 * velocity - 0.1 * 0.5 ** (step / 2) * gradient
        weights = weights + velocity
        np.testing.assert_allclose(variable.numpy(), weights, rtol=1e-5)


def test_only_float16_needs_a_scale_of_the_loss() -> None:
    kinds = [
        type(build_optimizer(settings(f"--precision={precision}"), 100)).__name__
        for precision in ("float32", "mixed_bfloat16", "mixed_float16")
    ]
    assert kinds == ["SGD", "SGD", "LossScaleOptimizer"]


def every_kind_of_layer() -> keras.Model:
    inner = keras.Sequential(
        [
            keras.layers.Input((4, 4, 6)),
            # Names that mislead: what decays is told by the attribute alone.
            keras.layers.Dense(5, name="gamma"),
            BatchNormalization(name="kernel"),
        ],
        name="inner",
    )
    image = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, strides=2, padding="same")(image)
    x = keras.layers.BatchNormalization()(x)
    x = PReLU()(x)
    x = keras.layers.SeparableConv2D(6, 3, padding="same", depth_multiplier=2)(x)
    x = keras.layers.DepthwiseConv2D(3, padding="same")(x)
    x = inner(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    shared = keras.layers.Dense(5)
    x = shared(shared(x))
    frozen = keras.layers.Dense(5, trainable=False)
    return keras.Model(image, keras.layers.Dense(2, activation="softmax")(frozen(x)))


def test_kernels_are_chosen_by_identity() -> None:
    model = every_kind_of_layer()
    # (3,3,3,4) conv; depthwise (3,3,4,2) and pointwise (1,1,8,6) of the separable; depthwise
    # (3,3,6,1); (6,5) inside; (5,5) once though called twice; (5,2). Not the frozen (5,5).
    assert sorted(tuple(variable.shape) for variable in kernels(model)) == sorted(
        [(3, 3, 3, 4), (3, 3, 4, 2), (1, 1, 8, 6), (3, 3, 6, 1), (6, 5), (5, 5), (5, 2)]
    )


def test_only_kernels_decay_also_after_save_and_load(tmp_path: Path) -> None:
    """Case 49: a list of excluded names is lost with the model's configuration."""
    model = every_kind_of_layer()
    random = np.random.default_rng(3)
    for variable in model.trainable_variables:
        variable.assign(random.uniform(0.5, 1.5, variable.shape))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        chosen = {id(variable) for variable in kernels(one)}
        with tf.GradientTape() as tape:
            loss = l2_loss(kernels(one), 0.25)
        expected = 0.125 * sum(np.sum(np.float64(v.numpy()) ** 2) for v in kernels(one))
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        gradients = tape.gradient(loss, one.trainable_variables)
        for variable, gradient in zip(one.trainable_variables, gradients, strict=True):
            if id(variable) in chosen:
                np.testing.assert_allclose(gradient, 0.25 * variable.numpy(), rtol=1e-6)
            else:
                assert gradient is None
                assert variable.path.split("/")[-1] in ("bias", "gamma", "beta", "alpha")
        assert len(chosen) == 7


def test_no_l2_without_weight_or_kernels() -> None:
    assert float(l2_loss(kernels(every_kind_of_layer()), 0.0)) == 0.0
    assert float(l2_loss([], 0.1)) == 0.0
