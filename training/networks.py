"""The network of a run."""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf

from bnzoo import models

from .command_line import BadFlags, RunFailed
from .data import Inputs
from .failures import reason
from .settings import SMALL_IMAGE, Settings, model_keywords
from .strategies import Devices, synchronize


def build_model(settings: Settings, inputs: Inputs, devices: Devices | None = None) -> keras.Model:
    """The network of `settings` for the images and classes of `inputs`, seeded.

    Args:
        settings: those of the run.
        inputs: its data.
        devices: what is to train it; by default one device.

    Raises:
        BadFlags: the network refuses an argument or the size of the images.
        RunFailed: there is not enough memory for it.
    """
    arguments = dict(settings.model_args)
    size = inputs.preprocessing.image_size
    if max(size) <= SMALL_IMAGE and "stem" in model_keywords(settings.model):
        arguments.setdefault("stem", "small")
    keras.utils.set_random_seed(settings.seed)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(settings.precision)
    try:
        with devices.strategy.scope() if devices else contextlib.nullcontext():
            model = getattr(models, settings.model)(
                input_shape=(*size, inputs.preprocessing.channels),
                classes=len(inputs.labels),
                **arguments,
            )
    except tf.errors.ResourceExhaustedError as error:
        raise RunFailed(f"out of memory for the weights: {reason(error)}") from error
    except (ValueError, TypeError) as error:
        raise BadFlags(
            f"--model={settings.model} with --model_args={arguments} and images of {size}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    finally:
        keras.config.set_dtype_policy(before)
    if devices and devices.replicas > 1 and settings.synchronized_batch_norm:
        synchronize(model)
    return model
