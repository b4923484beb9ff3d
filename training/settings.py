"""What decides a run: every flag with the recipe's values filled in, checked as a whole."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .command_line import BadFlags
from .recipes import RECIPE_OF_MODEL, RECIPES, Recipe

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
AUGMENTATIONS = ("none", "shift", "crop")
SCHEDULES = ("exponential", "steps")
# They change nothing of what a run computes.
WATCHING = ("bn_percentiles", "profile_steps")
DIGITS = "digits"
FOLDER = "folder:"
# The stem that the Inception networks get for images up to this many pixels a side.
SMALL_IMAGE = 64
# TensorFlow's limit: shapes are of 32 bits.
LARGEST_BATCH = 2**31 - 1

_TFDS_NAME = re.compile(r"[a-z0-9_]+(:[a-z0-9_]+)?(/[\w.\-]+)*(:\d+\.\d+\.\d+)?", re.IGNORECASE)

_BOOLEANS = {"true": True, "false": False}

_LAYER = re.compile(r"[^\s:]+(:\d+)?")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One value for each flag that decides what a run computes; None: see the flag's help."""

    recipe: str
    model: str
    model_args: Mapping[str, Any]
    precision: str
    synchronized_batch_norm: bool
    dataset: str
    data_dir: str | None
    train_split: str
    eval_split: str | None
    image_size: int | None
    batch_size: int
    augmentation: str | None
    photometric: float
    steps: int
    learning_rate: float
    momentum: float
    weight_decay: float
    decay_rate: float
    decay_epochs: float
    staircase: bool
    learning_rate_schedule: str
    boundaries: Sequence[float]
    clip_norm: float | None
    polyak: float | None
    population_batches: int
    seed: int
    checkpoint_every: int
    evaluate_every: int | None
    log_every: int
    bn_percentiles: Sequence[str]
    profile_steps: Sequence[int]

    def conflicts(self, begun: Mapping[str, Any]) -> list[str]:
        """The flags that keep a run from going on that was begun with `begun`, of config.json.

        It may be told to do more steps, and be watched in another way.
        """
        steps = begun.get("steps")
        more = isinstance(steps, int) and self.steps > steps
        free = {*WATCHING, *(["steps"] if more else [])}
        same = {name: value for name, value in dataclasses.asdict(self).items() if name in free}
        return self.differences({**begun, **same})

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """The flags in which `other`, read from config.json, is different."""
        mine, other = (
            json.loads(json.dumps(values)) for values in (dataclasses.asdict(self), dict(other))
        )
        return [
            f"--{name} (there {other.get(name)}, now {mine.get(name)})"
            for name in sorted(mine.keys() | other.keys())
            if mine.get(name) != other.get(name)
        ]


# The rule of each flag that has one, and when it holds; None, "the default", always passes.
_WHOLE = "a whole number of at least {}"
# Of float32, with which the steps compute: what is more would be infinite there.
_MOST = 3.4e38
_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    # NumPy's limit, which Keras seeds too.
    "seed": ("a whole number in [0, 4294967295]", lambda value: 0 <= value < 2**32),
    "checkpoint_every": (_WHOLE.format(1), lambda value: value >= 1),
    "evaluate_every": (_WHOLE.format(1), lambda value: value >= 1),
    "log_every": (_WHOLE.format(1), lambda value: value >= 1),
    "image_size": (_WHOLE.format(1), lambda value: value >= 1),
    "batch_size": (
        f"a whole number in [1, {LARGEST_BATCH}]",
        lambda value: 1 <= value <= LARGEST_BATCH,
    ),
    "steps": (_WHOLE.format(1), lambda value: value >= 1),
    "population_batches": (_WHOLE.format(0), lambda value: value >= 0),
    "learning_rate": (f"a positive number up to {_MOST:g}", lambda value: 0 < value <= _MOST),
    "momentum": ("a number in [0, 1)", lambda value: 0 <= value < 1),
    "weight_decay": (f"a number of at least 0, up to {_MOST:g}", lambda value: 0 <= value <= _MOST),
    "decay_rate": ("a number in (0, 1]", lambda value: 0 < value <= 1),
    "decay_epochs": ("a positive number", lambda value: 0 < value < math.inf),
    "photometric": ("a number in [0, 1)", lambda value: 0 <= value < 1),
    "clip_norm": (f"a positive number up to {_MOST:g}", lambda value: 0 < value <= _MOST),
    "polyak": ("a number in (0, 1)", lambda value: 0 < value < 1),
    "precision": (f"one of {', '.join(PRECISIONS)}", PRECISIONS.__contains__),
    "learning_rate_schedule": (f"one of {', '.join(SCHEDULES)}", SCHEDULES.__contains__),
    "augmentation": (f"one of {', '.join(AUGMENTATIONS)}", AUGMENTATIONS.__contains__),
}


