"""Moving averages of the weights (Polyak & Juditsky 1992), as GoogLeNet's final model had them."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf


class WeightAverages:
    """Moving averages of weights, which trail them and are the better the noisier they are.

    After step t, counted from 1,

        average = average + (1 - d) * (weight - average),   d = min(decay, (1 + t) / (10 + t))

    so that the averages of a short run, or of the start of a long one, are not those of the
    initial weights: of 1,000 steps d is 0.991, and 0.9999 from step 89,990 on.

    Under tf.distribute make it in the scope of the strategy and call `update` in the replicas. All
    replicas have the same weights, so each keeps the averages on its own and there is nothing to
    exchange; with parameter servers an update is subtracted at once, so none is lost.

    Args:
        weights: those to average: the trainable ones. BN's moving statistics belong to weights,
            not to averages of weights: they have to be taken anew.
        decay: in (0, 1).

    Source:
        Szegedy et al. 2014, Section 6. The decay is not printed there; 0.9999, with this rise, is
        what TensorFlow's own Inception models were trained with.

    Example:
        >>> weight = keras.Variable(1.0)
        >>> averages = WeightAverages([weight], 0.9999)
        >>> _ = weight.assign(2.0)
        >>> averages.update(tf.constant(1))
        >>> round(float(averages.variables[0]), 4)  # 1 + (1 - 2 / 11)
        1.8182
    """

    def __init__(self, weights: Sequence[keras.Variable], decay: float) -> None:
        self._weights = list(weights)
        self._decay = decay
        self.variables = [
            tf.Variable(
                weight.value.read_value(),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                name=f"{weight.name}_average",
            )
            for weight in self._weights
        ]

    def update(self, steps: tf.Tensor) -> None:
        """Moves the averages towards the weights.

        Args:
            steps: how many updates the weights have had, whole, at least 1.
        """
        done = tf.cast(steps, tf.float32)
        rate = 1 - tf.minimum(self._decay, (1 + done) / (10 + done))
        for weight, average in zip(self._weights, self.variables, strict=True):
            change = tf.convert_to_tensor(average) - tf.convert_to_tensor(weight.value)
            average.assign_sub(tf.cast(rate, change.dtype) * change)

    def put_in(self) -> None:
        """Gives the weights the values of their averages; not in a replica."""
        for weight, average in zip(self._weights, self.variables, strict=True):
            weight.assign(tf.convert_to_tensor(average))
