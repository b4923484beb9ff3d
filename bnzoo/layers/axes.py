"""The axes that keep statistics or parameters of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bnzoo.checks import is_whole


def as_axis(axis: Any, argument: str = "axis") -> int | tuple[int, ...]:
    """An `axis` argument as an integer or a tuple of integers.

    Args:
        axis: What was given.
        argument: The name of the argument, for the message.

    Raises:
        ValueError: For anything else.

    Example:
        >>> as_axis([1, 2, 3])
        (1, 2, 3)
    """
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    if not all(is_whole(item) for item in given):
        raise ValueError(
            f"`{argument}` must be an integer or a tuple of integers. Received: {argument}={axis!r}"
        )
    whole = tuple(int(item) for item in given)
    return whole if isinstance(axis, (tuple, list)) else whole[0]


def positive_axes(axis: int | tuple[int, ...], rank: int, argument: str = "axis") -> list[int]:
    """The axes of inputs of this rank that are meant, counted from the front and ascending.

    Args:
        axis: What `as_axis` gives.
        rank: The rank of the inputs, the batch among their axes.
        argument: The name of the argument, for the message.

    Raises:
        ValueError: For an axis out of range, repeated, or naming the batch.

    Example:
        >>> positive_axes((-1, 1), 4)
        [1, 3]
    """
    given = axis if isinstance(axis, tuple) else (axis,)
    positive = sorted(item + rank if item < 0 else item for item in given)
    if any(not 0 <= item < rank for item in positive):
        rule = f"must lie in [{-rank}, {rank}) for inputs of rank {rank}"
    elif len(set(positive)) < len(positive):
        rule = "must not name an axis twice"
    elif 0 in positive:
        rule = "must not name the batch axis 0"
    else:
        return positive
    raise ValueError(f"`{argument}` {rule}. Received: {argument}={axis}")


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
    if axis == ():
        raise ValueError("`axis` must name at least one axis. Received: axis=()")
    sizes = {item: shape[item] for item in positive_axes(axis, len(shape))}
    known = {item: size for item, size in sizes.items() if size is not None}
    if len(known) < len(sizes):
        raise ValueError(
            f"`axis` must name axes of known size; the inputs have shape {tuple(shape)}. "
            f"Received: axis={axis}"
        )
    return known
