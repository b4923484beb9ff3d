"""The ensemble of Ioffe & Szegedy 2015, Section 4.2.3."""

from __future__ import annotations

from collections.abc import Sequence

import keras


def Ensemble(models: Sequence[keras.Model], name: str = "ensemble") -> keras.Model:
    """The arithmetic mean of the class probabilities of several networks, as one model.

        p(x) = (p_1(x) + ... + p_k(x)) / k

    Args:
        models: two or more functional models with one input and one output, all of the same shape;
            the outputs are class probabilities [N, classes].
        name: name of the model.

    Returns:
        A functional model from one input to class probabilities [N, classes]. Its members are
        nested models, `member_1`, `member_2`, ...; they have the layers of the given models, not
        copies.

    Raises:
        ValueError: there are less than two models, their inputs or outputs differ, or one returns
            logits.

    Example:

    >>> from bnzoo.models import mnist_mlp
    >>> Ensemble([mnist_mlp(), mnist_mlp(batch_norm=False)]).output.shape
    (None, 10)
    """
    models = list(models)
    if len(models) < 2:
        raise ValueError(f"`models` must be at least two networks. Received: {len(models)} of them")
    first = _interface(models[0])
    for model in models:
        if _interface(model) != first:
            raise ValueError(
                "`models` must all have the same input and output shape. "
                f"Received: {models[0].name!r} with {first} and {model.name!r} with "
                f"{_interface(model)}"
            )
        _refuse_logits(model)
    source = models[0].inputs[0]
    image = keras.Input(batch_shape=source.shape, dtype=source.dtype, name=source.name)
    # Given models may have one name all, which a model that holds them cannot; wrapped, each gets
    # another name without being changed.
    members = [
        keras.Model(model.input, model.output, name=f"member_{number}")
        for number, model in enumerate(models, start=1)
    ]
    # In the type of the variables, as the classifiers are, under a mixed-precision policy too.
    mean = keras.layers.Average(
        dtype=keras.config.dtype_policy().variable_dtype, name="predictions"
    )
    return keras.Model(image, mean([member(image) for member in members]), name=name)


def _interface(model: keras.Model) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """The shapes of the input and output of a model that has one of each."""
    if len(getattr(model, "inputs", None) or ()) != 1 or len(model.outputs) != 1:
        raise ValueError(
            "`models` must be functional models with one input and one output. "
            f"Received: {getattr(model, 'name', model)!r}"
        )
    return model.inputs[0].shape, model.outputs[0].shape


def _refuse_logits(model: keras.Model) -> None:
    last = next(layer for layer in model.layers if layer.output is model.outputs[0])
    if getattr(last, "activation", None) is keras.activations.linear:
        raise ValueError(
            "`models` must return class probabilities, not logits. "
            f"Received: {model.name!r}, whose last layer {last.name!r} has no activation"
        )
