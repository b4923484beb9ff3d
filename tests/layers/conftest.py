"""What the tests of all layers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bnzoo.layers import kernel_or_equations


@pytest.fixture(scope="module", autouse=True)
def _kernel_for_small_inputs_too() -> Iterator[None]:
    """Tests have small inputs, for which a graph takes the equations; see `modes.small`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_or_equations, "KERNEL_MIN_VALUES", 0)
        yield
