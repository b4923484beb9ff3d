"""Max pooling with explicit padding: the pools of Caffe, PyTorch, ONNX and MXNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from bnzoo.checks import is_whole


@keras.saving.register_keras_serializable(package="bnzoo")
class PaddedMaxPooling2D(keras.layers.MaxPooling2D):
    """Max pooling over a map that is first enlarged by `pads` = (before, after) rows and columns.

    The added places never win the maximum, whatever the sign of the input. `pads=(0, 1)` is, for
    windows of 3 and strides of 2, Caffe's pooling and PyTorch's `ceil_mode=True`: the output has
    ceil((n - 3) / 2) + 1 places and the last window may hang over the border. `pads=(1, 1)` is
    their symmetric padding. TensorFlow's "same" equals the first on even maps only.

    Args:
        pool_size: side of the window, or its two sides.
        strides: step of the window, or its two steps; None is `pool_size`.
        pads: rows and columns added (before, after), in places.
        data_format: "channels_last" or "channels_first"; None is Keras' setting.

    Raises:
        ValueError: `pads` are not two integers of at least 0.

    Example:

    >>> import numpy as np
    >>> x = np.arange(1.0, 17.0).reshape(1, 4, 4, 1)
    >>> PaddedMaxPooling2D(3, 2, pads=(0, 1))(x)[0, :, :, 0].numpy().tolist()
    [[11.0, 12.0], [15.0, 16.0]]
    """

    def __init__(
        self,
        pool_size: int | Sequence[int] = 3,
        strides: int | Sequence[int] | None = None,
        pads: Sequence[int] = (0, 1),
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        is_pair = isinstance(pads, (tuple, list)) and len(pads) == 2
        if not is_pair or not all(is_whole(pad) and pad >= 0 for pad in pads):
            raise ValueError(
                "`pads` must be two integers of at least 0, the places added before and after. "
                f"Received: pads={pads!r}"
            )
        super().__init__(
            pool_size=pool_size,
            strides=strides,
            padding="valid",
            data_format=data_format,
            **kwargs,
        )
        self.pads = (int(pads[0]), int(pads[1]))

    def call(self, inputs: Any) -> Any:
        widths = [(0, 0)] * 4
        for axis in self._spatial_axes():
            widths[axis] = self.pads
        return super().call(ops.pad(inputs, widths, constant_values=float("-inf")))

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        axes = self._spatial_axes()
        padded = [
            size + sum(self.pads) if axis in axes and size is not None else size
            for axis, size in enumerate(input_shape)
        ]
        return super().compute_output_shape(padded)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["padding"]
        return {**config, "pads": self.pads}

    def _spatial_axes(self) -> tuple[int, int]:
        return (1, 2) if self.data_format == "channels_last" else (2, 3)
