"""Population statistics over training batches: Ioffe & Szegedy 2015, Algorithm 2, steps 8-12.

The moving averages of training trail the weights and remember where they started. Here the
statistics that inference normalizes by are measured anew, with the weights as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from .checks import check_whole
from .surgery.graph import read_graphs
from .surgery.rebuild import copy_layer, copy_state, rebuild
from .survey import Survey, measurable


def estimate_population_statistics(
    model: keras.Model,
    batches: Iterable[Any],
    steps: int | None = None,
    method: str = "algorithm_2",
) -> keras.Model:
    """A copy of the model whose moving statistics are those of the population.

    Each batch passes through the network with the weights as they are. Every Batch
    Normalization normalizes by the statistics of the batch, as in training; everything else
    works as in inference, so that there is no dropout and no augmentation. For each channel,
    with `m` values, mean `mu` and biased variance `sigma^2` in a batch B:

        E[x]   = E_B[mu]
        Var[x] = m / (m - 1) * E_B[sigma^2]

    Batches of other sizes count by their values, `E[x] = sum(m mu) / sum(m)` and
    `Var[x] = sum(m sigma^2) / sum(m - 1)`, which for equal ones is the above. For `m` take
    batches of the size of training: what a deeper layer sees depends on it.

    The sums are taken in float64. The old moving statistics have no influence, nor has the
    order of the batches. A layer that is called several times has one pair of statistics,
    over the values of all its calls. Frozen layers (`trainable = False`) stay as they are:
    in training they do not normalize by the batch either.

    Under `tf.distribute` call it outside of `strategy.run`. Each batch is processed by one
    device; an element of a distributed dataset is one batch for each replica, also for
    layers with `synchronized=True`. Where several processes train a model together, each
    calls this function with batches of its own, and all get the statistics over the batches
    of all.

    Args:
        model: A functional or Sequential Keras model, with models nested to any depth. It
            is not touched: not its weights, its optimizer, nor its random state.
        batches: Batches as for `model.fit`: `x`, `(x, y)` or `(x, y, sample_weight)`, with
            `x` a tensor or a structure of tensors, also a dict by the names of the inputs; in
            a `tf.data.Dataset`, a distributed one, a list, a generator. All but `x` is
            ignored, so that labels may be missing. A list of two or three is `(x, y)` or
            `(x, y, sample_weight)` too.
        steps: How many batches to take; all of them by default.
        method: `"algorithm_2"`, or `"pooled"` for the unbiased variance of all values as
            if they were one batch, which adds the variance of the means of the batches.

    Returns:
        The new model, not compiled; or the given model itself if it has no Batch
        Normalization.

    Raises:
        TypeError: If `model` is not a Keras model, or `batches` is one array or dict.
        ValueError: For another `method` or `steps`; fewer batches than `steps`, or values too
            few for a variance; batches that do not fit the inputs of the model; activations
            that are not finite (names the layer); a subclassed or unbuilt model; a Batch
            Normalization of a derived class, with `renorm=True`, or inside a custom layer;
            all of them frozen.

    Source:
        Ioffe & Szegedy 2015, Algorithm 2, steps 8-12.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])
        >>> batches = [np.array([[0.0], [2.0]]), np.array([[10.0], [14.0]])]
        >>> layer = estimate_population_statistics(model, batches).layers[0]
        >>> float(layer.moving_mean[0]), float(layer.moving_variance[0])
        (6.5, 5.0)
    """
    graphs = read_graphs(model)
    found = measurable(graphs)
    if not found:
        return model
    statistics = list(Survey(graphs, found).statistics(batches, steps, method))
    copy, pairs = rebuild(graphs, copy_layer)
    for old, new in pairs:
        copy_state(old, new)
    copies = {id(old): new for old, new in pairs}
    for layer, mean, variance in statistics:
        _assign(copies[id(layer)], mean, variance)
    return copy


class PopulationStatistics(keras.callbacks.Callback):
    """Sets the moving statistics of a model to those of the population during `fit`.

    At the end of training, after the optimizer has put averaged weights in their place
    (`use_ema`), the statistics are those of the weights that stay. With `every`, they are also
    taken at the end of every so many epochs, before the validation of that epoch. Put this
    callback ahead of those that save the model.

    Training goes on as without it, except for the moving statistics themselves: they move on
    from the values that were set.

    Args:
        batches: See `estimate_population_statistics`; to be iterated over each time, so with
            `every` not a generator.
        steps: See `estimate_population_statistics`.
        every: None, or the number of epochs after which to do it.
        method: See `estimate_population_statistics`.

    Raises:
        ValueError: For another `every`; and what `estimate_population_statistics` raises, most
            of it when training begins.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])
        >>> model.compile("sgd", "mse")
        >>> x = np.array([[1.0], [2.0], [3.0], [4.0]])
        >>> _ = model.fit(x, x, verbose=0, callbacks=[PopulationStatistics([x])])
        >>> round(float(model.layers[0].moving_variance[0]), 4)
        1.6667
    """

    def __init__(
        self,
        batches: Iterable[Any],
        steps: int | None = None,
        every: int | None = None,
        method: str = "algorithm_2",
    ) -> None:
        super().__init__()
        check_whole("every", every, or_none=True)
        self.batches = batches
        self.steps = steps
        self.every = every
        self.method = method
        self._due = False
        self._survey: Survey | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Builds what measures, so that an unfit model is refused before it is trained."""
        graphs = read_graphs(self.model)
        found = measurable(graphs)
        self._survey = Survey(graphs, found) if found else None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes whether this epoch is one to end with new statistics."""
        self._due = self.every is not None and (epoch + 1) % self.every == 0

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """The validation of an epoch, which is to see the new statistics."""
        self._set_if_due()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """The end of an epoch, for one without validation."""
        self._set_if_due()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """The end of training: the weights are those that stay."""
        self._due = True
        self._set_if_due()

    def _set_if_due(self) -> None:
        if self._due and self._survey is not None:
            # All are known before the first is set: they may turn out not to be finite.
            for layer, mean, variance in list(
                self._survey.statistics(self.batches, self.steps, self.method)
            ):
                _assign(layer, mean, variance)
        self._due = False


def _assign(layer: keras.Layer, mean: np.ndarray, variance: np.ndarray) -> None:
    layer.moving_mean.assign(mean)
    layer.moving_variance.assign(variance)
