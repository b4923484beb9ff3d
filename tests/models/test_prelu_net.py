"""The networks of He et al.: counts of the paper, values against NumPy, initial weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo import models
from tests.models import numpy_prelu_net

SMALL = {"input_shape": (64, 48, 3), "classes": 7, "width_multiplier": 0.0625}
FUNCTIONS = [
    models.prelu_net_14,
    models.prelu_net_30,
    models.prelu_net_a,
    models.prelu_net_b,
    models.prelu_net_c,
]
EACH = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


def _images(*shape: int) -> np.ndarray:
    return np.random.default_rng(14).normal(0.2, 1.0, shape).astype("float32")


def _unallocated(function: Callable[..., keras.Model], **arguments) -> keras.Model:
    """The model with the shapes of its variables but without their values: C takes 1.3 GB."""
    with keras.StatelessScope(initialize_variables=False):
        return function(**arguments)


def _slopes(model: keras.Model) -> int:
    layers = [layer for layer in model.layers if layer.name.endswith("_prelu")]
    return sum(layer.count_params() for layer in layers)


@pytest.mark.parametrize(
    ("function", "layers", "parameters", "slopes", "conv_multiply_adds"),
    [
        # Parameters of convolutions and dense layers, slopes, layers with weights and, for A, B and
        # C, the multiply-adds of the convolutions: Table 3 has 1.90, 2.32 and 5.30e10.
        (models.prelu_net_14, 14, 74_993_896, 10_304, None),
        # Sixteen more convolutions of 2 * 2 * 256 * 256 + 256 parameters and 256 slopes.
        (models.prelu_net_30, 30, 74_993_896 + 16 * 262_400, 10_304 + 16 * 256, None),
        (models.prelu_net_a, 19, 178_017_384, 14_688, 1.891e10),
        (models.prelu_net_b, 22, 183_327_080, 15_968, 2.307e10),
        (models.prelu_net_c, 22, 330_603_368, 20_576, 5.321e10),
    ],
)
def test_counts_of_the_paper(
    function: Callable[..., keras.Model],
    layers: int,
    parameters: int,
    slopes: int,
    conv_multiply_adds: float | None,
) -> None:
    model = _unallocated(function)
    assert _slopes(model) == slopes
    assert model.count_params() - slopes == parameters
    counts = models.multiply_adds(model)
    assert len(counts) == layers
    if conv_multiply_adds is not None:
        convolutions = sum(count for name, count in counts.items() if name.startswith("conv"))
        assert convolutions == pytest.approx(conv_multiply_adds, rel=5e-4)


def test_maps_of_the_paper() -> None:
    """36x36 and 18x18 in the small network; 112, 56, 28 and 14 in Table 3."""
    small = _unallocated(models.prelu_net_14)
    sizes = {name: small.get_layer(name).output.shape[1:] for name in ("conv2_4", "conv3_6", "spp")}
    assert sizes == {"conv2_4": (36, 36, 128), "conv3_6": (18, 18, 256), "spp": (50 * 256,)}
    large = _unallocated(models.prelu_net_a)
    sizes = {name: large.get_layer(name).output.shape[1:] for name in ("conv1", "pool1", "spp")}
    assert sizes == {"conv1": (112, 112, 96), "pool1": (56, 56, 96), "spp": (63 * 512,)}
    assert large.get_layer("conv3_5").output.shape[1:] == (28, 28, 512)
    assert large.get_layer("conv4_5").output.shape[1:] == (14, 14, 512)


def test_slopes_of_each_form() -> None:
    """13 shared slopes in the small network, 10,304 channel-wise ones; ReLU has none."""
    counts = {
        form: _slopes(_unallocated(models.prelu_net_14, activation=form))
        for form in ("prelu", "prelu_shared", "relu")
    }
    assert counts == {"prelu": 10_304, "prelu_shared": 13, "relu": 0}


@pytest.mark.parametrize("activation", ["prelu", "prelu_shared", "relu"])
@EACH
def test_values(function: Callable[..., keras.Model], activation: str) -> None:
    model = function(**SMALL, activation=activation)
    weights = numpy_prelu_net.randomized(model, seed=30)
    images = _images(2, 64, 48, 3)
    name = function.__name__
    maps = numpy_prelu_net.features(name, weights, images.astype("float64"))
    headless = keras.Model(model.input, model.get_layer("spp").input)
    scale = np.abs(maps).max()
    np.testing.assert_allclose(headless(images), maps, atol=2e-5 * scale)
    expected = numpy_prelu_net.scores(name, weights, maps)
    assert expected.std() > 0.01
    np.testing.assert_allclose(model(images), expected, rtol=1e-3, atol=1e-5)


def test_one_set_of_weights_fits_every_size_of_image() -> None:
    model = models.prelu_net_a(**{**SMALL, "input_shape": (None, None, 3)})
    weights = numpy_prelu_net.randomized(model, seed=1)
    images = _images(1, 83, 70, 3)
    maps = numpy_prelu_net.features("prelu_net_a", weights, images.astype("float64"))
    expected = numpy_prelu_net.scores("prelu_net_a", weights, maps)
    np.testing.assert_allclose(model(images), expected, rtol=1e-3, atol=1e-5)


def test_channels_first_takes_the_same_weights() -> None:
    # keras.layers.Conv2D adds its bias along the width of a channels-first map that is as wide as
    # it has filters (Keras 3.15); here are 7, 14 and 28 filters, and no map of such a width.
    arguments = {"classes": 7, "width_multiplier": 0.11}
    last = models.prelu_net_14(input_shape=(48, 64, 3), **arguments)
    first = models.prelu_net_14(input_shape=(3, 48, 64), data_format="channels_first", **arguments)
    numpy_prelu_net.randomized(last, seed=2)
    for layer in last.layers:
        values = layer.get_weights()
        if layer.name.startswith("conv") and layer.name.endswith("_prelu"):
            # The slopes' shape is that of the map.
            values = [np.moveaxis(values[0], -1, 0)]
        first.get_layer(layer.name).set_weights(values)
    images = _images(2, 48, 64, 3)
    # XLA runs channels first on CPU, which TensorFlow's own kernels do not.
    output = tf.function(first, jit_compile=True)(images.transpose(0, 3, 1, 2))
    np.testing.assert_allclose(output, last(images), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("pooling", [None, "avg", "max"])
def test_without_the_top(pooling: str | None) -> None:
    model = models.prelu_net_a(
        include_top=False, pooling=pooling, width_multiplier=0.0625, input_shape=(64, 48, 1)
    )
    weights = numpy_prelu_net.randomized(model, seed=3)
    images = _images(2, 64, 48, 1)
    expected = numpy_prelu_net.features("prelu_net_a", weights, images.astype("float64"))
    if pooling is not None:
        expected = expected.mean((1, 2)) if pooling == "avg" else expected.max((1, 2))
    np.testing.assert_allclose(model(images), expected, atol=2e-5 * np.abs(expected).max())
    assert models.prelu_net_a(include_top=False, width_multiplier=0.0625).input.shape == (
        None,
        None,
        None,
        3,
    )


def test_weights_and_files(tmp_path) -> None:
    model = models.prelu_net_14(**SMALL)
    numpy_prelu_net.randomized(model, seed=4)
    images = _images(2, 64, 48, 3)
    model.save_weights(tmp_path / "net.weights.h5")
    model.save(tmp_path / "net.keras")
    for loaded in (
        models.prelu_net_14(**SMALL, weights=str(tmp_path / "net.weights.h5")),
        keras.models.load_model(tmp_path / "net.keras"),
    ):
        np.testing.assert_array_equal(loaded(images), model(images))


def test_input_tensor_and_logits() -> None:
    raw = keras.Input((64, 48, 3), name="raw")
    model = models.prelu_net_14(
        input_tensor=keras.layers.Rescaling(2.0, name="twice")(raw),
        classes=7,
        classifier_activation=None,
        width_multiplier=0.0625,
    )
    weights = numpy_prelu_net.randomized(model, seed=5)
    images = _images(2, 64, 48, 3)
    maps = numpy_prelu_net.features("prelu_net_14", weights, 2 * images.astype("float64"))
    expected = numpy_prelu_net.scores("prelu_net_14", weights, maps)
    np.testing.assert_allclose(keras.ops.softmax(model(images)), expected, rtol=1e-3, atol=1e-5)
    assert not np.allclose(model(images).numpy().sum(axis=1), 1.0)


@pytest.mark.parametrize(
    ("initialization", "activation", "fan", "factor"),
    [
        ("he_backward", "relu", "fan_out", 2.0),
        ("he_backward", "prelu", "fan_out", 2 / (1 + 0.25**2)),
        ("he_forward", "relu", "fan_in", 2.0),
        ("he_forward", "prelu_shared", "fan_in", 2 / (1 + 0.25**2)),
        ("xavier", "relu", "fan_out", 1.0),
        ("xavier", "prelu", "fan_out", 1.0),
    ],
)
def test_initial_weights(initialization: str, activation: str, fan: str, factor: float) -> None:
    model = models.prelu_net_14(
        input_shape=(64, 64, 3),
        classes=100,
        width_multiplier=0.25,
        activation=activation,
        initialization=initialization,
    )
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            *window, c, d = layer.kernel.shape
            n = np.prod(window) * (c if fan == "fan_in" else d)
            expected = np.sqrt(factor / n)
            # Four standard deviations of a sample's deviation.
            tolerance = 4 / np.sqrt(2 * np.prod(layer.kernel.shape))
            assert np.std(layer.kernel) == pytest.approx(expected, rel=tolerance), layer.name
            assert not np.any(layer.bias)
        if layer.name.endswith("_prelu"):
            assert np.unique(layer.alpha).tolist() == [0.25]
    stddevs = [np.std(model.get_layer(name).kernel) for name in ("fc1", "fc2", "predictions")]
    np.testing.assert_allclose(stddevs, [0.01, 0.01, 0.001], rtol=0.02)
    first, second = model.get_layer("conv3_1"), model.get_layer("conv3_3")
    assert not np.array_equal(first.kernel, second.kernel)


def test_initial_weights_of_dense_layers_by_the_rule() -> None:
    model = models.prelu_net_14(
        input_shape=(64, 64, 3),
        classes=100,
        width_multiplier=0.25,
        initialization="he_forward",
        fc_stddev=None,
    )
    for name, factor in {"fc1": 2 / 1.0625, "fc2": 2 / 1.0625, "predictions": 1.0}.items():
        kernel = model.get_layer(name).kernel
        assert np.std(kernel) == pytest.approx(np.sqrt(factor / kernel.shape[0]), rel=0.02)


def test_training_moves_kernels_and_slopes() -> None:
    model = models.prelu_net_14(**SMALL, fc_stddev=None, dropout=0.0)
    assert not any(isinstance(layer, keras.layers.Dropout) for layer in model.layers)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        "sparse_categorical_crossentropy",
        run_eagerly=True,
    )
    images, labels = _images(14, 64, 48, 3), np.arange(14) % 7
    before = [weight.numpy() for weight in model.trainable_weights]
    first = model.evaluate(images, labels, verbose=0)
    model.fit(images, labels, batch_size=14, epochs=4, verbose=0)
    assert model.evaluate(images, labels, verbose=0) < first
    moved = [np.any(weight.numpy() != old) for weight, old in zip(model.weights, before, strict=1)]
    assert all(moved)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        model = models.prelu_net_14(**SMALL)
    finally:
        keras.config.set_dtype_policy("float32")
    weights = numpy_prelu_net.randomized(model, seed=6)
    images = _images(2, 64, 48, 3)
    output = model(images)
    assert output.dtype == tf.float32
    assert model.get_layer("fc2_prelu").output.dtype == policy.removeprefix("mixed_")
    maps = numpy_prelu_net.features("prelu_net_14", weights, images.astype("float64"))
    expected = numpy_prelu_net.scores("prelu_net_14", weights, maps)
    # bfloat16 keeps 8 bits, over 13 layers.
    np.testing.assert_allclose(output, expected, atol=0.02 if "bf" in policy else 0.003)


@EACH
def test_signature_and_documentation(function: Callable[..., keras.Model]) -> None:
    name = function.__name__
    parameters = inspect.signature(function).parameters
    manners = inspect.signature(keras.applications.ResNet50).parameters
    assert list(parameters)[: len(manners)] == list(manners)
    assert parameters["name"].default == name
    assert name in function.__doc__
    assert "{" not in function.__doc__
    assert function(**SMALL).name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "elu"}, r"`activation` must be one of .*Received: activation='elu'"),
        ({"initialization": "he"}, r"`initialization` must be .*'xavier'\. .*='he'"),
        ({"pooling": "spp"}, r"`pooling` must be one of None, 'avg', 'max'\. .*pooling='spp'"),
        ({"dropout": 1.5}, r"`dropout` must be a number in \[0, 1\]\. .*dropout=1\.5"),
        ({"width_multiplier": 0}, r"`width_multiplier` .*width_multiplier=0"),
        ({"classes": 0}, r"`classes` must be a whole number .*classes=0"),
        ({"fc_stddev": 0.01}, r"`fc_stddev` must be None or three numbers.*fc_stddev=0\.01"),
        ({"fc_stddev": (0.01, -1, 0)}, r"`fc_stddev` must be a finite number >= 0.*fc_stddev=-1"),
        ({"weights": "absent.weights.h5"}, r"`weights` must be None, .slim. or the path .*absent"),
        ({"data_format": "NCHW"}, r"`data_format` must be one of .*data_format='NCHW'"),
        ({"input_shape": (16, 17, 3)}, r"at least 17 pixels\. .*input_shape=\(16, 17, 3\)"),
        ({"input_shape": (64, 64)}, r"`input_shape` must be \(height, width, channels\)"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.prelu_net_14(**arguments)


def test_the_smallest_images() -> None:
    for function, size in ((models.prelu_net_14, 17), (models.prelu_net_c, 15)):
        arguments = {"classes": 3, "width_multiplier": 0.02}
        model = function(input_shape=(size, size, 3), **arguments)
        assert model.get_layer("spp").input.shape[1:3] == (1, 1)
        assert model(_images(1, size, size, 3)).shape == (1, 3)
        with pytest.raises(ValueError, match=f"at least {size} pixels"):
            function(input_shape=(size, size - 1, 3), **arguments)


def test_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'depth'"):
        models.prelu_net_a(depth=3)
