"""Evaluation by the workers of a parameter server cluster, each example counted once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing

from . import data
from .metrics import Evaluation, batch_sums, evaluation
from .parameter_server import ParameterServers
from .sources import Split

# Parts of the split for each worker. All raw examples are read for each part, though only those of
# the part are decoded; with more, a slow worker would hold up the others less.
PARTS_EACH = 2


def make_scheduled_evaluator(
    engine: ParameterServers,
    model: keras.Model,
    split: Split,
    preprocessing: Preprocessing,
    batch_size: int,
) -> Callable[[], Evaluation]:
    """A function that evaluates `model` as it is at each call.

    The split is cut into parts, of which each worker takes the next as it is done with one. The
    part of a worker that is lost is begun again by another, and only the sums that come back are
    added up: no example is left out or counted twice.

    Args:
        engine: schedules the parts; no steps may be under way.
        model: its variables are on parameter servers.
        split: what to evaluate on.
        preprocessing: what is done to its images.
        batch_size: rows of a batch.

    Raises:
        RunFailed: (the function) the parts held another number of examples than the split.
    """
    parts = max(1, min(PARTS_EACH * engine.workers, split.examples // batch_size))

    @tf.function
    def part_sums(part: tf.Tensor) -> tf.Tensor:
        own = dataclasses.replace(split, ordered=lambda: split.ordered().shard(parts, part))
        sums = tf.zeros(4, tf.float64)
        # Over an iterator it is a loop of this function, over a data set it were one of tf.data,
        # which has no access to other machines.
        for images, labels, mask in iter(data.evaluation_batches(own, preprocessing, batch_size)):
            sums += batch_sums(model, images, labels, mask)
        return sums

    def evaluate() -> Evaluation:
        numbers = tf.range(parts, dtype=tf.int64)
        found = engine.results(part_sums, [(number,) for number in tf.unstack(numbers)])
        return evaluation(np.sum(found, axis=0), split.examples)

    return evaluate
