"""The ONNX model zoo's graph, which the package onnx carries without weights, there and here."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from bnzoo.models import INCEPTION_ENDPOINTS, feature_extractor
from bnzoo.pretrained import from_checkpoint, read_checkpoint
from tests.pretrained.seeded import largest_difference, seeded_images, seeded_tensors

pytestmark = pytest.mark.peers

MODULES = [name for name in INCEPTION_ENDPOINTS if name.startswith("inception_")]


@pytest.fixture(scope="module")
def graph_model():
    """The light model with seeded weights instead of its constants.

    Where the released file has a tensor, the light one computes a constant from its shape; some
    vectors are there, all of them constant.
    """
    onnx = pytest.importorskip("onnx")
    folder = pathlib.Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    model = onnx.load(folder / "light_inception_v2.onnx")
    graph = model.graph
    given = {item.name: onnx.numpy_helper.to_array(item) for item in graph.initializer}
    shapes = {name: value.shape for name, value in given.items() if value.dtype == np.float32}
    kept = []
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            shapes[node.output[0]] = tuple(given.pop(node.input[0]))
        else:
            kept.append(node)
    tensors = {**given, **seeded_tensors(shapes, out_axis=0)}
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in tensors.items()
    )
    inputs = [value for value in graph.input if value.name == "data_0"]
    del graph.input[:]
    graph.input.extend(inputs)
    return model


@pytest.fixture(scope="module")
def path(graph_model, tmp_path_factory):
    import onnx

    path = tmp_path_factory.mktemp("onnx") / "inception_v2.onnx"
    onnx.save(graph_model, path)
    return path


@pytest.fixture(scope="module")
def model(path):
    return from_checkpoint(path, source="onnx", classifier_activation=None)


def test_every_module_and_the_logits_are_those_of_the_source(graph_model, model):
    import onnx

    onnxruntime = pytest.importorskip("onnxruntime")
    observed = onnx.ModelProto()
    observed.CopyFrom(graph_model)
    concatenations = [node.output[0] for node in observed.graph.node if node.op_type == "Concat"]
    (logits,) = (node.output[0] for node in observed.graph.node if node.op_type == "Gemm")
    outputs = [*concatenations, logits]
    observed.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs
    )
    session = onnxruntime.InferenceSession(observed.SerializeToString())
    # The graph is made for one image.
    images = seeded_images(1)
    expected = session.run(outputs, {"data_0": np.moveaxis(images, -1, 1)})
    found = feature_extractor(model, MODULES)(images)
    assert len(concatenations) == len(MODULES)
    for name, value in zip(MODULES, expected[:-1], strict=True):
        # float32: about 1e-6 for each rounding, over up to 69 layers.
        assert largest_difference(np.moveaxis(found[name].numpy(), -1, 1), value) < 1e-4
    assert largest_difference(model(images).numpy(), expected[-1]) < 1e-4


def test_counts_are_those_of_the_file(path, model):
    checkpoint = read_checkpoint(path, source="onnx")
    # The Reshape's constant (1, 1024) is no weight: 2 of the 11,234,794 values stored.
    assert sum(tensor.size for tensor in checkpoint.tensors.values()) == 11_234_794 - 2
    # Their two affine maps of each channel are one here.
    assert model.count_params() == 11_234_794 - 2 - 2 * 9_952


@pytest.mark.parametrize("kept", [100, 20_000_000])
def test_a_file_that_is_cut_off(kept, path, tmp_path):
    (tmp_path / "cut.onnx").write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"must be the ONNX model inception_v2\. Received: '.*cut"):
        read_checkpoint(tmp_path / "cut.onnx", source="onnx")
