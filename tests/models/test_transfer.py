from __future__ import annotations

import numpy as np
import pytest

from bnzoo.models import bn_inception, feature_extractor, transfer_weights
from bnzoo.models.transfer import adapt_kernel

from .numpy_inception import randomize

SMALL = {"width_multiplier": 0.0625}


def network(channels=3, **options):
    arguments = {"input_shape": (32, 32, channels), "classes": 10, "stem": "conv", **SMALL}
    model = bn_inception(**{**arguments, **options})
    randomize(model, seed=channels)
    return model


@pytest.fixture(scope="module")
def source():
    return network()


def last_map(model, x):
    return feature_extractor(model, ["inception_5b"])(x.astype(np.float32))["inception_5b"]


def test_new_head(source):
    target = network(classes=7)
    head = [weight.numpy() for weight in target.get_layer("predictions").weights]
    report = transfer_weights(source, target)
    x = np.random.default_rng(0).normal(size=(2, 32, 32, 3))
    np.testing.assert_allclose(last_map(target, x), last_map(source, x), rtol=1e-6)
    for weight, old in zip(target.get_layer("predictions").weights, head, strict=True):
        np.testing.assert_array_equal(weight, old)
    assert dict(report.not_loaded) == {
        "predictions/kernel": "shape (64, 10) in the source, (64, 7) here",
        "predictions/bias": "shape (10,) in the source, (7,) here",
    }
    assert (len(report.loaded), report.adapted, report.not_used) == (69 * 5, {}, ())


def test_same_network_loads_whole(source):
    target = network(channels=3)
    randomize(target, seed=99)
    report = transfer_weights(source, target)
    for ours, theirs in zip(target.weights, source.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (report.not_loaded, report.adapted) == ({}, {})
    assert len(report.loaded) == len(target.weights)


def test_channels_of_a_kernel():
    old = np.random.default_rng(0).normal(size=(3, 3, 3, 5))
    one = adapt_kernel(old, 1)
    np.testing.assert_allclose(one[:, :, 0], old[:, :, 0] + old[:, :, 1] + old[:, :, 2])
    for channels in (2, 4, 6, 7):
        new = adapt_kernel(old, channels)
        assert new.shape == (3, 3, channels, 5)
        for channel in range(channels):
            np.testing.assert_allclose(new[:, :, channel], old[:, :, channel % 3] * 3 / channels)


@pytest.mark.parametrize(
    ("stem", "first", "channels"),
    [("conv", "conv1_7x7_s2", 1), ("small", "conv1_3x3_s2", 6)],
)
def test_other_input_channels(stem, first, channels):
    source, target = network(stem=stem), network(channels, stem=stem)
    report = transfer_weights(source, target)
    old, new = source.get_layer(first).kernel, target.get_layer(first).kernel
    assert dict(report.adapted) == {
        f"{first}/kernel": f"shape {tuple(old.shape)} in the source, {tuple(new.shape)} here"
    }
    # One channel is the common value of the three, six are the three twice at half the weight.
    rng = np.random.default_rng(0)
    image = rng.normal(size=(2, 32, 32, 3 if channels == 6 else 1))
    as_three = image if channels == 6 else np.repeat(image, 3, axis=-1)
    as_given = np.concatenate([image, image], axis=-1) if channels == 6 else image
    expected = last_map(source, as_three)
    got = last_map(target, as_given)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.max(expected))


