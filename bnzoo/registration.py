"""Makes Keras know bnzoo's classes, whichever of the two is imported first.

`keras.models.load_model` finds the classes of a file by name among those that are registered; it
imports no module for them. To register them takes Keras, whose import takes seconds, and which
imports scikit-learn and matplotlib where they are installed. So `import bnzoo` does not import
Keras, but registers as soon as the program has both.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_with_keras() -> None:
    """Registers now if Keras has been imported, else right after it will be.

    Raises:
        ImportError: Keras has been imported with another backend than TensorFlow.
    """
    if "keras" in sys.modules:
        _import_registered()
    else:
        sys.meta_path.insert(0, _AfterKeras())


def _import_registered() -> None:
    # The classes that a file may name are in layers, initializers and models; these import both.
    importlib.import_module("bnzoo.models")


class _AfterKeras(importlib.abc.MetaPathFinder):
    """Finds Keras as the other finders do, and registers once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "keras":
            return None
        found = (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            del loader.exec_module  # The class has its own.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                # Another backend is no reason to refuse Keras: to use bnzoo will be refused.
                if module.config.backend() == "tensorflow":
                    _import_registered()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