def resolve(given: Mapping[str, Any]) -> Settings:
    """The settings that flags mean, all of them checked before anything is built.

    Args:
        given: the value of each flag of `TRAIN_FLAGS`; None where it was not given.

    Raises:
        BadFlags: with one line for each flag that is wrong.
    """
    problems: list[str] = []
    given = {
        **given,
        "boundaries": _numbers(given, "boundaries", float, problems),
        "profile_steps": _numbers(given, "profile_steps", int, problems),
    }
    problems += [
        f"--{name} must be {rule}. Received: --{name}={given[name]}"
        for name, (rule, holds) in _RULES.items()
        if given[name] is not None and not holds(given[name])
    ]
    recipe = _recipe(given, problems)
    check_dataset_name(given["dataset"], problems)
    arguments = _model_arguments(given["model_args"] or (), problems)
    if recipe is not None:
        model = given["model"] or recipe.model
        # A recipe's arguments are meant for its own network.
        if model == recipe.model:
            arguments = {**recipe.model_arguments, **arguments}
        if arguments:
            _check_model_arguments(model, arguments, problems)
        _check_schedule(given, recipe, problems)
    _check_watching(given, problems)
    if given["polyak"] is not None and given["population_batches"] == 0:
        problems.append(
            "--polyak needs --population_batches of at least 1: BN's statistics have to be taken "
            "anew for the averaged weights. Received: --population_batches=0"
        )
    if problems or recipe is None:
        raise BadFlags(*problems)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        value = given[field.name]
        values[field.name] = getattr(recipe, field.name, None) if value is None else value
    # An image size of None asks for the data set's own; only then the recipe's.
    return Settings(
        **{
            **values,
            "recipe": recipe.name,
            "model_args": arguments,
            "image_size": given["image_size"],
            "bn_percentiles": tuple(given["bn_percentiles"] or ()),
            "profile_steps": given["profile_steps"] or (),
        }
    )


def check_dataset_name(name: str | None, problems: list[str]) -> None:
    """Adds a line to `problems` if `name` cannot be that of a data set."""
    if name is None or name == DIGITS or _TFDS_NAME.fullmatch(name):
        return
    if name.startswith(FOLDER) and len(name) > len(FOLDER):
        return
    problems.append(
        f"--dataset must be {DIGITS}, the name of a TFDS data set or {FOLDER}PATH. "
        f"Received: --dataset={name}"
    )


def unknown(flag: str, value: str, allowed: Sequence[str]) -> str:
    """The line that says that `value` is none of `allowed`."""
    choices = ", ".join(allowed)
    hint = did_you_mean(value, allowed)
    return f"--{flag} must be one of {choices}. Received: --{flag}={value}.{hint}"


