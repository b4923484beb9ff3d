"""TF-slim's Inception V2: a checkpoint of TensorFlow, or the released archive of one."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zlib

import numpy as np
import tensorflow as tf

from .names import CLASSIFIER, CONVOLUTIONS
from .tensors import Family, Part, Tensors

_SCOPE = "InceptionV2"
_STEM = "conv1_7x7_s2"
_BATCH_NORM = ("beta", "moving_mean", "moving_variance")


def _read(path: str) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint: one file, the prefix of several, or a tar of either."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if os.path.isfile(path) and tarfile.is_tarfile(path):
                path = os.path.join(folder, _extract(path, folder))
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise ValueError(f"a damaged archive: {error}") from error
        try:
            reader = tf.train.load_checkpoint(path)
            names = reader.get_variable_to_shape_map()
            return {name: np.asarray(reader.get_tensor(name)) for name in names}
        except (tf.errors.OpError, IndexError) as error:  # IndexError: a file that is cut off.
            raise ValueError(str(error).splitlines()[0]) from error


def _extract(path: str, folder: str) -> str:
    """Extracts the checkpoint in a tar file to `folder`, and returns its name there."""
    names = []
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is None:  # A folder.
                continue
            # Only the last part of a name counts, so that nothing is written elsewhere.
            names.append(os.path.basename(member.name))
            with open(os.path.join(folder, names[-1]), "wb") as file:
                shutil.copyfileobj(content, file)
    # A checkpoint is one file in TensorFlow's first format; in its second, several and an index.
    found = {name.removesuffix(".index") for name in names if name.endswith((".ckpt", ".index"))}
    if len(found) != 1:
        raise ValueError(f"an archive of {', '.join(names) or 'nothing'}: not one checkpoint")
    return found.pop()


def _parts(layer: str, tensors: Tensors) -> list[Part]:
    if layer == CLASSIFIER:
        name = f"{_SCOPE}/Logits/Conv2d_1c_1x1"
        return [Part("kernel", f"{name}/weights", "11IO"), Part("bias", f"{name}/biases")]
    name = f"{_SCOPE}/{CONVOLUTIONS[layer].slim}"
    if layer == _STEM:
        return [
            Part("depthwise_kernel", f"{name}/depthwise_weights"),
            Part("pointwise_kernel", f"{name}/pointwise_weights"),
            Part("bias", f"{name}/biases"),
        ]
    batch_norm = [Part(role, f"{name}/BatchNorm/{role}") for role in _BATCH_NORM]
    return [Part("kernel", f"{name}/weights"), *batch_norm]


FAMILY = Family(
    format="a TF-slim checkpoint of Inception V2, or a tar of one",
    read=_read,
    form=lambda tensors: "slim",
    parts=_parts,
)
