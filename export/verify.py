"""Whether an export computes what the trained network computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing
from bnzoo.surgery.graph import layers_in, read_graphs

from .crops import crop_views
from .errors import ExportFailed
from .forms import input_specs
from .served import PROBABILITIES, served_network

# What folding and a form may change by rounding alone, as `Comparison.largest`, by the type that
# the network computes in: about ten of its rounding units, as the errors of many layers add up;
# for float32 a thousand, which is still below anything that matters. Of int8, LiteRT's weights of
# 8 bits, it is what seldom changes a class.
ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2, "int8": 0.2}
# Images of noise, where a network has no examples, and the extent of inputs of any size.
_NOISE = 8
_ANY_EXTENT = 128

Arrays = dict[str, np.ndarray]


def allowed_difference(network: keras.Model, precision: str = "float32") -> float:
    """The `ROUNDING` of the least precise layer, in nested networks too, or of `precision` if that
    is less so."""
    layers = [layer for layer, _ in layers_in(read_graphs(network))]
    types = {layer.compute_dtype for layer in layers} | {precision}
    return max(ROUNDING.get(kind, 0.0) for kind in types)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far served outputs are from those of the trained network.

    Attributes:
        examples: how many images were compared.
        largest: largest difference of a probability, as a fraction of the largest probability
            that the trained network gives for that image. A fraction, since with 1000 classes
            and little training all probabilities are near 0.001, and so are all differences. Of
            another output, such as features, a fraction of its largest value over all images: it
            has no scale of its own, and for one image a layer of rectifiers may give next to
            nothing, of which any rounding would be a multiple. Of an output that holds no
            floating point numbers, such as the number of a class, the fraction of its values
            that are others. Of several outputs, that of the worst.
        agreement: fraction of the images with the same most probable class, or with the same
            values of an output without floating point numbers; None if there are no classes.
        mean: mean difference, as a fraction as well; of several outputs, that of the worst.
        worst: the output that `largest` is of, unless that is `probabilities` or the only one.
    """

    examples: int
    largest: float
    agreement: float | None
    mean: float = 0.0
    worst: str | None = None

    def __str__(self) -> str:
        of = f" of {self.worst}" if self.worst else ""
        agreement = "" if self.agreement is None else f", same class {self.agreement:.1%}"
        return f"largest {self.largest:.1e}{of}, mean {self.mean:.1e}{agreement}"


