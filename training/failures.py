"""TensorFlow's errors in one line: which image is damaged, that memory is out, or its own words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from bnzoo.preprocessing import Preprocessing

from .command_line import RunFailed
from .sources import Split

# What TensorFlow puts around the sentence that tells what happened.
_WRAPPING = re.compile(
    r"^\{\{function_node [^}]*\}\} *"
    r"|Error in user-defined function .*? with iterator: Iterator::\S+: "
    r"| *\[Op:\w+\].*$"
)
_SEVERAL = re.compile(r"\d+ root error\(s\) found")
_LONGEST_REASON = 300


@contextlib.contextmanager
def explained(split: Split, preprocessing: Preprocessing) -> Iterator[None]:
    """Turns an error of TensorFlow inside into a RunFailed of one line.

    Nothing is checked on the way. Only after an error are the examples read again, in their
    order, to find the one that cannot be: the error itself does not say which it was.

    Args:
        split: what is read inside.
        preprocessing: what decodes its images.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise RunFailed(
            f"out of memory: {reason(error)}. A smaller --batch_size may help"
        ) from error
    except tf.errors.OpError as error:
        print("an example cannot be read: looking for it", flush=True)
        damaged = first_damaged(split, preprocessing)
        raise RunFailed(damaged or f"TensorFlow failed: {reason(error)}") from error


def first_damaged(split: Split, preprocessing: Preprocessing) -> str | None:
    """The line that names the first example of `split` that cannot be read; None if all can be."""
    images = split.ordered().map(
        lambda raw: split.read(raw, preprocessing)[0], num_parallel_calls=tf.data.AUTOTUNE
    )
    iterator = iter(images)
    for position in range(split.examples):
        try:
            next(iterator, None)
        except tf.errors.OpError as error:
            return f"{split.locate(position)} cannot be read: {reason(error)}. {split.remedy}"
    return None


def reason(error: Exception) -> str:
    """The sentence in the message of one of TensorFlow's errors that tells what happened.

    It is the first line; in errors of compiled functions the last one, behind a stack, before the
    nodes that waited for it.
    """
    before = re.split(r"\n\s*\[\[", str(error), maxsplit=1)[0]
    lines = [line.strip() for line in before.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if _SEVERAL.match(lines[0]) and len(lines) > 1:
        del lines[0]  # Only counts the errors; the first of them tells what happened.
    sentence = lines[-1] if lines[0].startswith("Graph execution error") else lines[0]
    return _WRAPPING.sub("", sentence).strip().rstrip(".")[:_LONGEST_REASON]


def first_line(error: Exception) -> str:
    """The first line of what an error of another kind says."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
