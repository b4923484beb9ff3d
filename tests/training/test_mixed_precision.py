"""Runs in 16 bits that are killed and go on: what was unbroken, and the scale of the loss."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from training import running, train
from training.progress import Progress
from training.settings import Settings

from .helpers import train_argv

FLAGS = (
    "--batch_size=100",
    "--momentum=0.9",
    "--evaluate_every=100",
    "--log_every=4",
    "--checkpoint_every=8",
    "--population_batches=2",
    "--steps=20",
)


def saved(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """All that the checkpoint of `step` holds."""
    reader = tf.train.load_checkpoint(str(run_dir / "checkpoints" / f"ckpt-{step}"))
    names = [name for name in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in name]
    return {name: np.asarray(reader.get_tensor(name)) for name in names}


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_killed_and_resumed_equals_unbroken(
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bit for bit. The scale of the loss is too high at first, and rises after 3 good steps."""
    optimizers: list[keras.optimizers.Optimizer] = []
    build = running.build_optimizer

    def scaled(settings: Settings, examples: int) -> keras.optimizers.Optimizer:
        optimizer = build(settings, examples)
        if precision == "mixed_float16":
            inner = optimizer.inner_optimizer
            optimizer = keras.optimizers.LossScaleOptimizer(inner, 2.0**26, dynamic_growth_steps=3)
        optimizers.append(optimizer)
        return optimizer

    monkeypatch.setattr(running, "build_optimizer", scaled)
    whole, broken = (
        train_argv(tmp_path / name, *FLAGS, f"--precision={precision}")
        for name in ("whole", "broken")
    )
    assert train.main(whole) == 0
    with monkeypatch.context() as patched:
        update = Progress.update

        def killed(self: Progress, step: int, *figures: float) -> None:
            update(self, step, *figures)
            if step >= 10:
                raise KeyboardInterrupt

        patched.setattr(Progress, "update", killed)
        assert train.main(broken) == 130
    assert train.main(broken) == 0
    assert "continuing at step 8\n" in capsys.readouterr().out

    first, last, expected = (
        saved(tmp_path / run, step) for run, step in (("broken", 8), ("broken", 20), ("whole", 20))
    )
    assert len(expected) > 20
    for name, value in expected.items():
        np.testing.assert_array_equal(last[name], value, err_msg=name)
    models = [
        keras.models.load_model(tmp_path / run / "model.keras") for run in ("whole", "broken")
    ]
    for one, two in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_array_equal(one, two)
    if precision == "mixed_float16":
        names = [variable.name for variable in optimizers[0].variables]
        scale = first[f"optimizer/{names.index('dynamic_scale')}/.ATTRIBUTES/VARIABLE_VALUE"]
        assert 2.0**15 < scale < 2.0**26  # Neither what it is at first, nor Keras' default.
        assert 0 < int(optimizers[0].iterations) < 17  # Some steps overflowed.