def did_you_mean(value: str, allowed: Sequence[str]) -> str:
    """What may have been meant by `value`, as a sentence after a space; "" if nothing is near."""
    close = difflib.get_close_matches(value, allowed, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def _recipe(given: Mapping[str, Any], problems: list[str]) -> Recipe | None:
    name, model = given["recipe"], given["model"]
    if name is None and model is None:
        problems.append(
            f"one of --recipe ({', '.join(RECIPES)}) and --model ({', '.join(RECIPE_OF_MODEL)}) "
            "must be given"
        )
    if model is not None and model not in RECIPE_OF_MODEL:
        problems.append(unknown("model", model, tuple(RECIPE_OF_MODEL)))
    if name is not None and name not in RECIPES:
        problems.append(unknown("recipe", name, tuple(RECIPES)))
    return RECIPES.get(name or RECIPE_OF_MODEL.get(model, ""))


def _numbers(
    given: Mapping[str, Any], name: str, kind: type[int] | type[float], problems: list[str]
) -> tuple[float, ...] | None:
    """The value of a flag that is a list of rising numbers from 0 on; None if it is not given."""
    if given[name] is None:
        return None
    try:
        numbers = tuple(kind(text) for text in given[name])
    except ValueError:
        numbers = (-1,)
    if numbers and all(0 <= one < two for one, two in itertools.pairwise((*numbers, math.inf))):
        return numbers
    what = "whole numbers" if kind is int else "numbers"
    problems.append(
        f"--{name} must be {what} of at least 0, each above the one before. "
        f"Received: --{name}={','.join(given[name])}"
    )
    return None


def _check_schedule(given: Mapping[str, Any], recipe: Recipe, problems: list[str]) -> None:
    """The flags of a schedule go with that schedule alone, and another than the recipe's is whole.

    Its figures would make no sense: 10% at each of three boundaries, but 10% each epoch.
    """
    schedule = given["learning_rate_schedule"] or recipe.learning_rate_schedule
    own = {"exponential": ("decay_epochs", "staircase"), "steps": ("boundaries",)}
    if schedule not in own:
        return
    for other, names in own.items():
        for name in names:
            if other != schedule and given[name]:
                problems.append(
                    f"--{name} is of --learning_rate_schedule={other}. "
                    f"Received: --{name} with the schedule {schedule}"
                )
    if schedule != recipe.learning_rate_schedule:
        needed = ("decay_rate", own[schedule][0])
        missing = [f"--{name}" for name in needed if not given[name]]
        if missing:
            problems.append(
                f"--learning_rate_schedule={schedule} is not that of recipe {recipe.name}: "
                f"{' and '.join(missing)} must be given too"
            )


def _check_watching(given: Mapping[str, Any], problems: list[str]) -> None:
    numbers = given["profile_steps"]
    if numbers is not None and len(numbers) != 2:
        problems.append(
            "--profile_steps must be two numbers, FROM,TO. "
            f"Received: --profile_steps={','.join(map(str, numbers))}"
        )
    for text in given["bn_percentiles"] or ():
        if not _LAYER.fullmatch(text):
            problems.append(
                "--bn_percentiles must be last, all, names of layers or NAME:CHANNEL. "
                f"Received: --bn_percentiles={text}"
            )


def _model_arguments(pairs: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """name=value pairs as a dict; a value that is no Python literal is a string.

    "true" and "false" are booleans also as JSON and shells write them: as strings both are true.
    """
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip().isidentifier():
            problems.append(f"--model_args must be name=value,name=value. Received: {pair}")
            continue
        value = _literal(text.strip())
        if not _is_plain(value):
            problems.append(
                "--model_args must have values that are numbers, words, True, False, None or lists "
                f"of these. Received: {pair}"
            )
            continue
        arguments[name.strip()] = value
    return arguments


def _literal(text: str) -> Any:
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    except (TypeError, MemoryError, RecursionError):
        return ...  # Such as {[]: 1}, and more signs in a row than Python reads.


def _is_plain(value: Any) -> bool:
    """Whether config.json can hold `value`, an argument of a network."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _check_model_arguments(model: str, arguments: Mapping[str, Any], problems: list[str]) -> None:
    if model not in RECIPE_OF_MODEL:
        return
    allowed = model_keywords(model)
    for name in arguments:
        if name not in allowed:
            problems.append(
                f"--model_args must name arguments of {model}: {', '.join(allowed)}. "
                f"Received: {name}"
            )


def model_keywords(model: str) -> list[str]:
    """The keyword-only arguments of a function of bnzoo.models: what its network varies."""
    # Imported here: TensorFlow takes seconds, and most mistakes can be told without it.
    from bnzoo import models

    parameters = inspect.signature(getattr(models, model)).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
