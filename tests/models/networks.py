"""Whole networks at 224x224, built once for all tests that only look at them."""

from __future__ import annotations

import functools

import keras
import numpy as np

from bnzoo import models


@functools.cache
def built(function: str, **arguments) -> keras.Model:
    """`bnzoo.models.<function>(**arguments)`, or the form of that name."""
    if function in models.FORMS:
        return models.FORMS[function].build(**arguments)
    return getattr(models, function)(**arguments)


def values(variables) -> int:
    return sum(int(np.prod(variable.shape)) for variable in variables)


def counts(model: keras.Model) -> tuple[int, int]:
    """How many values are trained, and how many are moving statistics."""
    moving = [w for w in model.non_trainable_variables if w.name.startswith("moving")]
    return values(model.trainable_variables), values(moving)
