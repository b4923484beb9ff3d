"""How an export ends when it cannot be done."""

from __future__ import annotations

import re

# Of a message; some of TensorFlow's and Keras' have whole graphs in them.
_LONGEST = 400
# Colours of a terminal, which Keras puts into its messages.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# What TensorFlow puts around the reason of an error: the operation that had it.
_PLACE = re.compile(r"\{\{.*?\}\}|\[Op:[^\]]*\]|\[\[.*?\]\]", re.DOTALL)


class ExportFailed(Exception):
    """Why there is no export, in one line."""


def reason(error: BaseException) -> str:
    """What an error of TensorFlow or Keras says, in one line.

    Its first lines; when a graph ran, those behind where its nodes come from.
    """
    text = getattr(error, "message", None) or str(error)  # Without the operation of an OpError.
    text = _PLACE.sub("", _COLOURS.sub("", text)).strip()
    if text.startswith("Graph execution error"):
        text = text.splitlines()[-1]
    # Keras ends a message with the arguments of the call, behind an empty line.
    text = " ".join(text.partition("\n\nArguments received")[0].split())
    return text if len(text) <= _LONGEST else text[:_LONGEST].rstrip() + " ..."


def one_line(error: BaseException) -> str:
    """`reason`, behind the type of the error."""
    return f"{type(error).__name__}: {reason(error) or 'no more is known'}"
