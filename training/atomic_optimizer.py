"""SGD with momentum whose updates are not lost where several workers make them at a time."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class AtomicSGD(keras.optimizers.SGD):
    """SGD with momentum for variables on parameter servers.

        velocity = momentum * velocity - learning_rate * gradient
        variable = variable + velocity

    Keras' own reads the velocity, computes and writes it back: of two workers that do so at a time
    one is lost, and so it is with its count of steps. Here one operation of TensorFlow on the
    server does both lines while it holds the locks of both variables, and the count is added to.
    The numbers are those of Keras' SGD.

    Args:
        learning_rate: as in keras.optimizers.SGD.
        momentum: in [0, 1].
        **kwargs: the other arguments of keras.optimizers.SGD but `nesterov`, `use_ema` and
            `gradient_accumulation_steps`, which read and then write.

    Raises:
        ValueError: for one of those three.

    Example:
        >>> import numpy as np
        >>> variable = keras.Variable(np.array([1.0]))
        >>> optimizer = AtomicSGD(0.5, momentum=0.5)
        >>> for _ in range(2):
        ...     optimizer.apply([tf.constant([1.0])], [variable])
        >>> float(variable[0]), int(optimizer.iterations)
        (-0.25, 2)
    """

    _iterations: keras.Variable

    def __init__(self, learning_rate: Any = 0.01, momentum: float = 0.0, **kwargs: Any) -> None:
        for name in ("nesterov", "use_ema", "gradient_accumulation_steps"):
            if kwargs.get(name):
                raise ValueError(
                    f"`{name}` must not be given: its updates are lost where workers make them at "
                    f"a time. Received: {name}={kwargs[name]}"
                )
        super().__init__(learning_rate, momentum, **kwargs)
        # Keras offers no other place to put one's own count.
        self._untrack_variable(self._iterations)
        counter = AtomicCounter()
        self._track_variable(counter)
        self._iterations = counter

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor
    ) -> None:
        """The two lines of the class, for one variable."""
        if not self.momentum:
            # A subtraction at once.
            super().update_step(gradient, variable, learning_rate)
            return
        velocity = self.momentums[self._get_variable_index(variable)]
        dtype = variable.dtype
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=velocity.handle,
            lr=tf.cast(learning_rate, dtype),
            grad=tf.cast(tf.convert_to_tensor(gradient), dtype),
            momentum=tf.cast(self.momentum, dtype),
            use_locking=True,
        )


class AtomicCounter(keras.Variable):
    """A count, from 0, int64, to which several workers may add at a time.

    `keras.Variable.assign_add` reads, adds and writes: of two workers one is lost.
    """

    def __init__(self, name: str = "iteration") -> None:
        super().__init__(
            0, dtype="int64", trainable=False, aggregation="only_first_replica", name=name
        )

    def assign_add(self, value: Any) -> tf.Tensor:
        """Adds `value` in one operation."""
        return self.value.assign_add(tf.cast(value, self.value.dtype))
