"""Several replicas train as one device does: in one process and in several, against NumPy too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from training import data

from .helpers import settings
from .processes import Program, cluster

STEPS = 20
# 37 rows for 2 and 3 replicas: no equal parts. 360 held-out examples are 9 batches of 37 and one of
# 27, of which the last of three replicas gets 2 rows.
FLAGS = (
    "--batch_size=37",
    "--learning_rate=0.05",
    "--momentum=0.9",
    "--weight_decay=0.01",
    "--clip_norm=1.5",
    "--decay_rate=0.9",
    "--decay_epochs=0.1",
    "--augmentation=shift",
    "--seed=3",
)


def program(output: Path, *flags: str) -> list[str]:
    return ["-m", "tests.training.strategy_program", str(output), str(STEPS), *FLAGS, *flags]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("one")
    assert Program(folder / "log", program(folder / "out")).wait() == 0
    return dict(np.load(folder / "out_0.npz"))


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """All variables, losses, accuracies, rates, norms and the evaluation, to 1e-5."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_replicas_of_one_process_equal_one_device(
    one_device: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """3 replicas with 13, 12 and 12 rows; BN synchronised; L2 and clipping as for one."""
    flags = ("--strategy=mirrored", "--devices=3")
    run = Program(tmp_path / "log", program(tmp_path / "out", *flags))
    assert run.wait() == 0, run.text
    found = dict(np.load(tmp_path / "out_0.npz"))
    assert_equal(found, one_device)
    assert (int(found["step"]), int(found["traces"])) == (STEPS, 1)
    # That the flags were felt: gradients were clipped, and did not vanish.
    assert (one_device["column_3"] > 1.5).any()
    assert one_device["column_2"][0] > one_device["column_2"][-1]


def test_processes_equal_one_device(one_device: dict[str, np.ndarray], tmp_path: Path) -> None:
    runs = cluster(tmp_path, program(tmp_path / "out", "--strategy=multi_worker"))
    assert [run.wait() for run in runs] == [0, 0], "\n".join(run.text for run in runs)
    found = [dict(np.load(tmp_path / f"out_{process}.npz")) for process in range(2)]
    assert_equal(found[0], one_device)
    for name, value in found[0].items():
        np.testing.assert_array_equal(found[1][name], value, err_msg=name)


def test_replicas_that_are_not_synchronised_equal_numpy(tmp_path: Path) -> None:
    """Each replica normalises by its own rows; moving statistics are the mean over the replicas."""
    flags = ("--strategy=mirrored", "--devices=2", "--nosynchronized_batch_norm")
    plain = ("--clip_norm=1e9", "--weight_decay=0", "--decay_rate=1", "--augmentation=none")
    run = Program(tmp_path / "log", program(tmp_path / "out", *flags, *plain))
    assert run.wait() == 0, run.text
    found = np.load(tmp_path / "out_0.npz")
    # In the order of creation: kernel; gamma, beta, mean, variance; kernel, bias; the same; head.
    model = Network([np.float64(found[f"initial_{number}"]) for number in range(13)])
    chosen = settings(*FLAGS, *plain)
    stream = data.training_batches(data.open_inputs(chosen), 37, seed=3)
    for images, labels in stream.take(STEPS).as_numpy_iterator():
        model.step([images[:19], images[19:]], [labels[:19], labels[19:]])
    for number, expected in enumerate(model.values):
        np.testing.assert_allclose(
            found[f"arr_{number}"], expected, rtol=1e-4, atol=1e-5, err_msg=str(number)
        )


class Network:
    """The network of `strategy_program` in float64, with its gradients written out."""

    def __init__(self, values: list[np.ndarray]) -> None:
        self.values = values
        self.velocity = {number: np.zeros_like(values[number]) for number in TRAINED}

    def step(self, images: list[np.ndarray], labels: list[np.ndarray]) -> None:
        total = sum(map(len, labels))
        parts = [
            self.gradients(np.float64(x), y, total) for x, y in zip(images, labels, strict=True)
        ]
        for mean, place in ((3, 0), (9, 1)):
            for offset in (0, 1):
                batch = np.mean([statistics[place][offset] for _, statistics in parts], axis=0)
                self.values[mean + offset] = 0.9 * self.values[mean + offset] + 0.1 * batch
        for number in TRAINED:
            gradient = sum(gradients[number] for gradients, _ in parts)
            self.velocity[number] = 0.9 * self.velocity[number] - 0.05 * gradient
            self.values[number] = self.values[number] + self.velocity[number]

    def gradients(
        self, x: np.ndarray, labels: np.ndarray, total: int
    ) -> tuple[dict[int, np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
        """Of one replica: its share of the gradients, and the statistics of its rows."""
        kernel, gamma1, beta1, _, _, dense, bias, gamma2, beta2, _, _, head, head_bias = self.values
        windows = np.lib.stride_tricks.sliding_window_view(x[..., 0], (3, 3), axis=(1, 2))
        columns = windows.reshape(-1, 9)
        convolved = columns @ kernel.reshape(9, 4)
        y1, back1, statistics1 = normalize(convolved, gamma1, beta1)
        flat = np.maximum(y1, 0).reshape(len(x), -1)
        y2, back2, statistics2 = normalize(flat @ dense + bias, gamma2, beta2)
        hidden = np.maximum(y2, 0)
        logits = hidden @ head + head_bias
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = (exponents / exponents.sum(axis=1, keepdims=True) - np.eye(10)[labels]) / total
        d2, dgamma2, dbeta2 = back2((error @ head.T) * (y2 > 0))
        d1, dgamma1, dbeta1 = back1((d2 @ dense.T).reshape(y1.shape) * (y1 > 0))
        found = {
            0: (columns.T @ d1).reshape(kernel.shape),
            1: dgamma1,
            2: dbeta1,
            5: flat.T @ d2,
            6: d2.sum(axis=0),
            7: dgamma2,
            8: dbeta2,
            11: hidden.T @ error,
            12: error.sum(axis=0),
        }
        return found, [statistics1, statistics2]


TRAINED = (0, 1, 2, 5, 6, 7, 8, 11, 12)


def normalize(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> tuple:
    """Algorithm 1, its gradients (Section 3), and the mean and unbiased variance."""
    mean, variance, count = x.mean(axis=0), x.var(axis=0), len(x)
    root = np.sqrt(variance + 1e-3)
    normalized = (x - mean) / root

    def back(dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        dx = dy * gamma
        dx = (dx - dx.mean(axis=0) - normalized * (dx * normalized).mean(axis=0)) / root
        return dx, (dy * normalized).sum(axis=0), dy.sum(axis=0)

    return gamma * normalized + beta, back, (mean, variance * count / (count - 1))
