"""Models that other people wrote: the same logits after conversion and folding."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from bnzoo.surgery import FoldReport, convert_batch_norm, fold_batch_norm
from bnzoo.surgery.graph import read_graphs

from .models import randomize, relative_error

# Name, arguments, and of how many norms how many cannot fold: in ResNet50V2 the 16 of the
# pre-activations and the last one stand between sums and nonlinearities.
MODELS = [
    ("MobileNetV2", {"alpha": 0.35}, 52, 0),
    ("ResNet50V2", {}, 49, 17),
    ("EfficientNetB0", {}, 49, 0),
]
CONVOLUTIONS = (keras.layers.Conv2D, keras.layers.DepthwiseConv2D, keras.layers.SeparableConv2D)


def _not_folded_after_a_convolution(model: keras.Model, report: FoldReport) -> list[str]:
    """Norms that directly follow a convolution which nothing else uses, and did not fold."""
    graph = read_graphs(model)[0]
    folded = {fate.name for fate in report.batch_norms if fate.outcome == "folded"}
    names = []
    for call in graph.calls:
        if isinstance(call.operation, keras.layers.BatchNormalization):
            before = graph.producer(call.input)
            alone = len(graph.consumers(call.input)) == 1
            if before and isinstance(before.operation, CONVOLUTIONS) and alone:
                names.append(call.operation.name)
    assert names
    return [name for name in names if name not in folded]


@pytest.mark.parametrize(("name", "arguments", "norms", "affine"), MODELS, ids=lambda v: str(v))
def test_same_logits(name: str, arguments: dict, norms: int, affine: int) -> None:
    make = getattr(keras.applications, name)
    model = randomize(
        make(
            weights=None,
            input_shape=(64, 64, 3),
            classes=10,
            classifier_activation=None,
            **arguments,
        )
    )
    inputs = np.random.default_rng(0).uniform(0, 255, (2, 64, 64, 3)).astype("float32")
    assert relative_error(model, convert_batch_norm(model), inputs) < 1e-4
    folded, report = fold_batch_norm(model, return_report=True)
    assert (len(report.batch_norms), report.count("affine")) == (norms, affine)
    assert report.count("kept") == 0
    assert _not_folded_after_a_convolution(model, report) == []
    # 1e-4 is what whole networks in float32 may differ by.
    assert relative_error(model, folded, inputs) < 1e-4
