"""MXNet's params files, read without MXNet, against what MXNet 1.9.1 computed and wrote."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from bnzoo.models import FORMS, feature_extractor
from bnzoo.pretrained import from_checkpoint, read_checkpoint
from tests.pretrained.seeded import largest_difference, seeded_images, seeded_tensors

STEM = {"1": (64, 3, 7), "2_red": (64, 64, 1), "2": (192, 64, 3)}
# 1x1, 3x3 reduce, 3x3, double reduce, double 3x3, projection; from MXNet's example inception-bn.
MODULES = {
    "3a": (64, 64, 64, 64, 96, 32),
    "3b": (64, 64, 96, 64, 96, 64),
    "3c": (0, 128, 160, 64, 96, 0),
    "4a": (224, 64, 96, 96, 128, 128),
    "4b": (192, 96, 128, 96, 128, 128),
    "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 192, 128),
    "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128),
    "5b": (352, 192, 320, 192, 224, 128),
}

# The network of 21,841 classes, as pertusa/InceptionBN-21K-for-Caffe has it.
STEM_21K = {"conv1": (96, 3, 7), "conv2red": (128, 96, 1), "conv2": (288, 128, 3)}
MODULES_21K = {
    "3a": (96, 96, 96, 96, 144, 48),
    "3b": (96, 96, 144, 96, 144, 96),
    "3c": (0, 192, 240, 96, 144, 0),
    "4a": (224, 64, 96, 96, 128, 128),
    "4b": (192, 96, 128, 96, 128, 128),
    "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 96, 128),
    "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128),
    "5b": (352, 192, 320, 192, 224, 128),
}

# Of MXNet 1.9.1 running its example's symbol with the tensors of `tensors()` on
# `seeded_images()`: of each module's output for the second image, the mean over all channels in
# the first, the middle and the last place; and the first logits of both images.
REFERENCE = {
    "inception_3a": (1.336726, 2.145048, 1.523341),
    "inception_3b": (1.485674, 3.188620, 1.692280),
    "inception_3c": (2.529290, 4.269596, 2.629008),
    "inception_4a": (2.044296, 3.888467, 1.765063),
    "inception_4b": (1.956505, 4.276728, 1.839899),
    "inception_4c": (1.719034, 4.577423, 1.798611),
    "inception_4d": (1.693695, 5.243665, 1.695734),
    "inception_4e": (3.321419, 6.786443, 5.455609),
    "inception_5a": (3.540620, 8.395899, 5.003258),
    "inception_5b": (4.153791, 9.257519, 5.667105),
}
REFERENCE_LOGITS = [
    [-19.07424, 12.93489, 7.78139, -14.26351],
    [-22.09374, 14.73028, 8.81739, -15.94866],
]
LARGEST_LOGIT = 56.8875

# Three arrays (a matrix of float32, a vector, a vector of float16) as mxnet.nd.save wrote them.
WRITTEN = bytes.fromhex(
    "120100000000000000000000000000000300000000000000c9fa93f90000000004000000020000000000000003"
    "0000000000000002000000000000000200000000000000010000000000000000000000000000000000803f0000"
    "004000004040000080400000a0400000c0400000e0400000004100001041000020410000304100004041000050"
    "410000604100007041000080410000884100009041000098410000a0410000a8410000b0410000b841c9fa93f9"
    "000000000100000002000000000000000100000000000000000000000000c03f00000040c9fa93f90000000001"
    "0000000200000000000000010000000000000002000000003e004003000000000000000c000000000000006172"
    "673a615f77656967687405000000000000006175783a6205000000000000006172673a68"
)


def shapes(stem, modules, classes=1000, classifier="fullyconnected0", width=1):
    """Names and shapes of the 416 tensors of a network; a convolution is (out, in, side)."""

    def scaled(row):
        return tuple(channels and max(1, round(width * channels)) for channels in row)

    stem = {
        name: (*scaled((out,)), into if side == 7 else scaled((into,))[0], side)
        for name, (out, into, side) in stem.items()
    }
    modules = {name: scaled(row) for name, row in modules.items()}
    convolutions = dict(stem)
    channels = list(stem.values())[-1][0]
    for module, (one, reduce, three, reduce_double, double, projection) in modules.items():
        rows = {
            "1x1": (one, channels, 1),
            "3x3_reduce": (reduce, channels, 1),
            "3x3": (three, reduce, 3),
            "double_3x3_reduce": (reduce_double, channels, 1),
            "double_3x3_0": (double, reduce_double, 3),
            "double_3x3_1": (double, double, 3),
            "proj": (projection, channels, 1),
        }
        convolutions |= {f"{module}_{name}": row for name, row in rows.items() if row[0]}
        channels = one + three + double + (projection or channels)
    found = {f"arg:{classifier}_weight": (classes, channels), f"arg:{classifier}_bias": (classes,)}
    for name, (out, into, side) in convolutions.items():
        found |= {
            f"arg:conv_{name}_weight": (out, into, side, side),
            f"arg:conv_{name}_bias": (out,),
            f"arg:bn_{name}_gamma": (out,),
            f"arg:bn_{name}_beta": (out,),
            f"aux:bn_{name}_moving_mean": (out,),
            f"aux:bn_{name}_moving_var": (out,),
        }
    return found


def file_content(tensors, version=2):
    """A params file as MXNet's ndarray.cc writes it; version 0 is that of 2015."""
    magic = {0: b"", 1: "c8fa93f9", 2: "c9fa93f900000000", 3: "cafa93f900000000"}[version]
    content = struct.pack("<QQQ", 0x112, 0, len(tensors))
    for tensor in tensors.values():
        content += bytes.fromhex(magic) if magic else b""
        dimension = "Q" if version else "I"
        content += struct.pack(f"<I{tensor.ndim}{dimension}", tensor.ndim, *tensor.shape)
        content += struct.pack("<iii", 1, 0, 0) + tensor.astype("<f4").tobytes()
    content += struct.pack("<Q", len(tensors))
    for name in tensors:
        content += struct.pack("<Q", len(name)) + name.encode()
    return content


