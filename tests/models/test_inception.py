"""The whole networks at 224x224: counts, names, shapes, and what the arguments do."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo import pretrained
from bnzoo.layers import BatchNormalization
from bnzoo.models import bn_inception, feature_extractor, inception

from .networks import built, counts, values
from .numpy_inception import Inception, randomize

SMALL = {"input_shape": (32, 32, 3), "classes": 10, "stem": "small", "width_multiplier": 0.125}


@pytest.fixture(scope="module")
def paper():
    return built("bn_inception", stem="separable", pool_projection=96, conv_bias=False)


@pytest.mark.parametrize(
    ("arguments", "trainable", "moving"),
    [
        (("separable", 96, False), 11_188_288, 19_904),
        (("separable", 128, False), 11_278_528, 20_032),
        (("conv", 96, False), 11_194_984, 19_904),
        (("conv", 128, False), 11_285_224, 20_032),
        (("conv", 96, True), 11_204_936, 19_904),
    ],
)
def test_parameter_counts(arguments, trainable, moving):
    stem, projection, bias = arguments
    model = built("bn_inception", stem=stem, pool_projection=projection, conv_bias=bias)
    assert counts(model) == (trainable, moving)


def test_the_defaults_are_the_paper_s(paper):
    layers = [layer.get_config() for layer in built("bn_inception").layers]
    assert layers == [layer.get_config() for layer in paper.layers]


@pytest.mark.parametrize(
    ("form", "variables", "count", "trainable"),
    [
        # The graph that tf_slim builds: 277 variables, 11,199,137 values.
        ("slim", 277, 11_199_137, 11_179_361),
        # torch: 69 convolutions with bias, 69 BN, one linear layer; imgclsmob prints 11,295,240.
        ("torch", 69 * 2 + 69 * 4 + 2, 11_315_272, 11_295_240),
        # LIM's network, whose ONNX file stores 11,234,794 values: these, BN's own scale and bias
        # (2 x 9,952) beside Caffe's Scale layer, and a constant of 2.
        ("onnx", 69 + 69 * 4 + 2, 11_234_794 - 2 * 9_952 - 2, 11_194_984),
        ("mxnet", 69 * 2 + 69 * 4 + 2, 11_315_272, 11_295_240),
    ],
)
def test_counts_of_published_forms(form, variables, count, trainable):
    model = built(form)
    assert len(model.weights) == variables
    assert values(model.weights) == count
    assert values(model.trainable_variables) == trainable


def test_inception_counts():
    # The weights of the convolutions with BN folded into biases: 10,143,384 + 9,952 + 1,025,000.
    model = built("inception", stem="separable", pool_projection=96)
    assert model.count_params() == 11_178_336
    # OMZ prints 11.185 M for the folded network with the full stem.
    assert built("inception", stem="conv", pool_projection=96).count_params() == 11_185_032


def test_output_sizes(paper):
    printed = {
        "conv1_7x7_s2": (112, 112, 64),
        "pool1_3x3_s2": (56, 56, 64),
        "conv2_3x3": (56, 56, 192),
        "pool2_3x3_s2": (28, 28, 192),
        "inception_3a": (28, 28, 256),
        "inception_3b": (28, 28, 320),
        "inception_3c": (14, 14, 576),  # printed 28x28, the size before its stride of 2
        "inception_4a": (14, 14, 576),
        "inception_4b": (14, 14, 576),
        "inception_4c": (14, 14, 576),
        "inception_4d": (14, 14, 576),
        "inception_4e": (7, 7, 1024),  # printed 14x14
        "inception_5a": (7, 7, 1024),
        "inception_5b": (7, 7, 1024),
        "avg_pool": (1024,),
    }
    for name, shape in printed.items():
        assert paper.get_layer(name).output.shape == (None, *shape)


def test_every_layer_has_a_name_of_its_kind(paper):
    convs = [
        layer.name
        for layer in paper.layers
        if isinstance(layer, (keras.layers.Conv2D, keras.layers.SeparableConv2D))
    ]
    assert len(convs) == 69
    names = [layer.name for layer in paper.layers]
    assert all(f"{conv}_bn" in names and f"{conv}_relu" in names for conv in convs)
    others = set(names) - {f"{conv}{suffix}" for conv in convs for suffix in ("", "_bn", "_relu")}
    modules = ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b")
    assert others == {
        "image",
        "pool1_3x3_s2",
        "pool2_3x3_s2",
        *(f"inception_{module}" for module in modules),
        *(f"inception_{module}_pool" for module in modules),
        "avg_pool",
        "predictions",
    }
    assert "inception_3a_double_3x3_1" in convs
    assert "inception_3c_1x1" not in convs


def test_dropout_and_lrn_are_where_googlenet_has_them():
    model = inception(**SMALL)
    assert model.get_layer("dropout").rate == 0.4
    assert [layer.name for layer in model.layers if "norm" in layer.name] == [
        "pool1_norm1",
        "conv2_norm2",
    ]
    assert model.get_layer("pool1_norm1").input is model.get_layer("conv1_3x3_s2_relu").output
    assert model.get_layer("conv2_norm2").input is model.get_layer("conv2_3x3_relu").output
    assert not any(isinstance(layer, BatchNormalization) for layer in model.layers)
    full = inception(input_shape=(64, 64, 3), width_multiplier=0.125)
    assert full.get_layer("pool1_norm1").input is full.get_layer("pool1_3x3_s2").output
    assert full.get_layer("pool2_3x3_s2").input is full.get_layer("conv2_norm2").output


def test_inception_values():
    model = inception(
        input_shape=(64, 64, 3), width_multiplier=0.125, classes=11, classifier_activation=None
    )

    class WithNorms(Inception):
        """GoogLeNet's local response normalization: x / (1 + 2e-5 sum of 5 squares) ^ 0.75."""

        def unit(self, x, name, stride=1):
            if name == "conv2_3x3_reduce":
                x = self.norm(x)
            x = super().unit(x, name, stride)
            return self.norm(x) if name == "conv2_3x3" else x

        def norm(self, x):
            squares = np.pad(np.square(x), ((0, 0),) * 3 + ((2, 2),))
            energy = sum(squares[..., i : i + x.shape[-1]] for i in range(5))
            return x / (1 + 2e-5 * energy) ** 0.75

    oracle = WithNorms(randomize(model), 1e-3, False, "same", "same", False)
    # In 0..255, so that the squares count.
    x = np.random.default_rng(1).uniform(0.0, 255.0, (2, 64, 64, 3)).astype(np.float32)
    logits = oracle(x.astype(np.float64))
    np.testing.assert_allclose(model(x), logits, atol=2e-5 * np.abs(logits).max())


