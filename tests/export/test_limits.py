from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from bnzoo.preprocessing import Preprocessing
from export.limits import LONGEST, Limit
from export.signatures import build_signatures

COVERING = Preprocessing((12, 10), resize="short_side", crop_fraction=0.5, scale=60)


def png(height: int, width: int) -> bytes:
    random = np.random.default_rng(height)
    image = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return tf.io.encode_png(image).numpy()


def test_the_resized_image_is_bounded() -> None:
    """By what it becomes, for each size just within the limit and just beyond it."""
    limit = Limit.of(COVERING, 64.0)
    assert limit.covered == (24, 20)
    for size, allowed in (
        ((12, 1000), True),
        ((12, 1001), False),
        ((1200, 10), True),
        ((1201, 10), False),
        ((1, 83), True),
        ((1, 84), False),
        ((1, 64_000_000), False),
        ((64_000_000, 1), False),
        ((8000, 8000), True),
        ((8000, 8001), False),
        ((0, 0), True),
    ):
        assert bool(limit.allows(tf.constant(size, tf.int64))) == allowed, size
    pixels = LONGEST * 24 * 20
    assert COVERING.cover(tf.zeros((12, 1000, 3)), [24, 20]).shape == (24, 2000, 3)
    assert pixels == 24 * 2000
    both = limit.allows(tf.constant([[12, 1000], [12, 1001]], tf.int64))
    assert both.numpy().tolist() == [True, False]


def test_where_the_aspect_ratio_is_given_up_there_is_no_limit_of_length() -> None:
    for resize in ("direct", "central_crop"):
        preprocessing = Preprocessing((12, 12), resize=resize, crop_fraction=0.5)
        assert Limit.of(preprocessing, 64.0, 10) == Limit(64_000_000)
        assert Limit.of(preprocessing, 64.0, 144).covered == (24, 24)


def signatures(preprocessing: Preprocessing, crops: int) -> dict[str, Callable]:
    image = keras.Input((*preprocessing.image_size, 3))
    x = keras.layers.GlobalAveragePooling2D()(image)
    network = keras.Model(image, keras.layers.Dense(3, activation="softmax")(x))
    return build_signatures(network, preprocessing, crops=crops)


@pytest.mark.parametrize(
    ("resize", "size", "crops"),
    [("short_side", (12, 10), 1), ("short_side", (12, 10), 10), ("direct", (10, 10), 144)],
)
def test_strips_are_refused_by_both_signatures(
    resize: str, size: tuple[int, int], crops: int
) -> None:
    preprocessing = Preprocessing(size, resize=resize, crop_fraction=0.5, scale=60)
    served = signatures(preprocessing, crops)
    strips = [png(1, 5000), png(20, 20), png(5000, 1)]
    match = (
        r"so narrow that they would be resized to more than 100 times the 2\dx20 pixels .*"
        r"at position\] \[0 2\] \[of height and width\] \[\[1 5000\]\[5000 1\]\]"
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=match):
        served["serving_bytes"](image_bytes=tf.constant(strips))
    for shape in ((1, 5000, 3), (5000, 1, 3)):
        match = rf"so narrow .*of height and width\] \[{shape[0]} {shape[1]}\]"
        with pytest.raises(tf.errors.InvalidArgumentError, match=match):
            served["serving_uint8"](images=tf.zeros((2, *shape), tf.uint8))
    # What is long and within the limit is as before.
    long = tf.io.decode_png(png(4, 300))
    answers = [
        served["serving_bytes"](image_bytes=tf.constant([png(4, 300)]))["probabilities"],
        served["serving_uint8"](images=long[None])["probabilities"],
    ]
    # A graph may multiply by the reciprocal of the scale.
    np.testing.assert_allclose(*answers, rtol=1e-6)
    if crops == 1:
        expected = served["serving_default"](images=preprocessing(long)[None])
        np.testing.assert_allclose(answers[0], expected["probabilities"], rtol=1e-6)


def test_a_strip_among_the_examples_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from export import saved_model
    from tests.export.runs import write_run

    run_dir = write_run(tmp_path / "run", examples=1)
    preprocessing = Preprocessing((12, 10), resize="short_side", mean=(1, 2, 3), scale=60)
    (run_dir / "preprocessing.json").write_text(preprocessing.to_json())
    (run_dir / "examples" / "strip.png").write_bytes(png(1, 120))
    assert saved_model.main(["bnzoo-export", str(run_dir), str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "has 1x120 pixels, which serving_bytes refuses as so narrow" in line
    assert not (tmp_path / "out").exists()
