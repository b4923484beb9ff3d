"""The names of a network's classes, one a line of a text."""

from __future__ import annotations


def class_names(text: str) -> tuple[str, ...]:
    r"""The names in `text`, which are what its line feeds divide; the last one may be missing.

    `str.splitlines` would also divide at a form feed, at U+2028 and at six more characters, which
    are part of a name here.

    Example:
        >>> class_names("forget-me-not\nlily\n")
        ('forget-me-not', 'lily')
    """
    return tuple(text.removesuffix("\n").split("\n")) if text else ()
