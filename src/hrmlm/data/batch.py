"""What every model is trained and evaluated on: token ids, and the ids that follow them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch

IGNORE = -100
"""Target of a position that is not scored (the value that torch's cross-entropy skips by default)."""


@dataclass
class SoftTargets:
    """What a teacher says about the same positions. logits_BLV: of the ids that can be predicted; temperature: of both
    distributions that are compared; weight: share of the objective, from 0 to 1."""

    logits_BLV: torch.Tensor
    temperature: float
    weight: float


@dataclass
class Batch:
    """Inputs and next-token targets of B rows and L positions.

    inputs_BL: int64 token ids. targets_BL: int64, the id that follows each input, or IGNORE where nothing is scored.
    soft: a teacher's view of the same positions, where a model is distilled from one.
    """

    inputs_BL: torch.Tensor
    targets_BL: torch.Tensor
    soft: SoftTargets | None = None

    def __post_init__(self) -> None:
        assert self.inputs_BL.shape == self.targets_BL.shape, (self.inputs_BL.shape, self.targets_BL.shape)
        assert self.inputs_BL.dtype == self.targets_BL.dtype == torch.int64, "ids are int64"

    @cached_property
    def n_targets(self) -> int:
        """Number of scored positions: the weight of this batch in a mean over tokens."""
        return int((self.targets_BL != IGNORE).sum())

    def to(self, device: str | torch.device) -> Self:
        """The same batch on `device`; from pinned memory the copy overlaps with computation."""
        moved = type(self)(
            self.inputs_BL.to(device, non_blocking=True),
            self.targets_BL.to(device, non_blocking=True),
        )
        vars(moved)["n_targets"] = self.n_targets  # counted here: on a GPU that would wait for all it has to do
        return moved

    def pin_memory(self) -> Self:
        """A copy in page-locked memory. Called by torch's DataLoader under `pin_memory=True`."""
        return type(self)(self.inputs_BL.pin_memory(), self.targets_BL.pin_memory())

    def positions(self, start: int, stop: int) -> Self:
        """The part of all rows from position `start` to `stop` - 1."""
        soft = self.soft and replace(self.soft, logits_BLV=self.soft.logits_BLV[:, start:stop])
        return type(self)(self.inputs_BL[:, start:stop], self.targets_BL[:, start:stop], soft)

    def split(self, rows: int) -> list[Self]:
        """Micro-batches of at most `rows` rows each, in order."""
        pairs = zip(self.inputs_BL.split(rows), self.targets_BL.split(rows), strict=True)
        return [type(self)(inputs_BL, targets_BL) for inputs_BL, targets_BL in pairs]
