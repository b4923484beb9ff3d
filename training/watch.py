"""What a run writes for TensorBoard: scalars, percentiles of layers, a profile of some steps."""

from __future__ import annotations

import os
from collections.abc import Mapping

import keras
import tensorflow as tf

from . import data, run_directory
from .data import Inputs
from .failures import explained
from .percentiles import Percentiles, choose
from .settings import Settings
from .summaries import Summaries

# The percentiles are those of one batch of held-out images, of at most this many: it has to fit
# beside the training step, whatever the global batch is.
WATCHED_IMAGES = 128


class Watch:
    """Writes into the folder `tensorboard` of a run. For the process that reports: the chief.

    Args:
        settings: those of the run.
        inputs: its data.
        model: the network that is trained, without auxiliary heads.
        run_dir: an existing folder.
        first_step: the step that the run goes on from.

    Raises:
        BadFlags: --bn_percentiles names a layer that is not there.
        RunFailed: the folder cannot be written.
    """

    def __init__(
        self, settings: Settings, inputs: Inputs, model: keras.Model, run_dir: str, first_step: int
    ) -> None:
        self._folder = os.path.join(run_dir, run_directory.TENSORBOARD)
        self._summaries = Summaries(self._folder, first_step)
        self._profiled = tuple(settings.profile_steps)
        self._profiling = False
        self._percentiles: Percentiles | None = None
        chosen = choose(model, settings.bn_percentiles)
        if chosen:
            size = min(settings.batch_size, inputs.evaluation.examples, WATCHED_IMAGES)
            held_out = data.evaluation_batches(inputs.evaluation, inputs.preprocessing, size)
            with explained(inputs.evaluation, inputs.preprocessing):
                images = next(iter(held_out))[0]
            self._percentiles = Percentiles(model, chosen, images)

    def before(self, step: int) -> None:
        """Called before the steps behind `step` are done; the loop stops at --profile_steps."""
        if self._profiled and self._profiled[0] <= step < self._profiled[1] and not self._profiling:
            tf.profiler.experimental.start(self._folder)
            self._profiling = True

    def after(self, step: int) -> None:
        """Called when the steps up to `step` are done."""
        if self._profiling and step >= self._profiled[1]:
            self._end_profile()

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the scalars `values`, and the percentiles of now."""
        percentiles = self._percentiles.measure() if self._percentiles else {}
        shown = {name: value for name, value in values.items() if name != "step"}
        self._summaries.write(step, {**shown, **percentiles})
        self._summaries.flush()

    def sync(self) -> None:
        """Makes sure that all scalars are on the disk."""
        self._summaries.sync()

    def close(self) -> None:
        """Ends the files."""
        if self._profiling:  # The last step came before the end of the profile.
            self._end_profile()
        self._summaries.close()

    def _end_profile(self) -> None:
        tf.profiler.experimental.stop()
        self._profiling = False
