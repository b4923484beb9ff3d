"""Measures the statistics of a model's Batch Normalization layers over batches."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from . import tally
from .checks import check_choice, check_whole
from .layers import BatchNormalization
from .surgery.graph import Graph, hidden_layers, layers_in
from .surgery.rebuild import copy_layer, copy_state, rebuild


def measurable(graphs: list[Graph]) -> list[tuple[keras.Layer, str]]:
    """The Batch Normalization layers that are not frozen, and the paths of their names."""
    found = []
    for layer, path in layers_in(graphs):
        for hidden in hidden_layers(layer):
            if isinstance(hidden, keras.layers.BatchNormalization):
                raise ValueError(
                    "`model` must show its BatchNormalization layers to be measured. Received: "
                    f"'{hidden.name}' inside '{path}' of class {type(layer).__name__}"
                )
        if isinstance(layer, keras.layers.BatchNormalization):
            if type(layer) not in (BatchNormalization, keras.layers.BatchNormalization):
                raise ValueError(
                    "`model` must use BatchNormalization of keras.layers or bnzoo.layers. "
                    f"Received: '{path}' of the derived class {type(layer).__name__}"
                )
            if layer.renorm:
                raise ValueError(
                    "`model` must not use Batch Renormalization. "
                    f"Received: '{path}' with renorm=True"
                )
            found.append((layer, path))
    thawed = [(layer, path) for layer, path in found if layer.trainable]
    if found and not thawed:
        raise ValueError(
            "`model` must have a BatchNormalization layer that is not frozen: set "
            f"`trainable = True` on those to be measured. Received: {len(found)}, all frozen"
        )
    return thawed


class Survey:
    """Measures with a twin of a model, which is made once.

    Args:
        graphs: The graphs of the model.
        found: What `measurable` found in them.
    """

    def __init__(self, graphs: list[Graph], found: list[tuple[keras.Layer, str]]) -> None:
        self._found = found
        self._places = {id(layer): place for place, (layer, _) in enumerate(found)}
        self._model, self._inputs = graphs[0].model, graphs[0].inputs
        self._readings: list[tuple[int, tf.Tensor]] = []
        self._twin, self._pairs = rebuild(graphs, self._replace)
        self._read = tf.function(self._pass, autograph=False)

    def _replace(self, layer: keras.Layer) -> keras.Layer:
        if not isinstance(layer, keras.layers.BatchNormalization):
            return copy_layer(layer)
        measuring = _Measuring.from_config(layer.get_config())
        if (place := self._places.get(id(layer))) is not None:  # Not frozen.
            measuring.note = lambda reading: self._readings.append((place, reading))
        return measuring

    def _pass(self, x: Any) -> list[tf.Tensor]:
        """One reading for each call of a layer; `_readings` tells the places of the layers."""
        self._readings.clear()
        self._twin(x, training=False)
        return [reading for _, reading in self._readings]

    def statistics(
        self, batches: Iterable[Any], steps: int | None, method: str
    ) -> Iterator[tuple[keras.Layer, np.ndarray, np.ndarray]]:
        """Each layer that was found, and the mean and variance of its population."""
        check_choice("method", method, tuple(tally.VARIANCES))
        for old, new in self._pairs:
            copy_state(old, new)
        shapes = [tuple(layer.moving_mean.shape) for layer, _ in self._found]
        tallies = [tally.empty(shape) for shape in shapes]
        for number, x in enumerate(_inputs(batches, steps, self._model.distribute_strategy)):
            for place, reading in self._checked_readings(x, number):
                tallies[place] = tally.merged(tallies[place], tally.of_batch(*reading))

        everything = _over_processes(
            np.concatenate(tallies, axis=1), self._model.distribute_strategy
        )
        ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        parts = np.split(everything, ends, axis=1)
        for (layer, path), shape, part in zip(self._found, shapes, parts, strict=True):
            if part[tally.FREEDOM].min() <= 0:
                raise ValueError(
                    "`batches` must give each channel at least two values in one batch. "
                    f"Received: {part[tally.COUNT].min():.0f} values for layer '{path}'"
                )
            variance = tally.VARIANCES[method](part)
            yield layer, part[tally.MEAN].reshape(shape), variance.reshape(shape)

    def _check_dtypes(self, x: Any, number: int) -> None:
        """What numbers cannot be cast from is refused, unless the model takes it as it is."""
        taken = {leaf.dtype for leaf in keras.tree.flatten(self._inputs)}
        for leaf in keras.tree.flatten(x):
            is_real = leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool
            if not is_real and leaf.dtype.name not in taken:
                raise ValueError(
                    f"`batches` must hold real numbers for model '{self._model.name}'. "
                    f"Received: batch {number} of dtype {leaf.dtype.name}"
                )

    def _checked_readings(self, x: Any, number: int) -> Iterator[tuple[int, np.ndarray]]:
        """The place of the layer and the reading of each call, in the order of the calls."""
        # A trace for each shape, but for any size of the batch.
        signature = keras.tree.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), x
        )
        self._check_dtypes(x, number)
        try:
            readings = [
                reading.numpy() for reading in self._read.get_concrete_function(signature)(x)
            ]
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            inputs = self._inputs
            if isinstance(x, dict) and not isinstance(inputs, dict):
                inputs = {leaf.name: leaf for leaf in keras.tree.flatten(inputs)}
            expected, received = (
                keras.tree.map_structure(lambda leaf: tuple(leaf.shape), structure)
                for structure in (inputs, x)
            )
            raise ValueError(
                f"`batches` must fit the inputs of model '{self._model.name}', of shape "
                f"{expected}. Received: batch {number} of shape {received}"
            ) from error
        for (place, _), reading in zip(self._readings, readings, strict=True):
            counted = reading[:, reading[2] > 0]
            if not np.isfinite(counted).all():
                raise ValueError(
                    "`batches` must lead to finite activations. Received: batch "
                    f"{number}, with which those into layer '{self._found[place][1]}' are not"
                )
            yield place, reading


class _Measuring(BatchNormalization):
    """Normalizes by the batch unless frozen, and gives its statistics to `note`."""

    note: Callable[[tf.Tensor], None]

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        return super().call(inputs, training=True, mask=mask)

    def _add_statistic(
        self, name: str, shape: tuple[int, ...], initializer: keras.initializers.Initializer
    ) -> keras.Variable:
        # One that is read from the replica at hand. To read the mean of all replicas takes all
        # processes, and these may have different numbers of batches.
        return self.add_weight(name=name, shape=shape, initializer=initializer, trainable=False)

    def _move_statistics(self, mean: tf.Tensor, unbiased: tf.Tensor, count: tf.Tensor) -> None:
        count = tf.broadcast_to(count, tf.shape(mean))
        reading = tf.stack([tf.reshape(value, [-1]) for value in (mean, unbiased, count)])
        self.note(reading)


def _inputs(
    batches: Iterable[Any], steps: int | None, strategy: tf.distribute.Strategy
) -> Iterator[Any]:
    """What the model takes of each batch, as tensors; of each replica in turn."""
    check_whole("steps", steps, or_none=True)
    single = (np.ndarray, tf.Tensor, str, bytes, Mapping)
    if isinstance(batches, single) or not isinstance(batches, Iterable):
        raise TypeError(
            f"`batches` must be an iterable of batches. Received: one {type(batches).__name__}"
        )
    if steps is None and _is_endless(batches):
        raise ValueError("`steps` must be given where `batches` has no end. Received: steps=None")
    taken = 0
    for batch in itertools.islice(batches, steps):
        if isinstance(batch, (tuple, list)) and not 1 <= len(batch) <= 3:
            raise ValueError(
                "`batches` must hold `x`, `(x, y)` or `(x, y, sample_weight)`. "
                f"Received: batch {taken}, a {type(batch).__name__} of {len(batch)}"
            )
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        for share in _shares(x, strategy, taken):
            leaves = keras.tree.flatten(share)
            if any(leaf.shape.rank == 0 for leaf in leaves):
                raise ValueError(
                    f"`batches` must hold tensors with a batch axis. Received: batch {taken} "
                    "with a scalar"
                )
            # Convolutions of nothing crash in some builds of TensorFlow, and tell nothing.
            if all(leaf.shape[0] != 0 for leaf in leaves):
                yield share
        taken += 1
    if steps is not None and taken < steps:
        raise ValueError(f"`batches` must have at least steps={steps} batches. Received: {taken}")
    if taken == 0:
        raise ValueError("`batches` must not be empty. Received: 0 batches")


def _is_endless(batches: Iterable[Any]) -> bool:
    return (
        isinstance(batches, tf.data.Dataset)
        and batches.cardinality() == tf.data.INFINITE_CARDINALITY
    )


def _shares(x: Any, strategy: tf.distribute.Strategy, number: int) -> list[Any]:
    """The parts of an element of a distributed dataset; of any other, itself."""
    leaves = keras.tree.flatten(x)
    parts = [leaves]
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
        parts = list(zip(*map(strategy.experimental_local_results, leaves), strict=True))
    return [
        keras.tree.pack_sequence_as(x, [_tensor(leaf, number) for leaf in part]) for part in parts
    ]


def _tensor(leaf: Any, number: int) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(leaf)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "`batches` must hold tensors, or arrays of numbers. "
            f"Received: batch {number} with a {type(leaf).__name__}"
        ) from error


def _over_processes(own: np.ndarray, strategy: tf.distribute.Strategy) -> np.ndarray:
    """The tally over all processes that train a model together, the same in each of them."""
    replicas = strategy.num_replicas_in_sync
    if replicas == 1 or replicas == len(strategy.extended.worker_devices):
        return own  # There is no other process.
    # What is gathered is one value a replica: the first of this process gives it all.
    values = itertools.chain([own], itertools.repeat(np.zeros_like(own)))
    distributed = strategy.experimental_distribute_values_from_function(
        lambda _: tf.constant(next(values)[np.newaxis])
    )
    return functools.reduce(tally.merged, strategy.gather(distributed, axis=0).numpy())
