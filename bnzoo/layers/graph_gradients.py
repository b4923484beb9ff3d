"""`tf.custom_gradient` that lets go of graphs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# No public name takes an entry out of it.
from tensorflow.python.framework.ops import gradient_registry

_registry = gradient_registry._registry


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.custom_gradient`, without its hold on each graph that `function` was called in.

    In a graph TensorFlow enters the gradient, by a name of its own, into a registry for all of
    the program. There it stays, and with it the tensors that it was made from, their graph, and
    the models and functions that have to do with it: a program that makes one model after the
    other grows with each. Here the graph has the gradient, and the registry a weak reference to
    it, which goes with the graph.

    Args:
        function: as for `tf.custom_gradient`: of tensors, to results and their gradient.

    Example:
        >>> import tensorflow as tf
        >>> @custom_gradient
        ... def square(x):
        ...     return x * x, lambda upstream: 2 * x * upstream
        >>> x = tf.constant(3.0)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = square(x)
        >>> float(tape.gradient(y, x))
        6.0
    """
    with_gradient = tf.custom_gradient(function)

    @functools.wraps(function)
    def call(*arguments: tf.Tensor) -> Any:
        results = with_gradient(*arguments)
        if not tf.executing_eagerly():
            _hand_to_graph(tf.nest.flatten(results)[0].op)
        return results

    return call


def _hand_to_graph(marked: tf.Operation) -> None:
    """Gives the gradient of an operation to its graph."""
    name = marked.get_attr("_gradient_op_type").decode()
    gradient = gradient_registry.lookup(name)
    graph = marked.graph
    if not hasattr(graph, "_bnzoo_gradients"):
        graph._bnzoo_gradients = []
    graph._bnzoo_gradients.append(gradient)
    referred = weakref.ref(gradient)

    def of_living_graph(*upstream: Any) -> Any:
        living = referred()
        assert living is not None, f"the graph of {name} is gone"
        return living(*upstream)

    entry = _registry[name]
    _registry[name] = {
        key: of_living_graph if value is gradient else value for key, value in entry.items()
    }
    weakref.finalize(graph, _registry.pop, name, None)
