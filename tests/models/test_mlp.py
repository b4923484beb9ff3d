from __future__ import annotations

import keras
import numpy as np
import pytest

from bnzoo.layers import BatchNormalization
from bnzoo.models import mnist_mlp

from .numpy_inception import randomize, softmax


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("batch_norm", [True, False])
def test_values(batch_norm):
    model = mnist_mlp(batch_norm=batch_norm, epsilon=1e-2)
    w = randomize(model)
    x = np.random.default_rng(0).integers(0, 2, (5, 28, 28, 1)).astype(np.float32)
    h = x.reshape(5, 784).astype(np.float64)
    for layer in ("fc1", "fc2", "fc3"):
        h = h @ w[f"{layer}/kernel"]
        if batch_norm:
            bn = f"{layer}_bn"
            h = (h - w[f"{bn}/moving_mean"]) / np.sqrt(w[f"{bn}/moving_variance"] + 1e-2)
            h = h * w[f"{bn}/gamma"] + w[f"{bn}/beta"]
        else:
            h = h + w[f"{layer}/bias"]
        h = sigmoid(h)
    expected = softmax(h @ w["predictions/kernel"] + w["predictions/bias"])
    np.testing.assert_allclose(model(x), expected, atol=1e-6)


def test_no_bias_under_bn():
    model = mnist_mlp()
    assert [layer.use_bias for layer in model.layers if hasattr(layer, "use_bias")] == [
        False,
        False,
        False,
        True,
    ]
    # 784 x 100 + 100 x 100 + 100 x 100 + 1010, and gamma, beta, mean, variance of 300 units.
    assert model.count_params() == 98_400 + 1_010 + 4 * 300
    assert mnist_mlp(batch_norm=False).count_params() == 98_400 + 1_010 + 300


def test_initial_weights():
    model = mnist_mlp(initial_stddev=0.02)
    for name in ("fc1", "fc2", "fc3"):
        kernel = model.get_layer(name).kernel.numpy()
        assert np.std(kernel) == pytest.approx(0.02, rel=0.05)
        # A Gaussian has a 400th of its values beyond 3 standard deviations; a truncated one none.
        assert np.abs(kernel).max() > 0.06


def test_other_inputs_and_heads():
    model = mnist_mlp(input_shape=(8, 8, 3), classes=4, classifier_activation=None, momentum=0.9)
    assert model.output.shape == (None, 4)
    assert model.get_layer("predictions").activation is keras.activations.linear
    momenta = {layer.momentum for layer in model.layers if isinstance(layer, BatchNormalization)}
    assert momenta == {0.9}
    features = mnist_mlp(include_top=False, input_tensor=keras.Input((28, 28, 1)))
    assert features.output.shape == (None, 100)


def test_weights_from_a_file(tmp_path):
    model = mnist_mlp()
    randomize(model)
    model.save_weights(tmp_path / "mlp.weights.h5")
    loaded = mnist_mlp(weights=tmp_path / "mlp.weights.h5")
    np.testing.assert_array_equal(
        loaded.get_layer("fc2_bn").moving_variance, model.get_layer("fc2_bn").moving_variance
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"initial_stddev": 0.0},
            "`initial_stddev` must be a finite number > 0. Received: initial_stddev=0.0",
        ),
        (
            {"input_shape": (None, 28, 1)},
            "`input_shape` must be known in full for fully connected layers. "
            "Received: input_shape=(None, 28, 1)",
        ),
        (
            {"batch_norm": "no"},
            "`batch_norm` must be True or False. Received: batch_norm='no'",
        ),
        ({"classes": -1}, "`classes` must be a whole number >= 1. Received: classes=-1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
        mnist_mlp(**arguments)
    assert str(error.value) == message
