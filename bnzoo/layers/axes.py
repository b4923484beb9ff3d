"""The axes that keep statistics or parameters of their own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any


def as_axis(axis: Any) -> int | tuple[int, ...]:
    """An `axis` argument as an integer or a tuple of integers.

    Raises:
        ValueError: For anything else.

    Example:
        >>> as_axis([1, 2, 3])
        (1, 2, 3)
    """
    try:
        if isinstance(axis, (tuple, list)):
            return tuple(operator.index(item) for item in axis)
        return operator.index(axis)
    except TypeError:
        raise ValueError(
            f"`axis` must be an integer or a tuple of integers. Received: axis={axis!r}"
        ) from None


def resolve_axes(axis: int | tuple[int, ...], shape: Sequence[int | None]) -> dict[int, int]:
    """The size of each kept axis of inputs of this shape, axes from the front and ascending.

    Args:
        axis: What `as_axis` gives.
        shape: The shape of the inputs, the batch first; None where a size is unknown.

    Raises:
        ValueError: For an axis out of range, repeated, naming the batch, or of unknown size.

    Example:
        >>> resolve_axes((-1, 1), (None, 8, None, 3))
        {1: 8, 3: 3}
    """
    rank = len(shape)
    given = axis if isinstance(axis, tuple) else (axis,)
    resolved = sorted(item + rank if item < 0 else item for item in given)
    if not resolved or resolved[0] < 0 or resolved[-1] >= rank:
        rule = f"must lie in [{-rank}, {rank}) for inputs of rank {rank}"
    elif len(set(resolved)) < len(resolved):
        rule = "must not name an axis twice"
    elif resolved[0] == 0:
        rule = "must not name the batch axis 0"
    else:
        sizes = {item: shape[item] for item in resolved}
        known = {item: size for item, size in sizes.items() if size is not None}
        if len(known) == len(sizes):
            return known
        rule = f"must name axes of known size; the inputs have shape {tuple(shape)}"
    raise ValueError(f"`axis` {rule}. Received: axis={axis}")
