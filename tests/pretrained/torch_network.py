"""PyTorch's bn_inception as the package pretrainedmodels defines it, with seeded weights."""

from __future__ import annotations

import importlib.util
import pathlib

import numpy as np
import pytest

from tests.pretrained.seeded import seeded_tensors


def torch_network():
    """Their network, for inference; skips the test without torch or pretrainedmodels."""
    torch = pytest.importorskip("torch")
    package = importlib.util.find_spec("pretrainedmodels")
    if package is None:
        pytest.skip("pretrainedmodels is not installed")
    # The file alone: the package as a whole imports torchvision, which few builds of torch have.
    folder = pathlib.Path(package.submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("theirs", folder / "models" / "bninception.py")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    network = theirs.BNInception().eval()
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    counters = {name for name in shapes if name.endswith("num_batches_tracked")}
    tensors = seeded_tensors({name: shapes[name] for name in shapes.keys() - counters}, out_axis=0)
    # Else a softmax gives all to one class, and hides the others' logits.
    tensors["last_linear.weight"] *= 0.1
    network.load_state_dict(
        {name: torch.from_numpy(value) for name, value in tensors.items()}
        | {name: torch.tensor(7) for name in counters}
    )
    return network


def answers(network, images):
    """Their logits for images [N, H, W, C]."""
    import torch

    with torch.no_grad():
        return network(torch.from_numpy(np.moveaxis(images, -1, 1).copy())).numpy()