@dataclasses.dataclass(frozen=True)
class Examples:
    """Images to compare on, in the form of each signature.

    Attributes:
        inputs: what the network takes, by `forms.input_specs`.
        decoded: uint8 images, which may differ in size; empty without preprocessing.
        encoded: files of the same images.
        preprocessing: what made `inputs` of them.
        origin: where they are from, in words.
    """

    inputs: Mapping[str, tf.Tensor]
    decoded: Sequence[tf.Tensor] = ()
    encoded: Sequence[bytes] = ()
    preprocessing: Preprocessing | None = None
    origin: str = "images of noise"

    def __len__(self) -> int:
        return int(next(iter(self.inputs.values())).shape[0])

    @classmethod
    def of_images(
        cls,
        encoded: Sequence[bytes],
        preprocessing: Preprocessing,
        origin: str = "",
        names: Sequence[str] = (),
    ) -> Examples:
        """Examples of encoded images.

        Args:
            encoded: the content of each file.
            preprocessing: what is done to an image before the network sees it.
            origin: where they are from, in words.
            names: those of the files, for messages. Default: their numbers.

        Raises:
            ExportFailed: one is no image.
        """
        decoded = []
        for number, contents in enumerate(encoded):
            try:
                decoded.append(preprocessing.decode(contents))
            except tf.errors.InvalidArgumentError as error:
                name = names[number] if names else str(number)
                raise ExportFailed(
                    f"example {name} is no JPEG, PNG, GIF or WebP image, or a damaged one"
                ) from error
        inputs = {"images": tf.stack([preprocessing(image) for image in decoded])}
        return cls(inputs, decoded, tuple(encoded), preprocessing, origin)

    @classmethod
    def of_noise(cls, network: keras.Model) -> Examples:
        """Seeded noise for a network whose preprocessing is not known: half in 0..255, half
        normal, since either may be what it takes."""
        random = np.random.default_rng(0)
        inputs = {}
        for name, spec in input_specs(network).items():
            shape = (_NOISE // 2, *(extent or _ANY_EXTENT for extent in spec.shape[1:]))
            pixels, normal = random.uniform(0, 255, shape), random.normal(size=shape)
            values = np.concatenate([pixels, normal]) if spec.dtype.is_floating else pixels % 2
            inputs[name] = tf.cast(values, spec.dtype)
        return cls(inputs)


def expected_outputs(
    network: keras.Model, examples: Examples, crops: int = 1
) -> tuple[Arrays, Arrays]:
    """What the network gives for the examples: for its own inputs, and for the crops of images."""
    alone = _run(network, examples.inputs)
    if crops == 1 or not examples.decoded or examples.preprocessing is None:
        return alone, alone
    of_crops = [
        _run(network, {"images": crop_views(image, examples.preprocessing, crops)})
        for image in examples.decoded
    ]
    return alone, {
        name: np.stack([found[name].mean(axis=0) for found in of_crops]) for name in alone
    }


def compare(
    folder: Path, network: keras.Model, examples: Examples, crops: int = 1
) -> dict[str, Comparison]:
    """Loads the SavedModel in `folder` and runs `examples` through each of its signatures.

    Args:
        folder: a SavedModel that `signatures.save_signatures` wrote.
        network: the network before anything was folded, with the outputs that are served.
        examples: at least one.
        crops: how many crops of an image the signatures average over.

    Returns:
        The comparison of each signature, by its name.
    """
    served = tf.saved_model.load(str(folder)).signatures
    alone, of_crops = expected_outputs(network, examples, crops)
    found = {"serving_default": compared(served["serving_default"](**examples.inputs), alone)}
    if "serving_uint8" in served:
        # Decoded images may differ in size, so each is a batch of its own.
        answers = [served["serving_uint8"](images=image[None]) for image in examples.decoded]
        joined = {name: np.concatenate([one[name] for one in answers]) for name in of_crops}
        found["serving_uint8"] = compared(joined, of_crops)
    if "serving_bytes" in served:
        answer = served["serving_bytes"](image_bytes=tf.constant(list(examples.encoded)))
        found["serving_bytes"] = compared(answer, of_crops)
    return found


def compared(answer: Mapping[str, object], expected: Arrays) -> Comparison:
    """The comparison of outputs with those of the trained network, by their names."""
    largest: dict[str, float] = {}
    means = []
    for name, wanted in expected.items():
        if not np.issubdtype(wanted.dtype, np.floating):
            largest[name] = float(np.mean(_others(answer[name], wanted)))
            means.append(largest[name])
            continue
        rows = wanted.reshape(len(wanted), -1).astype(np.float64)
        given = np.asarray(answer[name], np.float64).reshape(rows.shape)
        axis = 1 if name == PROBABILITIES else None
        scale = np.abs(rows).max(axis=axis, keepdims=True, initial=np.finfo(np.float32).tiny)
        difference = np.abs(given - rows) / scale
        # A maximum of NaN is NaN, which no bound allows.
        largest[name] = float(difference.max())
        means.append(difference.mean())
    name = PROBABILITIES if PROBABILITIES in expected else next(iter(expected))
    # Of NaN it finds the first, which is the worst, too.
    worst = list(largest)[int(np.argmax(list(largest.values())))] if largest else None
    return Comparison(
        examples=len(expected[name]),
        largest=float(np.max(list(largest.values()), initial=0.0)),
        agreement=_agreement(answer[name], expected[name], name == PROBABILITIES),
        mean=float(np.max(means, initial=0.0)),
        worst=worst if len(largest) > 1 and worst != PROBABILITIES else None,
    )


def _others(given: object, wanted: np.ndarray) -> np.ndarray:
    """Of rows [N, values] without floating point numbers, which values are not as they should be;
    bytes may come as NumPy stores them, all of one length."""
    return np.asarray(given).astype(wanted.dtype).reshape(len(wanted), -1) != wanted.reshape(
        len(wanted), -1
    )


def _agreement(given: object, wanted: np.ndarray, probable: bool) -> float | None:
    """See `Comparison.agreement`.

    Args:
        given, wanted: an output, with the batch first.
        probable: whether it holds probabilities.
    """
    if not np.issubdtype(wanted.dtype, np.floating):
        return float(np.mean(~_others(given, wanted).any(axis=1)))
    rows = [np.asarray(x).reshape(len(wanted), -1) for x in (given, wanted)]
    if rows[1].shape[1] > 1:
        return float(np.mean(rows[0].argmax(1) == rows[1].argmax(1)))
    # One probability is that of one class, of two.
    return float(np.mean((rows[0] > 0.5) == (rows[1] > 0.5))) if probable else None


def _run(network: keras.Model, inputs: Mapping[str, tf.Tensor]) -> Arrays:
    network = served_network(network)
    structure = keras.tree.pack_sequence_as(network.input, list(inputs.values()))
    outputs = network(structure, training=False)
    count = len(next(iter(inputs.values())))
    for name, x in outputs.items():
        if len(x.shape) and x.shape[0] != count:
            raise ExportFailed(
                f"output {name!r} has shape {tuple(x.shape)} for a batch of {count}: a server "
                "needs the batch as the first dimension"
            )
    return {
        name: tf.cast(x, tf.float32).numpy() if x.dtype.is_floating else x.numpy()
        for name, x in outputs.items()
    }
