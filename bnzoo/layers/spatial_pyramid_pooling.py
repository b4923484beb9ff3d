"""Spatial pyramid pooling: a vector of one length from maps of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from bnzoo.checks import check_choice, is_whole

from .real_inputs import as_floating


def bin_edges(size: Any, bins: int) -> list[tuple[Any, Any]]:
    """First and last-plus-one place of each of `bins` bins of a side; `size` is a number or tensor.

    Bin i spans floor(i size / bins) to ceil((i + 1) size / bins): every place is in a bin, and
    neighbours overlap by one place where `bins` does not divide `size`.
    """
    return [(i * size // bins, -(-(i + 1) * size // bins)) for i in range(bins)]


def _counts(values: Any) -> bool:
    """Whether `values` is a sequence of whole numbers >= 1."""
    return isinstance(values, (tuple, list)) and all(is_whole(n) and n > 0 for n in values)


class _Pyramid(keras.layers.Layer):
    """What the two layers below share: the bins, the format, the length of the vector."""

    # The least height and width of a map.
    _smallest: tuple[int, ...] = (1, 1)

    def __init__(
        self, bins: Sequence[int] = (7, 3, 2, 1), data_format: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not _counts(bins) or not bins:
            raise ValueError(
                "`bins` must be a sequence of at least one whole number >= 1, the bins of a side "
                f"in each level. Received: bins={bins!r}"
            )
        check_choice("data_format", data_format, (None, "channels_last", "channels_first"))
        self.bins = tuple(int(n) for n in bins)
        self.data_format = data_format or keras.config.image_data_format()

    def build(self, input_shape: Sequence[int | None]) -> None:
        if len(input_shape) != 4 or self._channels(input_shape) is None:
            raise ValueError(
                "Spatial pyramid pooling needs an input of rank 4 whose number of channels is "
                f"known. Received: input_shape={tuple(input_shape)}"
            )
        first = 1 if self.data_format == "channels_last" else 2
        sides = input_shape[first : first + 2]
        if any(a is not None and a < n for a, n in zip(sides, self._smallest, strict=True)):
            raise ValueError(f"{self._rule()} Received: input_shape={tuple(input_shape)}")
        axis = 3 if self.data_format == "channels_last" else 1
        self.input_spec = keras.layers.InputSpec(ndim=4, axes={axis: self._channels(input_shape)})

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        channels = self._channels(input_shape)
        features = None if channels is None else channels * sum(n * n for n in self.bins)
        return (self._rows(input_shape), features)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "bins": self.bins, "data_format": self.data_format}

    def _rows(self, input_shape: Sequence[int | None]) -> int | None:
        return input_shape[0]

    def _channels(self, input_shape: Sequence[int | None]) -> int | None:
        return input_shape[3 if self.data_format == "channels_last" else 1]

    def _rule(self) -> str:
        return "A map must have at least one place: give larger images."

    def _maps(self, inputs: tf.Tensor) -> tf.Tensor:
        """The inputs with channels last, if large enough.

        The vector runs over channels fastest in both formats, so that weights fit both.
        """
        maps = as_floating(inputs, self.compute_dtype)
        if self.data_format == "channels_first":
            maps = tf.transpose(maps, [0, 2, 3, 1])
        sides = maps.shape[1:3]
        if sides.is_fully_defined():
            if any(a < n for a, n in zip(sides, self._smallest, strict=True)):
                raise ValueError(f"{self._rule()} Received: inputs of shape {inputs.shape}")
            return maps
        # Before the pool: on the CPU one of no windows divides by zero, which ends the process.
        # XLA, whose pool does not, leaves the assertion out.
        large = tf.debugging.assert_greater_equal(
            tf.shape(maps)[1:3], list(self._smallest), message=self._rule()
        )
        with tf.control_dependencies([large]):
            return tf.identity(maps)


@keras.saving.register_keras_serializable(package="bnzoo")
class SpatialPyramidPooling(_Pyramid):
    """Max pooling over the bins of a pyramid of grids (He et al. 2014, SPP-net).

    Each level divides the map into n x n bins and takes the maximum of each channel in each bin,
    whatever the size of the map. Bin i of a side of a places spans floor(i a / n) to
    ceil((i + 1) a / n). For the maps of 13x13 of SPP-net and of 18x18 of He et al. 2015 these are
    the windows of ceil(a / n) with a stride of floor(a / n) that the former names; where the two
    differ, as for 3 bins of 14 places, windows with a stride leave the last place out.

    Args:
        bins: n of each level: (7, 3, 2, 1) makes 63 bins, (6, 3, 2, 1) makes 50.
        data_format: "channels_last" for [N, height, width, C], "channels_first" for
            [N, C, height, width], None for Keras' setting.
        **kwargs: `name`, `dtype` and so on, of `keras.layers.Layer`.

    Returns:
        [N, C times the number of bins]: level by level, each level row by row, channels fastest.

    Raises:
        ValueError: for `bins` that are no numbers of bins; when built, for an input of another rank
            or with an unknown number of channels; for complex inputs, and for a map of no places.
            Where only the running graph knows the size, tf.errors.InvalidArgumentError (XLA has no
            errors of its own: the maxima are -inf).

    Example:
        >>> import numpy as np
        >>> layer = SpatialPyramidPooling(bins=(2, 1))
        >>> layer(np.arange(9.0).reshape(1, 3, 3, 1)).numpy().tolist()
        [[4.0, 5.0, 7.0, 8.0, 8.0]]
    """

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        maps = self._maps(inputs)
        height = maps.shape[1] if maps.shape[1] is not None else tf.shape(maps)[1]
        width = maps.shape[2] if maps.shape[2] is not None else tf.shape(maps)[2]
        levels = []
        for n in self.bins:
            # [N, n, width, C], then [N, n, n, C].
            rows = tf.stack(
                [tf.reduce_max(maps[:, top:end], axis=1) for top, end in bin_edges(height, n)], 1
            )
            cells = tf.stack(
                [tf.reduce_max(rows[:, :, left:end], axis=2) for left, end in bin_edges(width, n)],
                2,
            )
            levels.append(tf.reshape(cells, [-1, n * n * maps.shape[3]]))
        return tf.concat(levels, axis=1)


@keras.saving.register_keras_serializable(package="bnzoo")
class SlidingSpatialPyramidPooling(_Pyramid):
    """Spatial pyramid pooling of every window of a map: one row for each window.

    He et al. 2015 test this way ("multi-view testing on feature maps"): the convolutions run once
    over a large image, and every window of the last map that has the size of training goes through
    the pyramid and the fully connected layers. Row n H' W' + i W' + j is what
    `SpatialPyramidPooling` gives for the window with its corner at (i, j) in map n.

    Args:
        window: (height, width) of the window, in places of the map.
        bins: as of `SpatialPyramidPooling`.
        data_format: as of `SpatialPyramidPooling`.
        **kwargs: `name`, `dtype` and so on, of `keras.layers.Layer`.

    Returns:
        [N H' W', C times the number of bins], with H' = height - window height + 1 and W' likewise.

    Raises:
        ValueError: as `SpatialPyramidPooling`; for a `window` of no whole numbers, and for a map
            smaller than it. Where only the running graph knows the size,
            tf.errors.InvalidArgumentError (XLA has no errors of its own: there are no rows).

    Example:
        >>> import numpy as np
        >>> layer = SlidingSpatialPyramidPooling(window=(3, 3), bins=(1,))
        >>> layer(np.arange(12.0).reshape(1, 3, 4, 1)).numpy().tolist()
        [[10.0], [11.0]]
    """

    def __init__(
        self,
        window: Sequence[int],
        bins: Sequence[int] = (7, 3, 2, 1),
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bins, data_format, **kwargs)
        if not _counts(window) or len(window) != 2:
            raise ValueError(
                "`window` must be two whole numbers >= 1, its height and width. "
                f"Received: window={window!r}"
            )
        self.window = self._smallest = tuple(int(n) for n in window)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        maps = self._maps(inputs)
        rows = tf.shape(maps)[1] - self.window[0] + 1
        columns = tf.shape(maps)[2] - self.window[1] + 1
        pooled = {}
        parts = []
        for n in self.bins:
            for top, bottom in bin_edges(self.window[0], n):
                for left, right in bin_edges(self.window[1], n):
                    # One pool makes the bins of this size of all windows, at their first places.
                    size = (bottom - top, right - left)
                    if size not in pooled:
                        pooled[size] = tf.nn.max_pool2d(maps, size, 1, "VALID")
                    parts.append(pooled[size][:, top : top + rows, left : left + columns])
        features = tf.concat(parts, axis=3)
        return tf.reshape(features, [-1, features.shape[3]])

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "window": self.window}

    def _rule(self) -> str:
        return f"A map must be at least as large as `window`, {self.window}: give larger images."

    def _rows(self, input_shape: Sequence[int | None]) -> None:
        """A multiple of the batch, which functional models take for unknown."""