@pytest.fixture(scope="module")
def tensors():
    return seeded_tensors(shapes(STEM, MODULES), out_axis=0)


@pytest.fixture(scope="module")
def path(tensors, tmp_path_factory):
    path = tmp_path_factory.mktemp("mxnet") / "Inception-BN-0126.params"
    path.write_bytes(file_content(tensors))
    return path


@pytest.fixture(scope="module")
def model(path):
    return from_checkpoint(path, source="mxnet", classifier_activation=None)


def test_every_module_and_the_logits_are_those_that_mxnet_computed(model):
    images = seeded_images()
    features = feature_extractor(model, list(REFERENCE))(images)
    for name, expected in REFERENCE.items():
        middle = features[name].shape[1] // 2
        places = [features[name][1, at, at] for at in (0, middle, -1)]
        # The reference has 6 decimals; float32 rounds at about 1e-6 in each of up to 69 layers.
        np.testing.assert_allclose([np.mean(place) for place in places], expected, rtol=1e-5)
    logits = model(images).numpy()
    np.testing.assert_allclose(logits[:, :4], REFERENCE_LOGITS, atol=1e-4 * LARGEST_LOGIT)
    assert abs(np.abs(logits).max() - LARGEST_LOGIT) < 1e-4 * LARGEST_LOGIT


def test_pixels_of_another_range_give_other_logits(model):
    logits = model(seeded_images() / 127.5).numpy()
    assert np.abs(logits[:, :4] - REFERENCE_LOGITS).max() > 0.1 * LARGEST_LOGIT


def test_counts(tensors, model):
    assert len(tensors) == 416
    assert sum(np.prod(variable.shape) for variable in model.trainable_variables) == 11_295_240
    assert sum(tensor.size for tensor in tensors.values()) == model.count_params()


