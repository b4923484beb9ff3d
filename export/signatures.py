"""The functions that a served network offers, and their SavedModel.

All of them give the same outputs, each with the batch as its first dimension and of a type that
TensorFlow Serving can write as JSON. Those of a classifier:

- `probabilities`, float32 [N, classes];
- `scores`, float32 [N, k], and `classes`, string [N, k]: the k most probable classes, best first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing

from .chunks import in_chunks, step_size
from .crops import crop_views
from .encoded import decode_images
from .errors import ExportFailed
from .forms import VARIABLES, build_form, input_specs
from .limits import Limit
from .served import PROBABILITIES, served_network
from .settings import MAX_MEGAPIXELS, TOP_K

Outputs = dict[str, tf.Tensor]


def build_signatures(
    network: keras.Model,
    preprocessing: Preprocessing | None = None,
    labels: Sequence[str] | None = None,
    *,
    form: str = VARIABLES,
    precision: str = "float32",
    top_k: int = TOP_K,
    crops: int = 1,
    step: int | None = None,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> dict[str, tf.types.experimental.ConcreteFunction]:
    """The signatures of `network`, traced.

    - `serving_default`: `images`, float32 [N, height, width, channels], as the network takes
      them, so after the preprocessing;
    - `serving_uint8`: `images`, uint8 [N, any height, any width, channels], as decoded;
    - `serving_bytes`: `image_bytes`, string [N], each one JPEG, PNG, GIF or WebP file.

    Args:
        network: from images [N, height, width, channels] to probabilities [N, classes], or to a
            dict of outputs by their names: see `served.served_network`. Without preprocessing
            its inputs may be any.
        preprocessing: what the second and the third do to an image before the network sees it.
            Without it there is the first only.
        labels: the name of each class. Without them `classes` are the numbers of the classes, as
            text.
        form, precision: see `forms.build_form`.
        top_k: how many `classes` and `scores` there are, if there are as many classes.
        crops: of an image, in the second and the third: see `crops`. Outputs are averaged.
        step: images that run at a time. Default: `chunks.step_size`.
        max_megapixels: an image of more millions of pixels fails the third instead of its memory;
            one that would be too large when it is resized, the second, too: see `limits`.

    Raises:
        ExportFailed: an output has not the batch as its first dimension.
    """
    if not isinstance(network, keras.Sequential) and isinstance(network.output, dict):
        served = network
    else:
        served = served_network(network)
    core = build_form(served, form, precision)
    for name, spec in core.structured_outputs.items():
        if spec.shape.rank is None or spec.shape.rank == 0 or spec.shape[0] is not None:
            raise ExportFailed(
                f"output {name!r} has shape {spec.shape}: a server needs the batch, of any size, "
                "as the first dimension"
            )
    step = step or step_size(served)
    classify = _classifier_outputs(core, labels, top_k)

    def default(**inputs: tf.Tensor) -> Outputs:
        return classify(in_chunks(core, inputs, step))

    signatures: dict[str, tuple[Callable[..., Outputs], dict[str, tf.TensorSpec]]] = {
        "serving_default": (default, input_specs(served))
    }
    if preprocessing is not None:
        limit = Limit.of(preprocessing, max_megapixels, crops)
        signatures |= _of_images(core, preprocessing, crops, step, limit, classify)
    return {
        name: tf.function(function, autograph=False).get_concrete_function(**specs)
        for name, (function, specs) in signatures.items()
    }


def _of_images(
    core: tf.types.experimental.ConcreteFunction,
    preprocessing: Preprocessing,
    crops: int,
    step: int,
    limit: Limit,
    classify: Callable[[Outputs], Outputs],
) -> dict[str, tuple[Callable[..., Outputs], dict[str, tf.TensorSpec]]]:
    channels = preprocessing.channels
    decoded = tf.TensorSpec((None, None, None, channels), tf.uint8, "images")
    encoded = tf.TensorSpec((None,), tf.string, "image_bytes")
    position = tf.TensorSpec((None,), tf.int32, "position")
    prepared = tf.TensorSpec(
        ((crops,) if crops > 1 else ()) + (*preprocessing.image_size, channels), tf.float32
    )

    def prepare(image: tf.Tensor) -> tf.Tensor:
        if crops == 1:
            return preprocessing(image)
        return crop_views(image, preprocessing, crops)

    def run(images: tf.Tensor) -> Outputs:
        if crops == 1:
            return core(images=images)
        outputs = core(images=tf.reshape(images, (-1, *prepared.shape[1:])))
        return {
            name: tf.reduce_mean(tf.reshape(x, (-1, crops, *x.shape[1:])), axis=1)
            for name, x in outputs.items()
        }

    def some_decoded(images: tf.Tensor) -> Outputs:
        images = limit.checked(images)
        if crops == 1:
            return run(preprocessing(images))
        return run(tf.map_fn(prepare, images, fn_output_signature=prepared))

    def some_encoded(image_bytes: tf.Tensor, position: tf.Tensor) -> Outputs:
        decode = preprocessing.decode
        return run(decode_images(image_bytes, position, decode, prepare, prepared, limit))

    step = max(1, step // crops)
    decoded_step = tf.function(some_decoded, autograph=False).get_concrete_function(images=decoded)
    encoded_step = tf.function(some_encoded, autograph=False).get_concrete_function(
        image_bytes=encoded, position=position
    )

    def all_decoded(images: tf.Tensor) -> Outputs:
        return classify(in_chunks(decoded_step, {"images": images}, step))

    def all_encoded(image_bytes: tf.Tensor) -> Outputs:
        position = tf.range(tf.shape(image_bytes)[0])
        inputs = {"image_bytes": image_bytes, "position": position}
        return classify(in_chunks(encoded_step, inputs, step))

    return {
        "serving_uint8": (all_decoded, {"images": decoded}),
        "serving_bytes": (all_encoded, {"image_bytes": encoded}),
    }


def _classifier_outputs(
    core: tf.types.experimental.ConcreteFunction, labels: Sequence[str] | None, top_k: int
) -> Callable[[Outputs], Outputs]:
    """Adds `scores` and `classes` to the outputs of a network that gives `probabilities`; not of
    each pixel, say, as what a network calls so may be."""
    spec = core.structured_outputs.get(PROBABILITIES)
    if spec is None or spec.shape.rank != 2 or not spec.dtype.is_floating:
        return lambda outputs: outputs
    count = spec.shape[-1]
    names = tf.constant(list(labels or map(str, range(count))))

    def classify(outputs: Outputs) -> Outputs:
        probabilities = tf.cast(outputs[PROBABILITIES], tf.float32)  # They may be float64.
        scores, best = tf.math.top_k(probabilities, k=min(top_k, count))
        classes = tf.gather(names, best)
        return {**outputs, PROBABILITIES: probabilities, "scores": scores, "classes": classes}

    return classify


def save_signatures(
    signatures: Mapping[str, tf.types.experimental.ConcreteFunction],
    assets: Iterable[Path],
    folder: Path,
) -> None:
    """Writes a SavedModel with `signatures` and the files `assets` into `folder`.

    It keeps the variables that the signatures read, each once, and nothing else: no optimizer, no
    seeds, none of Keras' own bookkeeping, which stores every variable a second time.
    """
    root = tf.Module()
    root.parameters_read = _variables_read(signatures.values())
    root.assets = [tf.saved_model.Asset(str(path)) for path in assets]
    # Custom gradients, of a swish among others, would be functions that hold the graph's tensors;
    # nobody asks a server for a gradient.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(root, str(folder), signatures=dict(signatures), options=options)


def _variables_read(
    functions: Iterable[tf.types.experimental.ConcreteFunction],
) -> list[tf.Variable]:
    """Each variable once, in the order of their first use, which is always the same one."""
    read = {}
    for function in functions:
        by_handle = {id(variable.handle): variable for variable in function.graph.variables}
        for captured in function.captured_inputs:
            if id(captured) in by_handle:
                read[id(captured)] = by_handle[id(captured)]
    return list(read.values())
