"""The ensemble of Ioffe & Szegedy 2015, Section 4.2.3."""

from __future__ import annotations

from collections.abc import Sequence

import keras


def Ensemble(models: Sequence[keras.Model], name: str = "ensemble") -> keras.Model:
    """The arithmetic mean of the class probabilities of several networks, as one model.

        p(x) = (p_1(x) + ... + p_k(x)) / k

    Args:
        models: two or more functional or Sequential models with one input and one output, all of
            the same shape; the outputs are class probabilities [N, classes]. A model that is given
            k times counts k times in the mean.
        name: name of the model.

    Returns:
        A functional model from one input to class probabilities [N, classes]. Its members are
        nested models, `member_1`, `member_2`, ..., one for each different model; they have the
        layers of the given models, not copies.

    Raises:
        ValueError: there are less than two models, their inputs or outputs differ, one returns
            logits, or two different ones share layers with weights.

    Example:

    >>> from bnzoo.models import mnist_mlp
    >>> Ensemble([mnist_mlp(), mnist_mlp(batch_norm=False)]).output.shape
    (None, 10)
    """
    if not isinstance(models, (list, tuple)) or len(models) < 2:
        count = f"{len(models)} of them" if isinstance(models, (list, tuple)) else repr(models)
        raise ValueError(f"`models` must be a list of at least two networks. Received: {count}")
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
    different = {id(model): model for model in models}
    _refuse_shared_layers(list(different.values()))
    # Given models may have one name all, which a model that holds them cannot; wrapped, each gets
    # another name without being changed.
    members = {
        # A Sequential model that was not called has no `input` and `output` yet.
        key: keras.Model(model.inputs[0], model.outputs[0], name=f"member_{number}")
        for number, (key, model) in enumerate(different.items(), start=1)
    }
    scores = {key: member(image) for key, member in members.items()}
    # In the type of the variables, as the classifiers are, under a mixed-precision policy too.
    mean = keras.layers.Average(
        dtype=keras.config.dtype_policy().variable_dtype, name="predictions"
    )
    return keras.Model(image, mean([scores[id(model)] for model in models]), name=name)


def _interface(model: keras.Model) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """The shapes of the input and output of a model that has one of each."""
    if len(getattr(model, "inputs", None) or ()) != 1 or len(model.outputs) != 1:
        raise ValueError(
            "`models` must be functional or Sequential models with one input and one output. "
            f"Received: {getattr(model, 'name', model)!r}"
        )
    return model.inputs[0].shape, model.outputs[0].shape


def _refuse_logits(model: keras.Model) -> None:
    last: keras.Operation = model
    while isinstance(last, (keras.Sequential, keras.Function)):
        # The one output comes last. It may be that of a nested model, or of an operation.
        last = last.layers[-1] if isinstance(last, keras.Sequential) else last.operations[-1]
    if getattr(last, "activation", None) is keras.activations.linear:
        raise ValueError(
            "`models` must return class probabilities, not logits. "
            f"Received: {model.name!r}, whose last layer {last.name!r} has no activation"
        )


def _refuse_shared_layers(models: list[keras.Model]) -> None:
    """Keras would write weights that two nested models share once, and not find them again."""
    owners: dict[int, keras.Model] = {}
    for model in models:
        for variable in model.variables:
            owner = owners.setdefault(id(variable), model)
            if owner is not model:
                raise ValueError(
                    "`models` must not share layers, unless they are the same model. "
                    f"Received: {owner.name!r} and {model.name!r}, which share {variable.path!r}"
                )
