"""What bnzoo-export does: fold, trace, write aside, compare, publish."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from pathlib import Path

import keras
import tensorflow as tf

import bnzoo.surgery
from bnzoo.surgery import FoldReport

from . import other_runtimes, provenance
from .crops import refused_crops
from .errors import ExportFailed, one_line, reason
from .first_difference import first_difference
from .forms import in_precision
from .network_checks import check_inputs, check_outputs, outputs_of
from .other_runtimes import RUNTIMES
from .reproducible import make_reproducible
from .served import check_kind, check_labels, served_network, top_of
from .settings import Settings
from .signatures import build_signatures, save_signatures
from .sources import Source, examples_of, named_assets, of_keras_file, of_runs
from .verify import (
    Comparison,
    Examples,
    allowed_difference,
    compare,
    compared,
)
from .versions import written_aside
from .warmup import require_messages, write_warmup


def run_export(settings: Settings) -> Path:
    """Exports, and prints what it did.

    Returns:
        The SavedModel's folder.

    Raises:
        ExportFailed: see the message.
    """
    try:
        return _run_export(settings)
    except (ExportFailed, OSError):
        raise
    except tf.errors.OpError as error:
        # A full disk, among others: TensorFlow has no OSError.
        raise ExportFailed(f"TensorFlow cannot write or run: {reason(error)}") from error
    except Exception as error:
        # A network may have any layer in it, and so fail in any way when it is run or traced.
        raise ExportFailed(f"the network cannot be exported: {one_line(error)}") from error
    finally:
        # Networks and graphs hold each other: many exports in one process would pile up.
        gc.collect()


def _run_export(settings: Settings) -> Path:
    # What is missing is told now and not after minutes of work.
    if settings.warmup:
        require_messages()
    if settings.onnx:
        other_runtimes.require_onnx()
    source = _source(settings)
    check_inputs(source.network, source.preprocessing)
    examples = examples_of(source, settings.examples_dir, settings.max_megapixels)
    trained = served_network(source.network, settings.outputs, settings.features)
    check_outputs(trained, settings)
    expected = outputs_of(trained, examples)
    check_kind(trained, settings.outputs, expected, top_of(source.network))
    check_labels(source.labels, expected)
    folded, report = _folded(trained, source)
    print(report.summary)
    for fate in report.batch_norms:
        if fate.outcome != "folded":
            print(f"  {fate}")
    lowered = _lowered(folded, settings.precision)
    checks = _Checks(settings, trained, lowered, report, examples)
    with written_aside(settings.out, settings.version) as aside:
        signatures = build_signatures(
            lowered,
            source.preprocessing,
            source.labels,
            form=settings.variables,
            top_k=settings.top_k,
            crops=settings.crops,
            step=settings.step,
            max_megapixels=settings.max_megapixels,
        )
        # Inside, so that what a killed export leaves of it goes with the rest.
        with tempfile.TemporaryDirectory(dir=aside.folder) as scratch:
            save_signatures(signatures, named_assets(source, Path(scratch)), aside.folder)
        make_reproducible(aside.folder)
        print(f"Difference to the unfolded network on {len(examples)} {examples.origin}:")
        found = compare(aside.folder, trained, examples, settings.crops)
        for name, comparison in found.items():
            checks.judge(name, comparison, settings.precision)
        if settings.runtimes():
            form = other_runtimes.float32_form(folded)
            for name in settings.runtimes():
                run = other_runtimes.write(RUNTIMES[name], form, aside.folder)
                found[name] = compared(run(examples.inputs), expected)
                checks.judge(name, found[name], RUNTIMES[name].precision)
        if settings.warmup:
            image = examples.encoded[0] if examples.encoded else b""
            write_warmup(aside.folder, settings.warmup, image)
        _write_provenance(aside.folder, settings, source, report, found, checks.allowed, examples)
    published = settings.out / str(aside.version)
    print(f"Wrote {published}")
    return published


def _source(settings: Settings) -> Source:
    if settings.keras_model is not None:
        source = of_keras_file(settings.keras_model, settings.preprocessing, settings.labels)
    else:
        source = of_runs(settings.runs)
    if source.preprocessing is not None:
        refused = refused_crops(settings.crops, source.preprocessing)
        if refused:
            raise ExportFailed(refused)
    return source


def _folded(network: keras.Model, source: Source) -> tuple[keras.Model, FoldReport]:
    try:
        return bnzoo.surgery.fold_batch_norm(network, return_report=True)
    except (TypeError, ValueError) as error:
        raise ExportFailed(f"the network of {source.name} cannot be folded: {error}") from error


def _lowered(network: keras.Model, precision: str) -> keras.Model:
    try:
        return in_precision(network, precision)
    except (TypeError, ValueError) as error:
        raise ExportFailed(f"the network cannot be had in {precision}: {error}") from error


class _Checks:
    """Judges what was written by how far it is from the trained network."""

    def __init__(
        self,
        settings: Settings,
        trained: keras.Model,
        exported: keras.Model,
        report: FoldReport,
        examples: Examples,
    ) -> None:
        self._settings = settings
        self._trained, self._exported = trained, exported
        self._report, self._examples = report, examples
        self.allowed: dict[str, float] = {}

    def judge(self, name: str, found: Comparison, precision: str) -> None:
        """Prints the comparison.

        Raises:
            ExportFailed: the difference is more than is allowed.
        """
        print(f"  {name}: {found}")
        allowed = self._settings.max_difference
        if allowed is None:
            allowed = allowed_difference(self._trained, precision)
        self.allowed[name] = allowed
        if found.largest <= allowed:
            return
        start = first_difference(
            self._trained, self._exported, self._report, self._examples.inputs, allowed
        )
        start = start or f"the folded network does not, so it is what was made of it for {name}"
        what = f"output {found.worst} of {name}" if found.worst else name
        raise ExportFailed(
            f"{what} differs from the unfolded network by {found.largest:.1e}, more than "
            f"--max_difference={allowed:g}; {start}: nothing was published"
        )


def _write_provenance(
    folder: Path,
    settings: Settings,
    source: Source,
    report: FoldReport,
    found: Mapping[str, Comparison],
    allowed: Mapping[str, float],
    examples: Examples,
) -> None:
    origin = examples.origin
    if source.examples_dir is not None or settings.examples_dir is not None:
        # Without the place, which is this machine's business.
        place = str(settings.examples_dir or source.examples_dir)
        if origin.endswith(f" of {place}"):
            origin = origin.removesuffix(place) + "a folder"
    provenance.write(
        folder,
        source.provenance,
        settings.form(),
        report,
        found,
        allowed,
        f"{len(examples)} {origin}",
    )
