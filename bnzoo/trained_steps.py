"""How many steps a network was trained, in the file that Keras saved it to.

Training writes it and export reads it. No clock has to be right for it, and no copy of the file
loses it.
"""

from __future__ import annotations

import json
import os
import zipfile

# An entry of the archive, which Keras passes over: {"step": 60}.
_ENTRY = "training.json"


def add_step(file: str | os.PathLike[str], step: int) -> None:
    """Writes into a .keras file how many steps its network was trained."""
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(_ENTRY, json.dumps({"step": step}))


def saved_step(file: str | os.PathLike[str]) -> int | None:
    """How many steps the network in `file` was trained; None if the file does not tell.

    Example:
        >>> import keras, tempfile
        >>> file = f"{tempfile.mkdtemp()}/model.keras"
        >>> keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(file)
        >>> add_step(file, 60)
        >>> saved_step(file)
        60
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return int(json.loads(archive.read(_ENTRY))["step"])
    except Exception:
        # What zipfile raises of damaged files has no common class.
        return None
