"""What the tests of all layers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bnzoo.layers import fused


@pytest.fixture(scope="module", autouse=True)
def _kernel_for_small_inputs_too() -> Iterator[None]:
    """Tests have small inputs, for which a graph takes the equations; see `small`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "KERNEL_MIN_VALUES", 0)
        yield


def small(function: Callable) -> Callable:
    """`function`, traced with what bnzoo does for small inputs."""

    def traced(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "KERNEL_MIN_VALUES", 1 << 30)
            return function(*arguments)

    return traced
