"""What loading weights checks, on narrow networks in TF-slim's form."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.layers import LocalResponseNormalization
from bnzoo.models import FORMS, bn_inception
from bnzoo.pretrained import from_checkpoint, load_weights, read_checkpoint
from tests.pretrained.seeded import largest_difference, seeded_tensors

NARROW = {"width_multiplier": 0.05, "input_shape": (64, 64, 3)}
STEM = "InceptionV2/Conv2d_1a_7x7"
LOGITS = "InceptionV2/Logits/Conv2d_1c_1x1"
REDUCE = "InceptionV2/Mixed_4a/Branch_1/Conv2d_0a_1x1"


def source_shapes(model):
    """TF-slim's names and shapes for a narrow network, module by module in its own order."""
    convolutions = {"conv2_3x3_reduce": "Conv2d_2b_1x1", "conv2_3x3": "Conv2d_2c_3x3"}
    modules = ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b")
    theirs = ("3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b", "5c")
    branches = (
        ("1x1",),
        ("3x3_reduce", "3x3"),
        ("double_3x3_reduce", "double_3x3_1", "double_3x3_2"),
        ("pool_proj",),
    )
    for ours, other in zip(modules, theirs, strict=True):
        stride_2 = ours in ("3c", "4e")
        for number, branch in enumerate(branches[1:3] if stride_2 else branches):
            for place, conv in enumerate(branch):
                # Letters count what is in a branch, pools too; a convolution of stride 2 is 1a.
                last = stride_2 and place == len(branch) - 1
                count = "1a" if last else "0" + "abc"[place + (conv == "pool_proj")]
                size = "1x1" if "reduce" in conv or conv in ("1x1", "pool_proj") else "3x3"
                convolutions[f"inception_{ours}_{conv}"] = (
                    f"Mixed_{other}/Branch_{number}/Conv2d_{count}_{size}"
                )
    shapes = {}
    stem = model.get_layer("conv1_7x7_s2")
    shapes[f"{STEM}/depthwise_weights"] = stem.depthwise_kernel.shape
    shapes[f"{STEM}/pointwise_weights"] = stem.pointwise_kernel.shape
    shapes[f"{STEM}/biases"] = stem.bias.shape
    for ours, name in convolutions.items():
        kernel = model.get_layer(ours).kernel.shape
        shapes[f"InceptionV2/{name}/weights"] = kernel
        for role in ("beta", "moving_mean", "moving_variance"):
            shapes[f"InceptionV2/{name}/BatchNorm/{role}"] = kernel[-1:]
    classifier = model.get_layer("predictions").kernel.shape
    shapes[f"{LOGITS}/weights"] = (1, 1, *classifier)
    shapes[f"{LOGITS}/biases"] = classifier[-1:]
    return shapes


def save(tensors, path):
    """A checkpoint of TensorFlow's second format."""
    tf.raw_ops.SaveV2(
        prefix=str(path),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=[tf.constant(value) for value in tensors.values()],
    )
    return path


@pytest.fixture(scope="module")
def narrow():
    return FORMS["slim"].build(**NARROW, classes=12, classifier_activation=None)


@pytest.fixture(scope="module")
def tensors(narrow):
    return seeded_tensors(source_shapes(narrow), out_axis=-1)


@pytest.fixture(scope="module")
def path(tensors, tmp_path_factory):
    return save(tensors, tmp_path_factory.mktemp("slim") / "narrow.ckpt")


def images():
    return np.random.RandomState(3).standard_normal((2, 64, 64, 3)).astype(np.float32)


def test_each_tensor_is_where_it_belongs(narrow, tensors, path):
    load_weights(narrow, path, source="slim")
    assert len(tensors) == len(narrow.weights) == 277
    layers = {layer.name: layer for layer in narrow.layers}
    reduce = layers["inception_3c_double_3x3_reduce"], layers["inception_3c_double_3x3_reduce_bn"]
    np.testing.assert_array_equal(reduce[0].kernel.numpy(), tensors[f"{REDUCE}/weights"])
    for role in ("beta", "moving_mean", "moving_variance"):
        expected = tensors[f"{REDUCE}/BatchNorm/{role}"]
        np.testing.assert_array_equal(getattr(reduce[1], role).numpy(), expected)
    classifier = layers["predictions"]
    np.testing.assert_array_equal(classifier.kernel.numpy(), tensors[f"{LOGITS}/weights"][0, 0])
    np.testing.assert_array_equal(classifier.bias.numpy(), tensors[f"{LOGITS}/biases"])


