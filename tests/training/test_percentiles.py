"""The percentiles of what layers get against NumPy, and that looking changes nothing."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from bnzoo import models
from bnzoo.layers import BatchNormalization
from training import percentiles
from training.command_line import BadFlags
from training.percentiles import Percentiles, choose


def network(normalization: type[keras.layers.Layer] = BatchNormalization) -> keras.Model:
    """Two hidden layers, with figures of all kinds in them."""
    image = keras.Input((4, 4, 2))
    x = keras.layers.Flatten()(image)
    for number in (1, 2):
        x = keras.layers.Dense(7, use_bias=False, name=f"fc{number}")(x)
        x = normalization(epsilon=0.01, name=f"fc{number}_bn")(x)
        x = keras.layers.Activation("sigmoid", name=f"fc{number}_sigmoid")(x)
        x = keras.layers.Dropout(0.5)(x)
    model = keras.Model(image, keras.layers.Dense(3, name="top")(x))
    random = np.random.default_rng(6)
    for variable in model.variables:
        if variable.dtype == "float32":
            variable.assign(random.normal(1.0, 0.5, variable.shape))
    return model


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("normalization", [BatchNormalization, keras.layers.BatchNormalization])
def test_percentiles_against_numpy(normalization: type[keras.layers.Layer]) -> None:
    model = network(normalization)
    images = np.random.default_rng(0).normal(size=(60, 4, 4, 2)).astype(np.float32)
    chosen = choose(model, ["all", "fc2_bn:3", "fc2_sigmoid"])
    measured = Percentiles(model, chosen, images)
    random = np.random.default_rng(1)
    for _ in range(2):  # The weights are those of now.
        for variable in model.trainable_variables:
            variable.assign(random.normal(0.5, 0.5, variable.shape))
        before = [variable.numpy() for variable in model.variables]
        found = measured.measure()
        x, values = np.float64(images.reshape(60, -1)), {}
        for number in (1, 2):
            layer = model.get_layer(f"fc{number}_bn")
            x = x @ np.float64(model.get_layer(f"fc{number}").kernel.numpy())
            values[f"fc{number}_bn/input"] = x
            x = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 0.01)
            x = layer.gamma.numpy() * x + layer.beta.numpy()
            values[f"fc{number}_bn/output"] = values["fc2_sigmoid/input"] = x
            x = sigmoid(x)
        for side in ("input", "output"):
            values[f"fc2_bn:3/{side}"] = values[f"fc2_bn/{side}"][:, 3]
        expected = {
            f"bn_percentiles/{name}_{percent}": np.percentile(one, percent)
            for name, one in values.items()
            for percent in (15, 50, 85)
        }
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        for variable, old in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), old)


def test_last_is_the_last_normalization() -> None:
    assert [one.layer for one in choose(network(), ["last"])] == ["fc2_bn"]
    assert [one.layer for one in choose(network(), ["all"])] == ["fc1_bn", "fc2_bn"]
    inception = models.bn_inception(input_shape=(32, 32, 3), stem="small", width_multiplier=0.1)
    (last,) = choose(inception, ["last"])
    assert last.layer.startswith("inception_5b_")
    # Figure 1(b): the inputs of the sigmoids of a network without BN.
    plain = models.mnist_mlp(batch_norm=False)
    (chosen,) = choose(plain, ["fc3_sigmoid:0"])
    assert (chosen.layer, chosen.channel, chosen.normalizes) == ("fc3_sigmoid", 0, False)
    assert list(Percentiles(plain, [chosen], np.zeros((9, 28, 28, 1), np.float32)).measure()) == [
        f"bn_percentiles/fc3_sigmoid:0/input_{percent}" for percent in (15, 50, 85)
    ]


def test_a_sample_of_many_values_meets_all_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(percentiles, "SAMPLE", 1000)
    # Channel c has the level c: a stride of a multiple of 4 would see one level alone.
    values = np.broadcast_to(np.arange(4.0, dtype=np.float32), (10, 20, 20, 4))
    sample = percentiles._sample(values, None).numpy()
    assert 900 <= len(sample) <= 1000
    assert np.bincount(sample.astype(int)) == pytest.approx([len(sample) / 4] * 4, abs=1)


def test_mixed_precision() -> None:
    model = models.mnist_mlp(classes=3)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        mixed = models.mnist_mlp(classes=3)
    finally:
        keras.config.set_dtype_policy("float32")
    mixed.set_weights(model.get_weights())
    images = np.random.default_rng(0).normal(size=(30, 28, 28, 1)).astype(np.float32)
    one, two = (
        Percentiles(network, choose(network, ["last"]), images).measure()
        for network in (model, mixed)
    )
    for name in one:
        # bfloat16 has 8 bits.
        assert two[name] == pytest.approx(one[name], rel=2**-5, abs=2**-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fc3_bn", "functional.* has no layer of that name. Did you mean fc2_bn?"),
        ("fc1_bn:7", "layer fc1_bn of .* has 7 channels, from 0 on"),
        ("sum", "layer sum of .* has not one input"),
    ],
)
def test_a_layer_that_is_not_there_is_refused(name: str, message: str) -> None:
    model = network()
    x = keras.layers.Add(name="sum")([model.output, model.output])
    with pytest.raises(BadFlags, match=f"^--bn_percentiles={name}: {message}"):
        choose(keras.Model(model.input, x), [name])


def test_a_network_without_normalization_has_no_last_one() -> None:
    with pytest.raises(BadFlags, match="=last: mnist_mlp has no BN layers; other layers can be n"):
        choose(models.mnist_mlp(batch_norm=False), ["last"])