@pytest.mark.parametrize(("batch_norm", "shape"), [("channel", (40,)), ("activation", (4, 4, 40))])
def test_per_activation_bn_is_in_the_last_module(batch_norm, shape):
    model = bn_inception(**SMALL, batch_norm=batch_norm)
    normed = [layer for layer in model.layers if isinstance(layer, BatchNormalization)]
    assert model.get_layer("inception_5b_3x3_bn").gamma.shape == shape
    per_activation = [layer.name for layer in normed if len(layer.gamma.shape) == 3]
    assert len(per_activation) == (7 if batch_norm == "activation" else 0)
    assert all(name.startswith("inception_5b_") for name in per_activation)


def test_bn_arguments_reach_every_bn():
    model = bn_inception(
        **SMALL, epsilon=1e-5, momentum=0.9, synchronized=True, batch_norm_scale=False
    )
    for layer in model.layers:
        if isinstance(layer, BatchNormalization):
            assert (layer.epsilon, layer.momentum) == (1e-5, 0.9)
            assert (layer.synchronized, layer.scale) == (True, False)


@pytest.mark.parametrize("build", [bn_inception, inception])
def test_one_step_moves_every_weight(build):
    model = build(**SMALL, dropout=0.0)
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(8, 32, 32, 3)), rng.integers(0, 10, 8)
    # Eagerly, since tracing and optimizing the graph takes longer than the step.
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", run_eagerly=True)
    before = [weight.numpy() for weight in model.weights]
    model.train_on_batch(x, labels)
    still = [
        weight.path
        for weight, old in zip(model.weights, before, strict=True)
        if np.array_equal(weight.numpy(), old)
    ]
    assert still == []


def test_initial_weights_are_he_s_times_the_scale():
    for scale in (1.0, 2.0):
        model = bn_inception(stem="conv", width_multiplier=0.25, weight_scale=scale)
        for name in ("conv1_7x7_s2", "conv2_3x3", "inception_4e_double_3x3_2"):
            kernel = model.get_layer(name).kernel.numpy()
            he = np.sqrt(2.0 / np.prod(kernel.shape[:3]))
            # 4 standard errors of the sample standard deviation of a Gaussian.
            assert np.std(kernel) / (scale * he) == pytest.approx(
                1.0, abs=4 / np.sqrt(2 * kernel.size)
            )
        top = model.get_layer("predictions").kernel.numpy()
        assert np.std(top) == pytest.approx(1 / 16, rel=0.01)  # sqrt(1 / 256), never scaled


