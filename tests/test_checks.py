"""What is no number, no axis, no shape: one line with the argument, the rule and the value.

The tests of each layer hold its own arguments; here are the checks, and what takes them from afar.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import keras
import numpy as np
import pytest

from bnzoo import models
from bnzoo.checks import check_bool, check_number, check_whole, is_finite, is_whole
from bnzoo.initializers import HeNormal
from bnzoo.layers import SlidingSpatialPyramidPooling, SpatialPyramidPooling
from bnzoo.models.pooling import PaddedMaxPooling2D
from bnzoo.models.scaled_initializer import Scaled
from bnzoo.population import PopulationStatistics
from bnzoo.preprocessing import Preprocessing

WHOLE = [0, -3, np.int64(5), np.uint8(7)]
FINITE = [*WHOLE, 0.5, -1e30, np.float32(0.1), np.float16(2), Fraction(1, 3)]
NEITHER = [True, False, np.True_, None, "1", b"1", 1j, [1], (1,), {}, np.array([1, 2]), object()]


def test_what_is_a_number() -> None:
    assert all(is_whole(value) for value in WHOLE)
    assert all(is_finite(value) for value in FINITE)
    assert not any(is_whole(value) or is_finite(value) for value in NEITHER)
    assert not any(is_whole(value) for value in [0.5, 1.0, np.float32(2)])
    assert not any(is_finite(value) for value in [float("nan"), float("inf"), -np.float32("inf")])
    assert not any(is_finite(value) for value in [10**400, Fraction(10**400)])


@pytest.mark.parametrize("value", [*NEITHER, float("nan"), float("inf"), -1])
def test_what_is_none_is_refused(value: Any) -> None:
    for check in (check_number, check_whole):
        with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
            check("it", value, 0)
        rule = "finite" if check is check_number else "whole"
        assert str(error.value) == f"`it` must be a {rule} number >= 0. Received: it={value!r}"


@pytest.mark.parametrize(
    ("value", "ends", "open_ends", "rule"),
    [
        (0, (0, 1), False, None),
        (1, (0, 1), False, None),
        (-1, (0, 1), False, "a number in [0, 1]"),
        (2, (0, 1), False, "a number in [0, 1]"),
        (0, (0, 1), True, "a number in (0, 1)"),
        (1, (0, 1), True, "a number in (0, 1)"),
        (0, (0,), False, None),
        (0, (0,), True, "a finite number > 0"),
        (-1e30, (), False, None),
        ("x", (), False, "a finite number"),
    ],
)
def test_ends(value: Any, ends: tuple[float, ...], open_ends: bool, rule: str | None) -> None:
    if rule is None:
        check_number("it", value, *ends, open_ends=open_ends)
    else:
        with pytest.raises(ValueError) as error:  # noqa: PT011 the whole text is compared
            check_number("it", value, *ends, open_ends=open_ends)
        assert str(error.value) == f"`it` must be {rule}. Received: it={value!r}"


@pytest.mark.parametrize("value", [0, 1, None, "", "false", np.True_, []])
def test_only_true_and_false_are_booleans(value: Any) -> None:
    check_bool("mirror", True)
    check_bool("mirror", False)
    with pytest.raises(ValueError, match=r"^`mirror` must be True or False\. Received: mirror="):
        check_bool("mirror", value)


def test_none_where_it_is_allowed() -> None:
    check_number("it", None, or_none=True)
    check_whole("it", None, or_none=True)
    with pytest.raises(ValueError, match=r"`it` must be None or a whole number >= 1\. .*it=0"):
        check_whole("it", 0, or_none=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.mnist_mlp(classes=True), "`classes` must be a whole number.* classes=True"),
        (lambda: models.mnist_mlp(classes="10"), "`classes` must .* Received: classes='10'"),
        (lambda: models.mnist_mlp(input_shape=28), "`input_shape` must .* input_shape=28"),
        (lambda: models.mnist_mlp(input_shape="abc"), "`input_shape` must .* input_shape='abc'"),
        (lambda: models.mnist_mlp(momentum="0.9"), "`momentum` must .* momentum='0.9'"),
        (lambda: models.mnist_mlp(initial_stddev=True), "Received: initial_stddev=True"),
        (lambda: models.bn_inception(input_shape=(True, 64, 3)), r"input_shape=\(True, 64, 3\)"),
        (lambda: models.bn_inception(dropout=None), r"in \[0, 1\]\. Received: dropout=None"),
        (lambda: models.bn_inception(pool_projection="96"), "of 96, 128.*pool_projection='96'"),
        (lambda: models.bn_inception(epsilon=None), r"`epsilon` must .* Received: epsilon=None"),
        (lambda: models.prelu_net_14(width_multiplier="1"), "Received: width_multiplier='1'"),
        (lambda: models.prelu_net_14(fc_stddev=0.01), "three numbers.*Received: fc_stddev=0.01"),
        (lambda: models.prelu_net_14(fc_stddev=(1, None, 1)), "`fc_stddev` must .*=None"),
        (lambda: models.feature_extractor(models.mnist_mlp(), 1), "Received: endpoints=1"),
        (lambda: models.feature_extractor(models.mnist_mlp(), [1]), r"Received: endpoints=\[1\]"),
        (lambda: SpatialPyramidPooling(None), "`bins` must .* Received: bins=None"),
        (lambda: SpatialPyramidPooling((2, True)), r"`bins` must .* bins=\(2, True\)"),
        (lambda: SpatialPyramidPooling(data_format=1), "`data_format` must .* data_format=1"),
        (lambda: SlidingSpatialPyramidPooling(3), "`window` must .* Received: window=3"),
        (lambda: PaddedMaxPooling2D(pads=1), "`pads` must .* Received: pads=1"),
        (lambda: Scaled("ones", "2"), "`scale` must be a finite number.* scale='2'"),
        (lambda: Preprocessing((8, 8), channels=True), "`channels` must .* channels=True"),
        (lambda: Preprocessing((8, True)), r"`image_size` must .* image_size=\(8, True\)"),
        (lambda: PopulationStatistics([], every=True), "`every` must be None or .* every=True"),
    ],
)
def test_arguments_that_are_no_numbers(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_numpy_numbers_are_taken() -> None:
    size = np.array([64, 64, 3])
    model = models.prelu_net_14(
        input_shape=size, classes=np.int64(3), width_multiplier=np.float32(0.0625)
    )
    assert model.input_shape == (None, 64, 64, 3)
    assert model.output_shape == (None, 3)
    assert keras.models.clone_model(model).output_shape == (None, 3)
    assert Preprocessing((8, 8), np.int64(1)).to_json() == Preprocessing((8, 8), 1).to_json()
    assert SpatialPyramidPooling(tuple(np.array([2, 1]))).get_config()["bins"] == (2, 1)
    assert HeNormal(np.float32(0.5), groups=np.int64(2), seed=np.int64(3)).get_config() == (
        HeNormal(0.5, groups=2, seed=3).get_config()
    )
