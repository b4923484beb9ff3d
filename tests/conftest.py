"""What every test run shares: devices, seeds, and what happens where a test cannot run."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator

import keras
import pytest
import tensorflow as tf

IN_CI = os.environ.get("CI", "").lower() == "true"
MUST_RUN_IN_CI = ("data", "peers")
SEED = 20150206

# tf.distribute tests need two replicas on a machine without accelerators. TensorFlow fixes its
# devices at first use, so this must come before any test creates a tensor.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


def _missing_data() -> str | None:
    """Why the tests marked `data` cannot run here, or None if they can."""
    folder = os.environ.get("BNZOO_TEST_DATA", "")
    if not folder:
        return "BNZOO_TEST_DATA is not set: it names the folder of the real data"
    if not os.path.isdir(folder):
        return f"BNZOO_TEST_DATA must name a folder. Received: {folder}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test marked `data` without the data; `peers` skip by their own importorskip."""
    reason = _missing_data() if item.get_closest_marker("data") else None
    if reason:
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a marked test must run: its skip, wherever it comes from, is a failure."""
    report = yield
    if IN_CI and report.skipped and any(item.get_closest_marker(mark) for mark in MUST_RUN_IN_CI):
        report.outcome, report.longrepr = "failed", f"skipped in CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """In CI a file must be collected: an importorskip at its top is a failure."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped in CI: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def _seeded() -> None:
    keras.utils.set_random_seed(SEED)


@pytest.fixture(autouse=True, scope="module")
def _seeded_fixtures() -> None:
    """A file's own fixtures are made before any of its tests, and `_seeded`, begins."""
    keras.utils.set_random_seed(SEED)


@pytest.fixture(autouse=True, scope="module")
def _memory() -> Iterator[None]:
    """Gives back what a file's networks hold: cycles of them wait for the collector."""
    yield
    keras.backend.clear_session()
    gc.collect()


@pytest.fixture
def data_folder() -> str:
    """The folder of real data; for tests marked `data`."""
    return os.environ["BNZOO_TEST_DATA"]
