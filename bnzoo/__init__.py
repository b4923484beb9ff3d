"""Batch Normalization and rectifier networks for Keras 3 on TensorFlow, exact to the papers."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from .registration import register_with_keras

if TYPE_CHECKING:
    from . import initializers, layers, models, population, preprocessing, pretrained, surgery

__all__ = [
    "initializers",
    "layers",
    "models",
    "population",
    "preprocessing",
    "pretrained",
    "surgery",
]
__version__ = "0.1.0"

register_with_keras()


def __getattr__(name: str) -> ModuleType:
    """Imports a part of bnzoo, and with it Keras and TensorFlow, when it is first used."""
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
