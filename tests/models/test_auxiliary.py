"""Auxiliary heads: their sizes, their values, and that they are gone at inference."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from bnzoo.layers import BatchNormalization
from bnzoo.models import auxiliary_loss_weights, bn_inception, inception, without_auxiliary
from bnzoo.models.auxiliary import AUXILIARY_HEADS, auxiliary_head

from .numpy_inception import randomize, softmax
from .test_pooling import blocks

SMALL = {"input_shape": (80, 80, 3), "classes": 10, "stem": "small", "width_multiplier": 0.0625}


@pytest.mark.parametrize(("channels", "parameters"), [(512, 3_188_840), (528, 3_190_888)])
def test_parameters_of_googlenet_s_heads(channels, parameters):
    maps = keras.Input((14, 14, channels))
    head = auxiliary_head(blocks(), maps, 1, AUXILIARY_HEADS["googlenet"], 1000, "softmax")
    assert keras.Model(maps, head).count_params() == parameters


def head_oracle(w, maps, number, pooled, epsilon):
    """A head in inference mode, from the map of its module."""
    name = f"auxiliary_{number}"
    x = maps
    if pooled:
        starts = range(0, x.shape[1] - 4, 3)
        x = np.stack(
            [
                np.stack([x[:, r : r + 5, c : c + 5].mean(axis=(1, 2)) for c in starts], axis=1)
                for r in starts
            ],
            axis=1,
        )

    def unit(x, layer):
        x = x @ w[f"{layer}/kernel"].reshape(x.shape[-1], -1) + w.get(f"{layer}/bias", 0.0)
        if f"{layer}_bn/gamma" in w:
            bn = f"{layer}_bn"
            scale = w[f"{bn}/gamma"] / np.sqrt(w[f"{bn}/moving_variance"] + epsilon)
            x = (x - w[f"{bn}/moving_mean"]) * scale + w[f"{bn}/beta"]
        return np.maximum(x, 0.0)

    x = unit(x, f"{name}_conv")
    x = unit(x.reshape(len(x), -1), f"{name}_fc")
    return softmax(x @ w[f"{name}/kernel"] + w[f"{name}/bias"])


@pytest.mark.parametrize("form", AUXILIARY_HEADS)
def test_values_of_each_form(form):
    model = bn_inception(**SMALL, auxiliary=form)
    weights = randomize(model)
    heads = AUXILIARY_HEADS[form]
    modules = [f"inception_{module}" for module in heads.modules]
    spy = keras.Model(
        model.input, {**model.output, **{name: model.get_layer(name).output for name in modules}}
    )
    outputs = spy(np.random.default_rng(0).normal(size=(3, 80, 80, 3)).astype(np.float32))
    for number, module in enumerate(modules, start=1):
        maps = outputs[module].numpy().astype(np.float64)
        expected = head_oracle(weights, maps, number, heads.pooled, 1e-3)
        np.testing.assert_allclose(outputs[f"auxiliary_{number}"], expected, atol=1e-5)


def test_where_the_published_heads_are():
    assert {name: heads.modules for name, heads in AUXILIARY_HEADS.items()} == {
        "googlenet": ("4a", "4d"),
        "caffe": ("3c", "4e"),
        "tensorpack": ("3c", "4e"),
    }
    model = bn_inception(**SMALL, auxiliary="caffe")
    assert model.get_layer("auxiliary_1_pool").input is model.get_layer("inception_3c").output
    assert model.get_layer("auxiliary_2_pool").input is model.get_layer("inception_4e").output
    assert isinstance(model.get_layer("auxiliary_1_fc_bn"), BatchNormalization)
    assert not model.get_layer("auxiliary_1_fc").use_bias
    model = inception(**SMALL, auxiliary="googlenet")
    assert model.get_layer("auxiliary_1_dropout").rate == 0.7
    assert model.get_layer("auxiliary_2_pool").input is model.get_layer("inception_4d").output


def test_training_uses_them_and_inference_does_not():
    model = bn_inception(**SMALL, auxiliary="caffe")
    plain = without_auxiliary(model)
    assert plain.name == model.name
    assert not any("auxiliary" in layer.name for layer in plain.layers)
    bare = bn_inception(**SMALL)
    assert [w.path.split("/", 1)[-1] for w in plain.weights] == [
        w.path.split("/", 1)[-1] for w in bare.weights
    ]
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(4, 80, 80, 3)), rng.integers(0, 10, 4)
    model.compile(
        keras.optimizers.SGD(0.1),
        dict.fromkeys(model.output, "sparse_categorical_crossentropy"),
        loss_weights=auxiliary_loss_weights(model),
        run_eagerly=True,
    )
    before = [weight.numpy() for weight in model.trainable_weights]
    losses = model.train_on_batch(x, dict.fromkeys(model.output, labels), return_dict=True)
    weighted = losses["predictions_loss"] + 0.3 * (
        losses["auxiliary_1_loss"] + losses["auxiliary_2_loss"]
    )
    assert losses["loss"] == pytest.approx(weighted, rel=1e-5)
    for weight, old in zip(model.trainable_weights, before, strict=True):
        assert not np.array_equal(weight.numpy(), old), weight.path
    np.testing.assert_array_equal(
        plain(x.astype(np.float32)), model(x.astype(np.float32))["predictions"]
    )


def test_map_too_small_for_the_pool():
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
        bn_inception(input_shape=(32, 32, 3), stem="small", auxiliary="caffe")
    assert str(error.value) == (
        "`auxiliary` heads need an `input_shape` that gives them maps of a known size of at least "
        "5x5. Received: a map of 4x4"
    )


@pytest.mark.parametrize("function", [without_auxiliary, auxiliary_loss_weights])
def test_a_model_without_heads(function):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
        function(bn_inception(include_top=False, width_multiplier=0.05))
    assert str(error.value) == (
        "`model` must have been built with `auxiliary` heads, whose outputs are a dict. "
        "Received: model='bn_inception', which has none"
    )
