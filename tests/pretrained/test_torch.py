"""PyTorch's bn_inception, as the package pretrainedmodels defines it, in torch and here."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import pickle

import numpy as np
import pytest

from bnzoo.models import FORMS, INCEPTION_ENDPOINTS, feature_extractor
from bnzoo.pretrained import from_checkpoint, load_weights
from tests.pretrained.seeded import largest_difference, seeded_images
from tests.pretrained.torch_network import answers, torch_network

pytestmark = pytest.mark.peers

MODULES = [name for name in INCEPTION_ENDPOINTS if name.startswith("inception_")]


@pytest.fixture(scope="module")
def network():
    return torch_network()


@pytest.fixture(scope="module")
def path(network, tmp_path_factory):
    import torch

    path = tmp_path_factory.mktemp("torch") / "bn_inception.pth"
    torch.save(network.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def model(path):
    return from_checkpoint(path, source="torch", classifier_activation=None)


def test_every_module_and_the_logits_are_those_of_the_source(network, model):
    import torch

    images = seeded_images()
    found = {**feature_extractor(model, MODULES)(images), "logits": model(images)}
    expected = {}

    def keep(module, inputs, output):
        # Only a module's pool reads the module before it, so its input is that module's output.
        expected[before[module]] = inputs[0].numpy().copy()

    before, handles = {}, []
    for previous, following in itertools.pairwise(MODULES):
        pool = getattr(network, f"{following}_pool")
        before[pool] = previous
        handles.append(pool.register_forward_hook(keep))
    before[network.global_pool] = MODULES[-1]
    handles.append(network.global_pool.register_forward_hook(keep))
    with torch.no_grad():
        network(torch.from_numpy(np.moveaxis(images, -1, 1).copy()))
    for handle in handles:
        handle.remove()
    assert list(expected) == MODULES
    for name in MODULES:
        # float32: about 1e-6 for each rounding, over up to 69 layers.
        assert largest_difference(np.moveaxis(found[name].numpy(), -1, 1), expected[name]) < 1e-4
    assert largest_difference(found["logits"].numpy(), answers(network, images)) < 1e-4


def test_counts_are_the_published_ones(model):
    # imgclsmob prints 11,295,240 parameters for this network with biases.
    assert sum(np.prod(variable.shape) for variable in model.trainable_variables) == 11_295_240
    assert len(model.weights) == 416


def test_the_oldest_files_give_the_same_weights(network, model, tmp_path):
    """No counters, vectors of BN as (1, channels), the other name, the format without zip."""
    import torch

    state = {
        name.replace("last_linear", "fc"): value[None] if "_bn." in name else value
        for name, value in network.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    expected = model.get_weights()
    model.set_weights([np.zeros_like(value) for value in expected])
    load_weights(model, tmp_path / "old.pth", source="torch")
    for found, value in zip(model.weights, expected, strict=True):
        np.testing.assert_array_equal(found.numpy(), value, err_msg=found.path)


def test_without_biases_the_moving_means_take_them_in(network, path):
    model = from_checkpoint(path, "torch", classifier_activation=None, conv_bias=False)
    assert not any(layer.use_bias for layer in model.layers if "Conv2D" in type(layer).__name__)
    images = seeded_images(1)
    assert largest_difference(model(images).numpy(), answers(network, images)) < 1e-4


def test_swapped_kernel_channels_and_mean_turn_bgr_weights_into_rgb_weights(model):
    image = np.random.RandomState(2).randint(0, 256, (1, 224, 224, 3)).astype(np.float32)
    bgr = FORMS["torch"].preprocessing
    expected = model(bgr.normalize(image)).numpy()
    rgb = dataclasses.replace(bgr, channel_order="rgb", mean=bgr.mean[::-1])
    kernel = model.get_layer("conv1_7x7_s2").kernel
    before = kernel.numpy()
    kernel.assign(before[:, :, ::-1])
    as_rgb, as_bgr = (model(pixels.normalize(image)).numpy() for pixels in (rgb, bgr))
    kernel.assign(before)
    assert largest_difference(as_rgb, expected) < 1e-5
    assert largest_difference(as_bgr, expected) > 1e-2


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        ([1, 2], "an object of type list instead of a state dict"),
        ({"epoch": 3}, "a dict with 'epoch' of type int instead of a state dict"),
        (pathlib.PurePosixPath("a"), "damaged, or with other objects than tensors in it"),
    ],
)
def test_a_pickle_that_is_no_state_dict(saved, reason, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(saved, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=f"state dict of PyTorch's bn_inception.*: {reason}$"):
        from_checkpoint(tmp_path / "other.pth", source="torch")


def test_code_in_a_pickle_does_not_run(tmp_path):
    pytest.importorskip("torch")

    class Touch:
        def __reduce__(self):
            return (pathlib.Path.touch, (tmp_path / "ran",))

    (tmp_path / "evil.pth").write_bytes(pickle.dumps({"conv1_7x7_s2.weight": Touch()}, protocol=2))
    with pytest.raises(ValueError, match="with other objects than tensors in it"):
        from_checkpoint(tmp_path / "evil.pth", source="torch")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kept", [0, 100, 40_000_000])
def test_a_file_that_is_cut_off(kept, path, tmp_path):
    (tmp_path / "cut.pth").write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"Received: '.*cut\.pth': damaged"):
        from_checkpoint(tmp_path / "cut.pth", source="torch")


def test_tensors_that_do_not_fit_are_all_named_and_nothing_is_loaded(network, model, tmp_path):
    import torch

    state = dict(network.state_dict())
    state["inception_3a_1x1.weight"] = torch.zeros(64, 192, 3, 3)
    del state["inception_5b_pool_proj_bn.running_var"]
    state["aux.weight"] = torch.zeros(2, 3)
    torch.save(state, tmp_path / "other.pth")
    before = model.get_weights()
    with pytest.raises(ValueError, match="that fits the model") as raised:
        load_weights(model, tmp_path / "other.pth", source="torch")
    assert str(raised.value).endswith(
        "with tensor 'inception_3a_1x1.weight' of shape (64, 192, 3, 3), "
        "expected (64, 192, 1, 1); "
        "no tensor 'inception_5b_pool_proj_bn.running_var' of shape (128,); "
        "unknown tensor 'aux.weight' of shape (2, 3)"
    )
    for found, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_model_that_pads_otherwise_is_refused_though_all_shapes_fit(path):
    same = FORMS["torch"].build(padding="same", width_multiplier=0.01)
    with pytest.raises(ValueError, match=r"FORMS\['torch'\].*with no layer 'conv1_7x7_s2_pad'"):
        load_weights(same, path, source="torch")
