"""PyTorch's twin of `bnzoo.models.bn_inception`, from the same table, for side-by-side runs."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
import torch
from torch import nn
from torch.nn import functional

from bnzoo.models import bn_inception
from bnzoo.models.inception_table import TABLES, InceptionModule, InceptionTable

EPSILON = 1e-3
# Torch's momentum is the weight of the new statistics.
MOMENTUM = 0.01
DEPTH_MULTIPLIER = 8
# Rounding of float64 through some fifty layers; another padding or momentum would be above 1e-3.
TOLERANCE = 1e-9

_Axes = tuple[int, ...]
# The axes of Keras' variables in torch's order. Keras has kernels as (height, width, in, out),
# depthwise ones as (height, width, in, multiplier), whose last two are one axis in torch.
_KERNEL, _DEPTHWISE, _MATRIX, _VECTOR = (3, 2, 0, 1), (2, 3, 0, 1), (1, 0), (0,)


class Block(nn.Module):
    """Convolution, batch normalization, ReLU, with zeros as TensorFlow's "same" has them."""

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int = 1, separable: bool = False
    ) -> None:
        super().__init__()
        # For even maps: (size - stride) zeros, the odd one behind. Only where the two ends
        # differ does torch need a padded copy of the map.
        before, after = (size - stride) // 2, (size - stride + 1) // 2
        self.pad = None if before == after else (before, after, before, after)
        padding = before if before == after else 0
        self.depthwise: nn.Conv2d | None = None
        if separable:
            middle = inputs * DEPTH_MULTIPLIER
            self.depthwise = nn.Conv2d(
                inputs, middle, size, stride, padding, groups=inputs, bias=False
            )
            inputs, size, stride, padding = middle, 1, 1, 0
        self.conv = nn.Conv2d(inputs, outputs, size, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=EPSILON, momentum=MOMENTUM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pad is not None:
            x = functional.pad(x, self.pad)
        if self.depthwise is not None:
            x = self.depthwise(x)
        return functional.relu(self.bn(self.conv(x)), inplace=True)


class Module(nn.Module):
    """One row of the table; the names of its blocks are those of `bn_inception`'s layers."""

    def __init__(self, row: InceptionModule, inputs: int) -> None:
        super().__init__()
        self.row = row
        self.blocks = nn.ModuleDict()
        if row.conv_1x1:
            self.blocks["1x1"] = Block(inputs, row.conv_1x1, 1)
        self.blocks["3x3_reduce"] = Block(inputs, row.reduce_3x3, 1)
        self.blocks["3x3"] = Block(row.reduce_3x3, row.conv_3x3, 3, row.stride)
        self.blocks["double_3x3_reduce"] = Block(inputs, row.reduce_double, 1)
        self.blocks["double_3x3_1"] = Block(row.reduce_double, row.conv_double, 3)
        self.blocks["double_3x3_2"] = Block(row.conv_double, row.conv_double, 3, row.stride)
        if row.projection:
            self.blocks["pool_proj"] = Block(inputs, row.projection, 1)
        self.outputs = row.conv_1x1 + row.conv_3x3 + row.conv_double + (row.projection or inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks, row = self.blocks, self.row
        branches = [blocks["1x1"](x)] if row.conv_1x1 else []
        branches.append(blocks["3x3"](blocks["3x3_reduce"](x)))
        double = blocks["double_3x3_1"](blocks["double_3x3_reduce"](x))
        branches.append(blocks["double_3x3_2"](double))
        if row.stride == 2:
            pooled = functional.max_pool2d(x, 3, 2, ceil_mode=True)
        elif row.pool == "max":
            pooled = functional.max_pool2d(x, 3, 1, 1)
        else:
            pooled = functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        branches.append(blocks["pool_proj"](pooled) if row.projection else pooled)
        return torch.cat(branches, 1)


class TorchInception(nn.Module):
    """`bn_inception(classifier_activation=None)`, for images whose sides 32 divides.

    Args:
        table: the widths, with 96 for the pool projections of 4c and 4d.
        stem: "separable" or "conv".
        classes: number of classes.
    """

    def __init__(self, table: InceptionTable, stem: str, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(
            {
                "conv1_7x7_s2": Block(3, table.conv1, 7, 2, separable=stem == "separable"),
                "conv2_3x3_reduce": Block(table.conv1, table.conv2_reduce, 1),
                "conv2_3x3": Block(table.conv2_reduce, table.conv2, 3),
            }
        )
        rows = []
        channels = table.conv2
        for row in table.modules:
            rows.append(Module(row, channels))
            channels = rows[-1].outputs
        self.rows = nn.ModuleList(rows)
        self.predictions = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks["conv1_7x7_s2"](x)
        x = functional.max_pool2d(x, 3, 2, ceil_mode=True)
        x = self.blocks["conv2_3x3"](self.blocks["conv2_3x3_reduce"](x))
        x = functional.max_pool2d(x, 3, 2, ceil_mode=True)
        for row in self.rows:
            x = row(x)
        return self.predictions(x.mean((2, 3)))

    def by_layer(self) -> dict[str, Block]:
        """The blocks by the name of the convolution in `bn_inception`."""
        named = dict(self.blocks.items())
        for row in self.rows:
            named |= {f"inception_{row.row.name}_{key}": row.blocks[key] for key in row.blocks}
        return named

    def copy_from(self, model: keras.Model) -> None:
        """Takes the weights of `model`."""
        with torch.no_grad():
            for variable, tensor, axes in self.pairs(model):
                value = variable.numpy().transpose(axes).reshape(tensor.shape)
                tensor.copy_(torch.from_numpy(value.copy()))

    def pairs(self, model: keras.Model) -> list[tuple[keras.Variable, torch.Tensor, _Axes]]:
        """Each variable of `model`, the tensor for it here, and the order of axes it has here."""
        pairs: list[tuple[keras.Variable, torch.Tensor, _Axes]] = []
        for name, block in self.by_layer().items():
            layer, bn = model.get_layer(name), model.get_layer(f"{name}_bn")
            if block.depthwise is None:
                pairs.append((layer.kernel, block.conv.weight, _KERNEL))
            else:
                pairs.append((layer.depthwise_kernel, block.depthwise.weight, _DEPTHWISE))
                pairs.append((layer.pointwise_kernel, block.conv.weight, _KERNEL))
            pairs += [
                (bn.gamma, block.bn.weight, _VECTOR),
                (bn.beta, block.bn.bias, _VECTOR),
                (bn.moving_mean, block.bn.running_mean, _VECTOR),
                (bn.moving_variance, block.bn.running_var, _VECTOR),
            ]
        top = model.get_layer("predictions")
        pairs.append((top.kernel, self.predictions.weight, _MATRIX))
        pairs.append((top.bias, self.predictions.bias, _VECTOR))
        return pairs


def check(stem: str, image_size: int = 96, batch_size: int = 4) -> float:
    """Compares the twin with `bn_inception` of the same weights, in float64.

    The logits in inference and in training, the gradients and the moving statistics.

    Returns:
        The largest difference, relative to the largest value of its tensor.

    Raises:
        RuntimeError: they are not the same network.
    """
    dtype = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    try:
        model = bn_inception(
            classes=10,
            stem=stem,
            classifier_activation=None,
            input_shape=(image_size, image_size, 3),
        )
    finally:
        keras.config.set_dtype_policy(dtype)
    rng = np.random.default_rng(0)
    for variable in model.variables:
        name = variable.path.rsplit("/", 1)[-1]
        if name in ("gamma", "moving_variance"):
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
        elif name in ("beta", "bias", "moving_mean"):
            variable.assign(rng.normal(0, 0.3, variable.shape))
    twin = TorchInception(TABLES["paper"], stem, classes=10).double()
    twin.copy_from(model)
    pairs = twin.pairs(model)
    covered = sum(tensor.numel() for _, tensor, _ in pairs)
    if covered != model.count_params():
        raise RuntimeError(f"{covered} parameters of {model.count_params()} are in the twin")

    # Keras takes images as float32 whatever the dtype of the layers: such values for both.
    images = rng.normal(size=(batch_size, image_size, image_size, 3)).astype(np.float32)
    images = images.astype(np.float64)
    weights = rng.normal(size=(batch_size, 10))
    x = torch.from_numpy(images).permute(0, 3, 1, 2)
    with torch.no_grad():
        results = [(model(images, training=False), twin.eval()(x).numpy())]
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = tf.reduce_sum(logits * weights)
    gradients = dict(
        zip(
            map(id, model.trainable_variables),
            tape.gradient(loss, [v.value for v in model.trainable_variables]),
            strict=True,
        )
    )
    twin_logits = twin.train()(x)
    torch.sum(twin_logits * torch.from_numpy(weights)).backward()
    results.append((logits, twin_logits.detach().numpy()))
    for variable, tensor, axes in pairs:
        ours = gradients.get(id(variable), variable.numpy())
        theirs = tensor if tensor.grad is None else tensor.grad
        ours = np.transpose(ours, axes).reshape(theirs.shape)
        results.append((ours, theirs.numpy()))
    error = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in results)
    if not error < TOLERANCE:
        raise RuntimeError(f"the twin is another network: it differs by {error:.1e} in float64")
    return error