def test_from_checkpoint_has_the_classes_of_the_file_and_softmax(narrow, path):
    load_weights(narrow, path, source="slim")
    logits = narrow(images()).numpy().astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = from_checkpoint(path, source="slim", **NARROW)
    np.testing.assert_allclose(found(images()).numpy(), expected, rtol=1e-4, atol=1e-6)


def test_without_the_classifier_and_behind_other_layers(narrow, path):
    load_weights(narrow, path, source="slim")
    features = keras.Model(narrow.input, narrow.get_layer("inception_5b").output)
    doubled = keras.Input((64, 64, 3))
    model = FORMS["slim"].build(
        include_top=False,
        width_multiplier=0.05,
        input_tensor=keras.layers.Rescaling(0.5)(doubled),
    )
    load_weights(model, path, source="slim")
    assert largest_difference(model(2 * images()).numpy(), features(images()).numpy()) < 1e-6


def test_a_gamma_that_the_file_has_not_is_1(narrow, path):
    load_weights(narrow, path, source="slim")
    model = from_checkpoint(
        path, "slim", classifier_activation=None, batch_norm_scale=True, conv_bias=True, **NARROW
    )
    assert len(model.weights) == 277 + 2 * 68
    assert largest_difference(model(images()).numpy(), narrow(images()).numpy()) < 1e-6


DAMAGES = {
    "missing": (
        {f"{REDUCE}/weights": None},
        rf"with no tensor '{REDUCE}/weights' of shape \(1, 1, 16, 3\)$",
    ),
    "extra": (
        {"InceptionV2/AuxLogits/biases": np.zeros((12,), np.float32)},
        r"with unknown tensor 'InceptionV2/AuxLogits/biases' of shape \(12,\)$",
    ),
    "shape": (
        {f"{REDUCE}/BatchNorm/beta": np.zeros((4,), np.float32)},
        rf"with tensor '{REDUCE}/BatchNorm/beta' of shape \(4,\), expected \(3,\)$",
    ),
    "transposed": (
        {f"{LOGITS}/weights": np.zeros((12, 51, 1, 1), np.float32)},
        rf"with tensor '{LOGITS}/weights' of shape \(12, 51, 1, 1\), expected \(1, 1, 51, 12\)$",
    ),
    "not finite": (
        {f"{STEM}/biases": np.array([0, np.nan, 0], np.float32)},
        rf"with tensor '{STEM}/biases' of shape \(3,\) with values not finite$",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_is_loaded_of_a_file_that_does_not_fit(damage, narrow, tensors, tmp_path):
    changes, message = DAMAGES[damage]
    changed = {name: value for name, value in (tensors | changes).items() if value is not None}
    path = save(changed, tmp_path / "changed.ckpt")
    before = narrow.get_weights()
    narrow.set_weights([np.full_like(value, 0.5) for value in before])
    with pytest.raises(ValueError, match=f"that fits the model. Received: '.*changed.*{message}"):
        load_weights(narrow, path, source="slim")
    for value in narrow.get_weights():
        assert (value == 0.5).all()
    narrow.set_weights(before)


def test_a_checkpoint_of_another_network_is_told_by_its_first_differences(narrow, tmp_path):
    other = {f"InceptionV1/Conv2d_{i}/weights": np.ones((1, 1, 2, 2), np.float32) for i in range(9)}
    path = save(other, tmp_path / "inception_v1.ckpt")
    with pytest.raises(ValueError, match=r"with no tensor 'InceptionV2/.*; and 283 more problems$"):
        load_weights(narrow, path, source="slim")


def test_another_number_of_classes(path):
    with pytest.raises(ValueError, match=rf"'{LOGITS}/biases' of shape \(12,\), expected \(11,\)"):
        from_checkpoint(path, source="slim", classes=11, **NARROW)


def test_slims_1001_classes_load_as_1000_without_the_background_and_as_no_other(tmp_path):
    whole = FORMS["slim"].build(**NARROW, classifier_activation=None)
    path = save(seeded_tensors(source_shapes(whole), out_axis=-1), tmp_path / "1001.ckpt")
    load_weights(whole, path, source="slim")
    smaller = from_checkpoint(path, "slim", classifier_activation=None, classes=1000, **NARROW)
    expected = whole(images()).numpy()[:, 1:]
    # Equal products, perhaps summed in another order.
    assert largest_difference(smaller(images()).numpy(), expected) < 1e-5
    with pytest.raises(ValueError, match=r"\(1, 1, 51, 1001\), expected \(1, 1, 51, 999\)"):
        from_checkpoint(path, source="slim", classes=999, **NARROW)


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        ({"epsilon": 1e-5}, "epsilon=1e-05 of 'conv2_3x3_reduce_bn', expected 0.001"),
        ({"padding": "symmetric"}, "padding='valid' of 'conv1_7x7_s2', expected 'same'"),
        ({"pools": "caffe"}, "class='PaddedMaxPooling2D' of 'pool1_3x3_s2', expected 'MaxPool"),
        ({"stem": "conv"}, "class='Conv2D' of 'conv1_7x7_s2', expected 'SeparableConv2D'"),
        ({"activation": "sigmoid"}, "no layer 'conv1_7x7_s2_relu'"),
        (
            {"local_response_normalization": True},
            r"inputs=\['pool1_norm1'\] of 'conv2_3x3_reduce', expected \['pool1_3x3_s2'\]",
        ),
    ],
)
def test_a_model_of_another_form_is_refused(arguments, difference, path):
    model = bn_inception(
        **{**FORMS["slim"].arguments, "classes": 12, "width_multiplier": 0.05, **arguments}
    )
    message = rf"FORMS\['slim'\].build\(\) makes it. Received: 'bn_inception' with {difference}"
    with pytest.raises(ValueError, match=message):
        load_weights(model, path, source="slim")