# Of width 0.0625, less filters (4) than depthwise channels of one input channel (8); of 0.25, more.
@pytest.mark.parametrize(("channels", "width"), [(4, 0.0625), (5, 0.25)])
def test_separable_stem_for_more_channels_is_exact(channels, width):
    options = {"stem": "separable", "width_multiplier": width, "include_top": False}
    source, target = network(**options), network(channels, **options)
    report = transfer_weights(source, target)
    assert set(report.adapted) == {
        "conv1_7x7_s2/depthwise_kernel",
        "conv1_7x7_s2/pointwise_kernel",
    }

    def full_kernel(model):
        stem = model.get_layer("conv1_7x7_s2")
        depthwise, pointwise = stem.depthwise_kernel.numpy(), stem.pointwise_kernel.numpy()
        mixing = pointwise.reshape(depthwise.shape[2], depthwise.shape[3], -1)
        return np.einsum("hwcm,cmd->hwcd", depthwise, mixing)

    old, new = full_kernel(source), full_kernel(target)
    expected = old[:, :, np.arange(channels) % 3] * 3 / channels
    np.testing.assert_allclose(new, expected, atol=1e-6 * np.abs(old).max())


def test_separable_stem_for_one_channel_is_the_closest_of_its_rank():
    # 16 filters, so that the sum of three channels' kernels has a rank above the stem's 8.
    source = network(stem="separable", width_multiplier=0.25)
    target = network(1, stem="separable", width_multiplier=0.25)
    stem = source.get_layer("conv1_7x7_s2")
    mixing = stem.pointwise_kernel.numpy().reshape(3, 8, -1)
    wanted = np.einsum("hwcm,cmd->hwd", stem.depthwise_kernel.numpy(), mixing).reshape(49, -1)
    transfer_weights(source, target)
    stem = target.get_layer("conv1_7x7_s2")
    got = stem.depthwise_kernel.numpy().reshape(49, 8) @ stem.pointwise_kernel.numpy()[0, 0]
    # Eckart and Young: the error is the root of the sum of the squares of the other values.
    left_out = np.linalg.svd(wanted.astype(np.float64), compute_uv=False)[8:]
    assert np.linalg.norm(left_out) > 0.1
    assert np.linalg.norm(got - wanted) == pytest.approx(np.linalg.norm(left_out), rel=1e-4)


def test_auxiliary_heads_start_new():
    arguments = {"input_shape": (80, 80, 3), "stem": "small", "classes": 10}
    source, target = network(**arguments), network(**arguments, auxiliary="caffe")
    report = transfer_weights(source, target)
    assert all(name.startswith("auxiliary_") for name in report.not_loaded)
    assert report.not_loaded["auxiliary_1/bias"] == "none in the source, (10,) here"
    assert len(report.not_loaded) == 2 * (1 + 4 + 1 + 4 + 2)
    back = transfer_weights(target, source)
    assert set(back.not_used) == set(report.not_loaded)


def test_report_reads_well(source):
    target = network(4, classes=7)
    assert str(transfer_weights(source, target)).splitlines() == [
        "344 weights loaded, 1 adapted, 2 not loaded, 0 not used",
        "adapted: conv1_7x7_s2/kernel: shape (7, 7, 3, 4) in the source, (7, 7, 4, 4) here",
        "not loaded: predictions/kernel: shape (64, 10) in the source, (64, 7) here",
        "not loaded: predictions/bias: shape (10,) in the source, (7,) here",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"width_multiplier": 0.125},
            r"'conv1_7x7_s2' differs: kernel: shape \(7, 7, 3, 4\) in the source, \(7, 7, 3, 8\)",
        ),
        (
            {"activation": "prelu"},
            r"'conv1_7x7_s2_prelu' differs: alpha: none in the source, \(1, 1, 4\) here",
        ),
        (
            {"batch_norm_scale": False},
            r"'conv1_7x7_s2_bn' differs: gamma: shape \(4,\) in the source, none here",
        ),
        (
            {"pool_projection": 128},
            r"'inception_4c_pool_proj' differs: kernel: shape \(1, 1, 36, 6\) in the source, ",
        ),
    ],
)
def test_another_network_leaves_the_target_unchanged(source, options, message):
    target = network(**options)
    before = [weight.numpy() for weight in target.weights]
    with pytest.raises(ValueError, match=message):
        transfer_weights(source, target)
    for weight, old in zip(target.weights, before, strict=True):
        np.testing.assert_array_equal(weight, old)
