"""Choosing the next token of every row of a batch from its logits.

B rows, V ids that can be predicted. Every row has its own options and its own random generator, so a row of a batch
draws what it would draw alone.
"""

import secrets
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from hrmlm.config import StrictConfig


class SamplingOptions(StrictConfig):
    """How one row chooses its tokens. Read it from user input with `SamplingOptions.parse(settings, where)`."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Logits are divided by it; 0 takes the most probable token (of equal ones the lowest id)."""
    top_k: int | None = Field(default=None, ge=0)
    """Only the k most probable tokens; None, 0 and anything above the vocabulary size: no limit."""
    top_p: float = Field(default=1.0, ge=0, le=1)
    """Only the most probable tokens that together reach this share; at least one token stays."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Start of the row's random numbers; None: a new one for every row of every call."""


class Sampler:
    """Draws one id per row and step. `seeds` are those in use, chosen ones included."""

    def __init__(self, options: Sequence[SamplingOptions], device: torch.device | str = "cpu") -> None:
        self.seeds = [secrets.randbits(63) if o.seed is None else o.seed for o in options]
        # On the processor whatever the device, so that a seed means the same numbers everywhere.
        self._generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        no_limit = torch.iinfo(torch.int64).max
        self._temperature_B = torch.tensor([o.temperature for o in options], dtype=torch.float64, device=device)
        self._top_k_B = torch.tensor([min(o.top_k or no_limit, no_limit) for o in options], device=device)
        self._top_p_B = torch.tensor([o.top_p for o in options], dtype=torch.float64, device=device)
        self._draws = any(o.temperature > 0 for o in options)
        self._limits = any(o.top_k or o.top_p < 1 for o in options)

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """The next ids (B,) for logits (B, V); takes one number from every row's generator."""
        best_B = logits_BV.argmax(-1)
        if not self._draws:
            return best_B
        greedy_B = self._temperature_B == 0
        uniform_B = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in self._generators])
        temperature_B = self._temperature_B.masked_fill(greedy_B, 1)
        if self._limits:
            logits_BV = logits_BV.masked_fill(self._outside_limits(logits_BV, temperature_B), -torch.inf)
        drawn_B = _invert(_probabilities(logits_BV, temperature_B), uniform_B.to(logits_BV.device))
        return torch.where(greedy_B, best_B, drawn_B)

    def select(self, rows_B: Tensor) -> None:
        """Keep only these rows, in this order."""
        self._generators = [self._generators[row] for row in rows_B.tolist()]
        self._temperature_B, self._top_k_B, self._top_p_B = (
            values_B[rows_B] for values_B in (self._temperature_B, self._top_k_B, self._top_p_B)
        )

    def _outside_limits(self, logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
        """True (B, V) for the ids that top_k or top_p exclude; top_p shares out what top_k left."""
        # Logits are sorted, not probabilities: a high temperature makes unequal logits equally probable.
        logits_BV, ids_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        rank_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
        outside_BV = rank_V >= self._top_k_B[:, None]
        probability_BV = _probabilities(logits_BV.masked_fill(outside_BV, -torch.inf), temperature_B)
        before_BV = probability_BV.cumsum(-1) - probability_BV
        # Rounding lets the sum reach 1 before the last token, so top_p = 1 must not compare.
        beyond_BV = (before_BV >= self._top_p_B[:, None]) & (self._top_p_B[:, None] < 1) & (rank_V > 0)
        return torch.zeros_like(outside_BV).scatter(1, ids_BV, outside_BV | beyond_BV)


def _probabilities(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """Softmax in float64; with the maximum at 0 first, no temperature above 0 overflows."""
    shifted_BV = logits_BV.double() - logits_BV.amax(-1, keepdim=True).double()
    return (shifted_BV / temperature_B[:, None]).softmax(-1)


def _invert(weight_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first place (B,) whose cumulated weight exceeds `uniform_B` times the total: never one of weight 0."""
    cumulated_BV = weight_BV.cumsum(-1)
    total_B1 = cumulated_BV[:, -1:]
    target_B1 = torch.minimum(uniform_B[:, None] * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    place_B = torch.searchsorted(cumulated_BV, target_B1, right=True)[:, 0]
    return place_B.clamp_max(weight_BV.shape[-1] - 1)  # only NaN gets so far; the caller reports it