def test_a_model_of_another_kind_is_refused(path):
    model = keras.Sequential([keras.Input((8, 8, 3)), LocalResponseNormalization()])
    with pytest.raises(ValueError, match="with no layer 'conv1_7x7_s2'"):
        load_weights(model, path, source="slim")


@pytest.mark.parametrize("source", ["caffe", None, 3])
def test_an_unknown_source(source):
    with pytest.raises(ValueError, match=f"'onnx'. Received: source={source!r}"):
        read_checkpoint("a.ckpt", source=source)


@pytest.mark.parametrize("layer", ["inception_3c_3x3", "conv1_7x7_s2"])
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("torch", [[0, 0, 0], [0, 7, 9], [0, 19, 21]]),
        ("slim", [[0, 2, 4], [12, 14, 16], [24, 26, 28]]),
    ],
)
def test_case_57_where_strides_of_2_start(form, expected, layer):
    """3x3 of stride 2 on arange(36) as 6x6, with only tap (0, 0) set."""
    model = FORMS[form].build(width_multiplier=0.01)
    conv = model.get_layer(layer)
    # The 7x7 kernels start 2 (symmetric: 3) places ahead, and their tap (2, 2) lies where the tap
    # (0, 0) of a 3x3 one does.
    tap = 2 if layer == "conv1_7x7_s2" else 0
    separable = isinstance(conv, keras.layers.SeparableConv2D)
    kernel = np.zeros(conv.depthwise_kernel.shape if separable else conv.kernel.shape)
    kernel[tap, tap, 0, 0] = 1
    if separable:
        conv.depthwise_kernel.assign(kernel)
        conv.pointwise_kernel.assign(np.eye(*conv.pointwise_kernel.shape[2:])[None, None])
    else:
        conv.kernel.assign(kernel)
    image = np.zeros((1, 6, 6, kernel.shape[2]), np.float32)
    image[0, :, :, 0] = np.arange(36).reshape(6, 6)
    if form == "torch":
        image = model.get_layer(f"{layer}_pad")(image)
    np.testing.assert_array_equal(conv(image)[0, :, :, 0], expected)
