"""Checks of arguments: a wrong one ends in a ValueError with its name, the rule and the value."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether `value` is an integer, NumPy's included; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether `value` is a finite real number, NumPy's included; True and False are none.

    Nor are numbers that no float holds.
    """
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        return is_real and math.isfinite(value)
    except OverflowError:  # A whole number or a fraction beyond any float.
        return False


def check_whole(argument: str, value: Any, low: int = 1, *, or_none: bool = False) -> None:
    """ValueError unless `value` is a whole number of at least `low`, or None if that is allowed.

    Example:
        >>> check_whole("groups", 2.0)
        Traceback (most recent call last):
        ...
        ValueError: `groups` must be a whole number >= 1. Received: groups=2.0
    """
    if (or_none and value is None) or (is_whole(value) and value >= low):
        return
    none = "None or " if or_none else ""
    raise ValueError(
        f"`{argument}` must be {none}a whole number >= {low}. Received: {argument}={value!r}"
    )


def check_number(
    argument: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_ends: bool = False,
    or_none: bool = False,
) -> None:
    """ValueError unless `value` is a finite number in [low, high], or in (low, high).

    Args:
        argument: name of the argument, for the message.
        value: what was given for it.
        low: the least that is allowed.
        high: the most that is allowed.
        open_ends: whether the ends themselves are not allowed.
        or_none: whether None is.

    Example:
        >>> check_number("momentum", "0.9", 0, 1, or_none=True)
        Traceback (most recent call last):
        ...
        ValueError: `momentum` must be None or a number in [0, 1]. Received: momentum='0.9'
    """
    if or_none and value is None:
        return
    if is_finite(value) and (low < value < high if open_ends else low <= value <= high):
        return
    if math.isfinite(high):
        rule = f"a number in ({low}, {high})" if open_ends else f"a number in [{low}, {high}]"
    elif math.isfinite(low):
        rule = f"a finite number {'>' if open_ends else '>='} {low}"
    else:
        rule = "a finite number"
    none = "None or " if or_none else ""
    raise ValueError(f"`{argument}` must be {none}{rule}. Received: {argument}={value!r}")


def check_bool(argument: str, value: Any) -> None:
    """ValueError unless `value` is True or False: of any other object Python knows a truth too.

    Example:
        >>> check_bool("mirror", "no")
        Traceback (most recent call last):
        ...
        ValueError: `mirror` must be True or False. Received: mirror='no'
    """
    if not isinstance(value, bool):
        raise ValueError(f"`{argument}` must be True or False. Received: {argument}={value!r}")


def check_choice(argument: str, value: Any, allowed: Collection[Any]) -> None:
    """ValueError unless `value` is one of `allowed`.

    Example:
        >>> check_choice("mode", ["fan_in"], ("fan_in", "fan_out"))
        Traceback (most recent call last):
        ...
        ValueError: `mode` must be one of 'fan_in', 'fan_out'. Received: mode=['fan_in']
    """
    # Of other types not all can be looked for in a set, and an array is equal to none or many.
    if not isinstance(value, (str, numbers.Number, type(None))) or value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"`{argument}` must be one of {choices}. Received: {argument}={value!r}")