def test_the_older_name_of_the_classifier_and_fix_gamma(tmp_path):
    """With fix_gamma MXNet computes with gamma 1, whatever the file has."""
    narrow = {"classifier_activation": None, "width_multiplier": 0.05}
    given = seeded_tensors(shapes(STEM, MODULES, 1000, "fc1", width=0.05), out_axis=0)
    ones = {name: np.ones_like(v) if "gamma" in name else v for name, v in given.items()}
    (tmp_path / "given.params").write_bytes(file_content(given))
    (tmp_path / "ones.params").write_bytes(file_content(ones))
    fixed = from_checkpoint(tmp_path / "given.params", "mxnet", batch_norm_scale=False, **narrow)
    expected = from_checkpoint(tmp_path / "ones.params", "mxnet", **narrow)
    images = seeded_images(1)
    difference = largest_difference(fixed(images).numpy(), expected(images).numpy())
    assert difference < 1e-5


def test_a_file_that_mxnet_wrote(tmp_path):
    (tmp_path / "a.params").write_bytes(WRITTEN)
    found = read_checkpoint(tmp_path / "a.params", source="mxnet").tensors
    assert list(found) == ["arg:a_weight", "aux:b", "arg:h"]
    np.testing.assert_array_equal(found["arg:a_weight"], np.arange(24.0).reshape(2, 3, 2, 2))
    np.testing.assert_array_equal(found["aux:b"], [1.5, 2])
    np.testing.assert_array_equal(found["arg:h"], np.array([1.5, 2], np.float16))


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_all_versions_of_the_format(version, tmp_path):
    given = {"arg:a": np.arange(6.0).reshape(2, 3), "aux:b": np.array([0.25])}
    (tmp_path / "a.params").write_bytes(file_content(given, version))
    found = read_checkpoint(tmp_path / "a.params", source="mxnet").tensors
    assert list(found) == list(given)
    for name, value in given.items():
        np.testing.assert_array_equal(found[name], value)


def test_the_larger_network_is_told_by_its_names(tmp_path):
    values = seeded_tensors(shapes(STEM_21K, MODULES_21K, classes=5), out_axis=0)
    (tmp_path / "21k.params").write_bytes(file_content(values))
    checkpoint = read_checkpoint(tmp_path / "21k.params", source="mxnet")
    assert checkpoint.form is FORMS["mxnet_21k"]
    model = checkpoint.build()
    assert model.output_shape == (None, 5)
    for layer, name in (("conv2_3x3", "conv2"), ("inception_4d_double_3x3_2", "4d_double_3x3_1")):
        expected = values[f"arg:conv_{name}_weight"].transpose(2, 3, 1, 0)
        np.testing.assert_array_equal(model.get_layer(layer).kernel.numpy(), expected)
    found = model.get_layer("conv1_7x7_s2_bn").moving_variance.numpy()
    np.testing.assert_array_equal(found, values["aux:bn_conv1_moving_var"])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:100], "cut off: 96 bytes expected at 80, 20 left"),
        (lambda content: content[:-3], "cut off: "),
        (lambda content: content[:10], "cut off: 24 bytes expected at 0, 10 left"),
        (lambda content: b"", "cut off: 24 bytes expected at 0, 0 left"),
        (lambda content: b"\x80\x02}" + content, "no list of MXNet arrays: it starts with"),
        (lambda content: content + b"\0", "1 bytes left over"),
        (lambda content: content[:28] + b"\1" + content[29:], "an array of storage type 1"),
        (lambda content: content[:32] + b"\xff" + content[33:], "an array of 255 dimensions"),
        (lambda content: content[:16] + b"\1" + content[17:], "cut off: "),
    ],
)
def test_a_damaged_file(damage, reason, tmp_path):
    (tmp_path / "bad.params").write_bytes(damage(WRITTEN))
    with pytest.raises(ValueError, match=rf"MXNet's Inception-BN\. Received: '.*bad.*{reason}"):
        read_checkpoint(tmp_path / "bad.params", source="mxnet")
