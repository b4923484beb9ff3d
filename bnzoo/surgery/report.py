"""What `fold_batch_norm` did, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["folded", "affine", "kept"]


@dataclass(frozen=True)
class BatchNormFate:
    """What became of one BatchNormalization layer.

    Attributes:
        name: The layer's name, after those of the nested models that it is in: "encoder/bn_1".
        outcome: "folded" into the weights of other layers; "affine" if a ChannelAffine of the
            same name took its place; "kept" as it was.
        into: Names of the layers that it was folded into.
        reason: Why it was not folded; empty if it was.
    """

    name: str
    outcome: Outcome
    into: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.outcome == "folded":
            return f"{self.name}: folded into {', '.join(self.into)}"
        return f"{self.name}: {self.outcome}, {self.reason}"


@dataclass(frozen=True)
class Size:
    """How large a model is.

    Attributes:
        batch_norms: BatchNormalization layers, those in nested models and in layers included.
        parameters: Values in all weights.
        operations: Calls of layers and Keras operations in one forward pass. A nested model
            counts with the calls inside, once for each time that it is called.
    """

    batch_norms: int
    parameters: int
    operations: int


@dataclass(frozen=True)
class FoldReport:
    """What `fold_batch_norm` did: of each BatchNormalization what became of it, and why.

    `str(report)` is the summary and one line for each layer.
    """

    batch_norms: tuple[BatchNormFate, ...]
    before: Size
    after: Size

    def count(self, outcome: Outcome) -> int:
        """How many layers had this outcome."""
        return sum(fate.outcome == outcome for fate in self.batch_norms)

    @property
    def summary(self) -> str:
        """One line."""
        if not self.batch_norms:
            return "no BatchNormalization: the model is returned as it is"
        before, after = self.before, self.after
        return (
            f"{len(self.batch_norms)} BatchNormalization: {self.count('folded')} folded, "
            f"{self.count('affine')} affine, {self.count('kept')} kept; "
            f"parameters {before.parameters:,} -> {after.parameters:,}, "
            f"operations {before.operations:,} -> {after.operations:,}"
        )

    def __str__(self) -> str:
        return "\n".join([self.summary, *map(str, self.batch_norms)])
