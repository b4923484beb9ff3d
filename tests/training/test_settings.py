"""Flags become settings, or a line for each mistake."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from training.command_line import BadFlags
from training.placement import PLACEMENT_FLAGS
from training.recipes import RECIPES
from training.settings import Settings, resolve
from training.train_flags import TRAIN_FLAGS

from .helpers import given, settings

BAD = [
    (["--recipe=bn_x55"], "--recipe must be one of inception, bn_baseline, .* Did you mean bn_x5?"),
    (
        ["--model=vgg"],
        "--model must be one of inception, bn_inception, mnist_mlp, .* Received: --model=vgg",
    ),
    ([], r"one of --recipe \(inception, .*\) and --model \(inception, .*\) must be given"),
    (["--recipe=bn_x5", "--dataset=a b"], "--dataset must be digits, .* Received: --dataset=a b"),
    (["--recipe=bn_x5", "--dataset=folder:"], "--dataset must be .* Received: --dataset=folder:"),
    (
        ["--recipe=bn_x5", "--steps=0"],
        "--steps must be a whole number of at least 1. Received: --steps=0",
    ),
    (["--recipe=bn_x5", "--batch_size=0"], "--batch_size must be a whole number in "),
    (["--recipe=bn_x5", f"--batch_size={2**31}"], r"--batch_size must be .* in \[1, 2147483647\]"),
    (["--recipe=bn_x5", "--image_size=0"], "--image_size must be a whole number of at least 1"),
    (["--recipe=bn_x5", "--seed=-1"], "--seed must be a whole number in "),
    (["--recipe=bn_x5", f"--seed={2**32}"], r"--seed must be a whole number in \[0, 4294967295\]"),
    (["--recipe=bn_x5", "--checkpoint_every=0"], "--checkpoint_every must be"),
    (["--recipe=bn_x5", "--evaluate_every=0"], "--evaluate_every must be"),
    (["--recipe=bn_x5", "--log_every=0"], "--log_every must be"),
    (["--recipe=bn_x5", "--population_batches=-1"], "--population_batches must be"),
    (["--recipe=bn_x5", "--learning_rate=0"], "--learning_rate must be a positive number"),
    (["--recipe=bn_x5", "--learning_rate=nan"], "--learning_rate must be a positive number"),
    (["--recipe=bn_x5", "--learning_rate=inf"], "--learning_rate must be a positive number"),
    *(
        (["--recipe=bn_x5", f"--{name}=1e300"], rf"--{name} must be .* up to 3\.4e\+38\. Received")
        for name in ("learning_rate", "weight_decay", "clip_norm")
    ),
    (["--recipe=bn_x5", "--momentum=1"], r"--momentum must be a number in \[0, 1\). Received"),
    (["--recipe=bn_x5", "--weight_decay=-1e-4"], "--weight_decay must be a number of at least 0"),
    (["--recipe=bn_x5", "--decay_rate=1.5"], r"--decay_rate must be a number in \(0, 1\]"),
    (["--recipe=bn_x5", "--decay_epochs=0"], "--decay_epochs must be a positive number"),
    (["--recipe=bn_x5", "--photometric=1"], r"--photometric must be a number in \[0, 1\)"),
    (
        ["--recipe=bn_x5", "--precision=float16"],
        "--precision must be one of float32, mixed_bfloat16",
    ),
    (["--recipe=bn_x5", "--augmentation=flip"], "--augmentation must be one of none, shift, crop"),
    (["--recipe=bn_x5", "--clip_norm=0"], "--clip_norm must be a positive number up to 3.4e"),
    (["--recipe=bn_x5", "--polyak=1"], r"--polyak must be a number in \(0, 1\). Received"),
    (
        ["--recipe=bn_x5", "--polyak=0.99", "--population_batches=0"],
        "--polyak needs --population_batches of at least 1: .* Received: --population_batches=0",
    ),
    (
        ["--recipe=bn_x5", "--learning_rate_schedule=cosine"],
        "--learning_rate_schedule must be one of exponential, steps. Received: .*=cosine",
    ),
    (
        ["--recipe=prelu_net_a", "--boundaries=3,2"],
        "--boundaries must be numbers of at least 0, each above the one before. Received: .*=3,2",
    ),
    (["--recipe=prelu_net_a", "--boundaries="], "--boundaries must be numbers of at least 0"),
    (["--recipe=prelu_net_a", "--boundaries=-1"], "--boundaries must be numbers of at least 0"),
    (["--recipe=prelu_net_a", "--boundaries=1,nan"], "--boundaries must be numbers of at least 0"),
    (
        ["--recipe=prelu_net_a", "--staircase"],
        "--staircase is of --learning_rate_schedule=exponential. Received: .* the schedule steps",
    ),
    (
        ["--recipe=bn_x5", "--boundaries=1"],
        "--boundaries is of --learning_rate_schedule=steps. Received: .* schedule exponential",
    ),
    (
        ["--recipe=bn_x5", "--learning_rate_schedule=steps", "--boundaries=1"],
        "--learning_rate_schedule=steps is not that of recipe bn_x5: --decay_rate must be given",
    ),
    (
        ["--recipe=prelu_net_a", "--learning_rate_schedule=exponential"],
        ".* is not that of recipe prelu_net_a: --decay_rate and --decay_epochs must be given too",
    ),
    (
        ["--recipe=bn_x5", "--profile_steps=5"],
        "--profile_steps must be two numbers, FROM,TO. Received: --profile_steps=5",
    ),
    (
        ["--recipe=bn_x5", "--profile_steps=5,5"],
        "--profile_steps must be whole numbers of at least 0, each above the one before.",
    ),
    (["--recipe=bn_x5", "--profile_steps=1,2.5"], "--profile_steps must be whole numbers"),
    (
        ["--recipe=bn_x5", "--bn_percentiles=a:b"],
        "--bn_percentiles must be last, all, names of layers or NAME:CHANNEL. Received: .*=a:b",
    ),
    (
        ["--recipe=bn_x5", "--model_args=width"],
        "--model_args must be name=value,name=value. Received: width",
    ),
    *(
        (
            ["--model=mnist_mlp", f"--model_args=batch_norm={value}"],
            f"--model_args must have values that are .* Received: batch_norm={re.escape(value)}",
        )
        for value in ("{1}", "b'x'", "{1:2}", "{[]:1}", "...", "1j", "[{1}]", "-" * 9000 + "1")
    ),
    (
        ["--recipe=bn_x5", "--model_args=width=2"],
        "--model_args must name arguments of bn_inception: .*width_multiplier.* Received: width",
    ),
]


@pytest.mark.parametrize(("argv", "message"), BAD, ids=[" ".join(argv)[:60] for argv, _ in BAD])
def test_bad_flag(argv: list[str], message: str) -> None:
    with pytest.raises(BadFlags, match=message) as caught:
        resolve(given(*argv))
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(BadFlags) as caught:
        resolve(given("--recipe=no", "--dataset=?", "--steps=0", "--model=no", "--model_args=x"))
    named = [re.match(r"--(\w+)", problem) for problem in caught.value.problems]
    assert sorted(match.group(1) for match in named if match) == [
        "dataset",
        "model",
        "model_args",
        "recipe",
        "steps",
    ]


def test_mistakes_are_told_without_tensorflow() -> None:
    # TensorFlow takes seconds to import, TFDS more: a typing mistake must not wait for them.
    code = (
        "import sys; from training import train; code = train.main(['x', '--recipe=no']);"
        "print(code, sorted({'tensorflow', 'keras', 'tensorflow_datasets'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "2 []\n"
    assert result.stderr.startswith("bnzoo-train: --recipe must be one of inception, ")


def test_the_recipe_fills_in_what_is_not_given() -> None:
    found = resolve(given("--recipe=bn_x30"))
    row = RECIPES["bn_x30"]
    for field in ("learning_rate", "momentum", "weight_decay", "decay_rate", "decay_epochs"):
        assert getattr(found, field) == getattr(row, field)
    assert (found.model, found.dataset, found.steps) == ("bn_inception", "imagenet2012", 6_000_000)
    assert (found.batch_size, found.photometric, found.image_size) == (32, row.photometric, None)


def test_flags_go_before_the_recipe_also_where_they_are_zero() -> None:
    found = resolve(
        given("--recipe=bn_x5", "--momentum=0", "--weight_decay=0", "--photometric=0", "--steps=7")
    )
    stepped = resolve(given("--recipe=prelu_net_14", "--boundaries=3.5,7"))
    assert (stepped.learning_rate_schedule, stepped.boundaries) == ("steps", (3.5, 7))
    assert (found.momentum, found.weight_decay, found.photometric, found.steps) == (0, 0, 0, 7)


def test_one_of_model_and_recipe_is_enough() -> None:
    assert resolve(given("--model=bn_inception")).recipe == "bn_x5"
    assert resolve(given("--model=inception")).recipe == "inception"
    mnist = resolve(given("--model=mnist_mlp", "--dataset=mnist"))
    assert (mnist.recipe, mnist.steps, mnist.batch_size) == ("mnist_bn", 50_000, 60)
    for name in ("14", "30", "a", "b", "c"):
        assert resolve(given(f"--model=prelu_net_{name}")).recipe == f"prelu_net_{name}"


def test_model_args_are_literals_or_strings_and_add_to_the_recipes() -> None:
    found = resolve(
        given(
            "--recipe=bn_x5_sigmoid", "--model_args=width_multiplier=0.25, stem=small,momentum=None"
        )
    )
    assert found.model_args == {
        "activation": "sigmoid",
        "width_multiplier": 0.25,
        "stem": "small",
        "momentum": None,
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("false", False),
        ("FALSE", False),
        ("False", False),
        ("true", True),
        ("TRUE", True),
        ("no", "no"),
        ("'false'", "false"),
    ],
)
def test_true_and_false_are_booleans_in_any_case(text: str, value: object) -> None:
    # As a string, "false" would be true: a network with BN, without a word.
    assert settings(f"--model_args=batch_norm={text}").model_args == {"batch_norm": value}


def test_arguments_of_a_recipe_stay_with_its_network() -> None:
    # "Inception at the rate of BN-x5" of Section 4.2.2, which diverges.
    found = resolve(given("--recipe=bn_baseline", "--model=inception"))
    assert (found.model, found.model_args) == ("inception", {})


def test_each_flag_that_decides_a_run_is_a_setting() -> None:
    flags = {flag.name for group in TRAIN_FLAGS.values() for flag in group}
    placement = {flag.name for flag in PLACEMENT_FLAGS}
    assert {field.name for field in dataclasses.fields(Settings)} == (
        flags - placement - {"run_dir", "overwrite"}
    )


def test_differences_name_the_flag_and_both_values() -> None:
    stored = json.loads(json.dumps(dataclasses.asdict(settings("--model_args=momentum=0.9"))))
    assert settings("--model_args=momentum=0.9").differences(stored) == []
    assert settings("--model_args=momentum=0.9", "--seed=3", "--steps=9").differences(stored) == [
        "--seed (there 0, now 3)",
        "--steps (there 50000, now 9)",
    ]


def test_a_schedule_of_ones_own() -> None:
    found = resolve(
        given(
            "--recipe=bn_x5",
            "--learning_rate_schedule=steps",
            "--decay_rate=0.5",
            "--boundaries=1,2.5",
        )
    )
    assert (found.decay_rate, found.boundaries) == (0.5, (1.0, 2.5))


@pytest.mark.parametrize("steps", ["10", None, [], {}])
def test_steps_of_a_damaged_config_are_a_conflict(steps: object) -> None:
    begun = {**json.loads(json.dumps(dataclasses.asdict(settings()))), "steps": steps}
    assert settings("--steps=9").conflicts(begun) == [f"--steps (there {steps}, now 9)"]


def test_conflicts_leave_out_more_steps_and_what_is_watched() -> None:
    begun = json.loads(json.dumps(dataclasses.asdict(settings("--steps=10"))))
    more = settings("--steps=11", "--profile_steps=1,2", "--bn_percentiles=last")
    assert more.conflicts(begun) == []
    assert settings("--steps=9", "--seed=1", "--polyak=0.9").conflicts(begun) == [
        "--polyak (there None, now 0.9)",
        "--seed (there 0, now 1)",
        "--steps (there 10, now 9)",
    ]
