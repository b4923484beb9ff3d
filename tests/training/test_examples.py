from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing
from training.data import Inputs
from training.examples import COUNT, write_examples
from training.sources import digits


def test_writes_the_first_held_out_images_with_their_class(tmp_path: Path) -> None:
    source = digits()
    test = source.open_split("test")
    preprocessing = Preprocessing(image_size=(32, 32), channels=1)
    inputs = Inputs(source.labels, source.open_split("train"), test, preprocessing, "none", 0.0)
    write_examples(str(tmp_path), inputs)
    names = sorted(os.listdir(tmp_path / "examples"))
    assert len(names) == COUNT
    for position, name in enumerate(names):
        image, label = test.read(tf.constant(position, tf.int64), preprocessing)
        assert name == f"{position:02d}-{label}.png"
        contents = (tmp_path / "examples" / name).read_bytes()
        np.testing.assert_array_equal(preprocessing.decode(contents), image)
