"""bnzoo-train: trains a network of bnzoo.models by a recipe, and goes on where it was stopped."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from absl import flags

from . import run_directory
from .command_line import BadFlags, run_command
from .placement import KUBERNETES, PARAMETER_SERVER, Placement, placement
from .settings import Settings, resolve
from .train_flags import TRAIN_FLAGS

PROGRAM = "bnzoo-train"
USAGE = """bnzoo-train --recipe=NAME | --model=NAME [--dataset=NAME] [flags]

Trains a network; the same command again continues where it was stopped. For example:
  bnzoo-train --recipe=bn_x5 --dataset=digits --run_dir=runs/digits --steps=500"""


def run() -> None:
    """The command bnzoo-train."""
    code = main()
    if code:
        # Of processes that train together, the end of TensorFlow would wait for the others, which
        # may be waiting for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv`, as sys.argv, and returns its exit code."""
    return run_command(PROGRAM, USAGE, TRAIN_FLAGS, _command, argv)


def _command(values: flags.FlagValues, arguments: list[str]) -> None:
    if arguments:
        raise BadFlags(f"there are no arguments besides flags. Received: {' '.join(arguments)}")
    given = values.flag_values_dict()
    settings = resolve(given)
    place = placement(given)
    run_dir = given["run_dir"] or os.path.join("runs", default_name(settings))
    run_directory.check_run_dir(run_dir, settings, given["overwrite"])
    train(settings, run_dir, given["overwrite"], place)


def default_name(settings: Settings) -> str:
    """The name of a run's folder if none is given."""
    kept = (letter if letter.isalnum() or letter in "-_." else "_" for letter in settings.dataset)
    return f"{settings.recipe}_{''.join(kept)}"


def train(
    settings: Settings, run_dir: str, overwrite: bool = False, placement: Placement | None = None
) -> None:
    """Trains in `run_dir`, which `run_directory.check_run_dir` has found fit for it.

    Args:
        settings: those of the run.
        run_dir: the folder of the run; made if it is not there.
        overwrite: whether a run that is there is deleted first.
        placement: where to compute; by default on one device.
    """
    # Imported here, as TensorFlow takes seconds and mistakes in the flags are told without it.
    from . import data, loop, strategies, task_server
    from .cluster import find_task
    from .examples import write_examples
    from .networks import build_model
    from .percentiles import choose
    from .stopping import StopRequest

    place = placement or Placement()
    # First, so that a mistake in TF_CONFIG is told also where there is nothing to do. Kubernetes is
    # asked later: of a run that is finished, the pods of the others may be gone.
    early = place.in_cluster and place.cluster != KUBERNETES
    task = find_task(place) if early else None
    if not overwrite and run_directory.is_finished(run_dir, settings):
        print(f"{run_dir} is finished: --overwrite trains it anew")
        return
    if place.in_cluster and not early:
        task = find_task(place)
    if place.strategy == PARAMETER_SERVER and task and not task.is_chief:
        facts = strategies.facts(settings, place, run_dir)
        task_server.serve(task, facts, place.cluster_timeout)
        return
    devices = strategies.open_devices(settings, place, run_dir, task)
    with contextlib.ExitStack() as until_the_end, devices.guarded(), StopRequest() as stop:
        inputs = data.open_inputs(settings)
        devices.check_same_data(inputs)
        model = build_model(settings, inputs, devices)
        choose(model, settings.bn_percentiles)  # A mistake in it is told before a run is made.
        if devices.is_chief:
            run_directory.make(run_dir)
            until_the_end.enter_context(run_directory.locked(run_dir))
            if overwrite:
                run_directory.clear(run_dir)
            loop.write_description(run_dir, settings, inputs)
            write_examples(run_dir, inputs)
            print(
                f"{settings.model} by recipe {settings.recipe} on {settings.dataset}: "
                f"{inputs.train.examples} training and {inputs.evaluation.examples} held-out "
                f"examples, {model.count_params()} parameters; writing to {run_dir}",
                flush=True,
            )
        result = loop.train(settings, inputs, model, run_dir, devices, stop)
    if devices.is_chief:
        print(
            f"{run_dir}: held-out accuracy {result.accuracy:.4f}, top-5 "
            f"{result.top5_accuracy:.4f}, loss {result.loss:.4f} over {result.examples} examples"
        )


if __name__ == "__main__":
    run()