def test_separable_stem_keeps_the_variance():
    model = bn_inception(include_top=False)
    stem = model.get_layer("conv1_7x7_s2")
    assert np.std(stem.depthwise_kernel) == pytest.approx(1 / 7, rel=0.1)  # sqrt(1 / 49)
    assert np.std(stem.pointwise_kernel) == pytest.approx(np.sqrt(2 / 24), rel=0.1)


def test_without_the_top():
    maps = bn_inception(include_top=False, width_multiplier=0.125)
    assert maps.output.shape == (None, None, None, 128)
    x = np.random.default_rng(0).normal(size=(2, 40, 72, 3)).astype(np.float32)
    y = maps(x).numpy()
    assert y.shape == (2, 2, 3, 128)
    for pooling, reduce in (("avg", np.mean), ("max", np.max)):
        pooled = bn_inception(include_top=False, width_multiplier=0.125, pooling=pooling)
        pooled.set_weights(maps.get_weights())
        np.testing.assert_allclose(pooled(x), reduce(y, axis=(1, 2)), rtol=1e-5, atol=1e-6)


def test_input_tensor_with_layers_ahead_of_it():
    image = keras.Input((32, 32, 3))
    model = bn_inception(
        input_tensor=keras.layers.Rescaling(1 / 255.0)(image),
        classes=10,
        stem="small",
        width_multiplier=0.125,
    )
    plain = bn_inception(**SMALL)
    plain.set_weights(model.get_weights())
    x = np.random.default_rng(0).uniform(0, 255, (2, 32, 32, 3)).astype(np.float32)
    assert model.input is image
    np.testing.assert_allclose(model(x), plain(x / 255.0), rtol=1e-5)


@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_weights_from_a_file(tmp_path, suffix):
    model = bn_inception(**SMALL)
    randomize(model)
    path = tmp_path / f"saved{suffix}"
    model.save(path) if suffix == ".keras" else model.save_weights(path)
    loaded = bn_inception(**SMALL, weights=path)
    for ours, theirs in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match=r"`weights` must be a file of this network. Received: w"):
        bn_inception(**{**SMALL, "classes": 11}, weights=path)


def test_channels_first_computes_the_same():
    arguments = {"classes": 10, "width_multiplier": 0.125, "padding": "symmetric"}
    last = bn_inception(input_shape=(64, 64, 3), **arguments)
    first = bn_inception(input_shape=(3, 64, 64), data_format="channels_first", **arguments)
    randomize(last)
    first.set_weights(last.get_weights())
    x = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32)
    # Up to the first module of stride 2, which has every kind of layer. TensorFlow's CPU kernels
    # know channels last only; XLA's know both.
    endpoint = ["inception_3c"]
    compiled = tf.function(feature_extractor(first, endpoint), jit_compile=True)
    got = compiled(x.transpose(0, 3, 1, 2))["inception_3c"].numpy()
    expected = feature_extractor(last, endpoint)(x)["inception_3c"].numpy()
    np.testing.assert_allclose(got.transpose(0, 2, 3, 1), expected, atol=1e-5 * expected.max())
    assert first.get_layer("inception_5b").output.shape == (None, 128, 2, 2)


def test_mixed_precision_ends_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = bn_inception(**SMALL)
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.get_layer("inception_5b").compute_dtype == "bfloat16"
    probabilities = model(np.random.default_rng(0).normal(size=(2, 32, 32, 3)))
    assert probabilities.dtype == "float32"
    # In bfloat16 the ten would be off by up to 2^-8 each.
    np.testing.assert_allclose(np.sum(probabilities, axis=-1), 1.0, atol=1e-6)


def test_weights_to_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(pretrained, "fetch", lambda source: f"the file of {source}")
    monkeypatch.setattr(
        pretrained, "load_weights", lambda model, path, source: asked.append((model, path, source))
    )
    model = bn_inception(
        input_shape=(32, 32, 3), stem="small", width_multiplier=0.05, weights="slim"
    )
    assert asked == [(model, "the file of slim", "slim")]
