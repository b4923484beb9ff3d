"""Published weights from their authors' servers into Keras' cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import keras


class Released(NamedTuple):
    """A file on its authors' server; `size` in bytes, since they give no checksum."""

    url: str
    size: int


RELEASED: Mapping[str, Released] = {
    "slim": Released(
        "http://download.tensorflow.org/models/inception_v2_2016_08_28.tar.gz", 41_577_079
    ),
}


def fetch(source: str) -> str:
    """Downloads published weights, once, into Keras' cache.

    Args:
        source: "slim", the only one whose authors serve a file that has stayed where it was.

    Returns:
        The path of the file, for `load_weights` or `from_checkpoint` with the same `source`.

    Raises:
        ValueError: an unknown source.
        OSError: the file is not in the cache and cannot be downloaded, or not as a whole.

    Example:

    >>> try:
    ...     fetch("caffe")
    ... except ValueError as error:
    ...     print(error)
    `source` must be one of 'slim' to be downloaded. Received: source='caffe'
    """
    if source not in RELEASED:
        raise ValueError(
            f"`source` must be one of {', '.join(map(repr, RELEASED))} to be downloaded. "
            f"Received: source={source!r}"
        )
    released = RELEASED[source]
    try:
        path = keras.utils.get_file(origin=released.url, cache_subdir="models")
    except Exception as error:  # Keras raises no narrower class.
        raise OSError(
            f"the weights {source!r} are not in Keras' cache and cannot be downloaded from "
            f"{released.url}: {error}. Without a network, give the path of the file instead"
        ) from error
    size = os.path.getsize(path)
    if size != released.size:
        # Else the cache would keep it.
        os.remove(path)
        raise OSError(
            f"the weights {source!r} came incomplete from {released.url}: {size} bytes instead of "
            f"{released.size}. Try again"
        )
    return path
