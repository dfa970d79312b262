"""Choosing the next tokens of every row of a batch from their logits.

B rows, L positions, N = B·L of them, V ids that can be predicted. Every row has its own options and its own random
numbers, so a row of a batch draws what it would draw alone.
"""

import secrets
from collections.abc import Sequence

import numpy as np
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
    """Draws ids for every row. `seeds` are those in use, chosen ones included.

    Drawing is by the Gumbel-max rule: the id with the largest probability / noise, where the noise is exponential and
    depends on the row's seed and on the number of the new token only. So the same token comes out whenever and however
    often it is drawn, and two models that nearly agree draw the same id nearly always: of distributions at total
    variation distance d in at least (1 - d) / (1 + d) of the draws (Daliri et al. 2024, arXiv 2408.07978).
    """

    def __init__(self, options: Sequence[SamplingOptions], device: torch.device | str = "cpu") -> None:
        self.seeds = [secrets.randbits(63) if o.seed is None else o.seed for o in options]
        self._device = device
        self._row_seeds = list(self.seeds)
        no_limit = torch.iinfo(torch.int64).max
        self._temperature_B = torch.tensor([o.temperature for o in options], dtype=torch.float64, device=device)
        self._top_k_B = torch.tensor([min(o.top_k or no_limit, no_limit) for o in options], device=device)
        self._top_p_B = torch.tensor([o.top_p for o in options], dtype=torch.float64, device=device)
        self._draws = any(o.temperature > 0 for o in options)
        self._limits = any(o.top_k or o.top_p < 1 for o in options)

    def __call__(self, logits_BLV: Tensor, first: Sequence[int]) -> Tensor:
        """Ids (B, L) for logits (B, L, V). first: number (from 0) of the new token that stands first, for each row."""
        best_BL = logits_BLV.argmax(-1)
        if not self._draws:
            return best_BL
        B, L, V = logits_BLV.shape
        temperature_N, top_k_N, top_p_N = (
            values_B.repeat_interleave(L) for values_B in (self._temperature_B, self._top_k_B, self._top_p_B)
        )
        logits_NV, greedy_N = logits_BLV.reshape(-1, V), temperature_N == 0
        temperature_N = temperature_N.masked_fill(greedy_N, 1)
        if self._limits:
            outside_NV = _outside_limits(logits_NV, temperature_N, top_k_N, top_p_N)
            logits_NV = logits_NV.masked_fill(outside_NV, -torch.inf)
        noise_NV = torch.stack(
            [
                exponential_noise(seed, start + place, V)
                for seed, start in zip(self._row_seeds, first, strict=True)
                for place in range(L)
            ]
        )
        drawn_N = (_probabilities(logits_NV, temperature_N) / noise_NV.to(logits_NV.device)).argmax(-1)
        return torch.where(greedy_N.view(B, L), best_BL, drawn_N.view(B, L))

    def select(self, rows_B: Tensor) -> None:
        """Keep only these rows, in this order."""
        self._row_seeds = [self._row_seeds[row] for row in rows_B.tolist()]
        rows_B = rows_B.to(self._device)
        self._temperature_B, self._top_k_B, self._top_p_B = (
            values_B[rows_B] for values_B in (self._temperature_B, self._top_k_B, self._top_p_B)
        )


def exponential_noise(seed: int, number: int, size: int) -> Tensor:
    """Independent numbers (size,) from the exponential distribution, above 0, in float64.

    Made on the processor whatever the device, so that a seed means the same numbers everywhere; from the raw bits of
    Philox (Salmon et al. 2011), a counter-based generator: no state is kept, and no other number is needed first.
    """
    bits = np.random.Philox(key=seed, counter=[0, 0, 0, number]).random_raw(size)
    return -torch.from_numpy(((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53).log_()


def _outside_limits(logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """True (N, V) for the ids that top_k or top_p exclude; top_p shares out what top_k left."""
    # Logits are sorted, not probabilities: a high temperature makes unequal logits equally probable.
    logits_NV, ids_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
    outside_NV = rank_V >= top_k_N[:, None]
    probability_NV = _probabilities(logits_NV.masked_fill(outside_NV, -torch.inf), temperature_N)
    before_NV = probability_NV.cumsum(-1) - probability_NV
    # Rounding lets the sum reach 1 before the last token, so top_p = 1 must not compare.
    beyond_NV = (before_NV >= top_p_N[:, None]) & (top_p_N[:, None] < 1) & (rank_V > 0)
    return torch.zeros_like(outside_NV).scatter(1, ids_NV, outside_NV | beyond_NV)


def _probabilities(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """Softmax in float64; with the maximum at 0 first, no temperature above 0 overflows."""
    shifted_NV = logits_NV.double() - logits_NV.amax(-1, keepdim=True).double()
    return (shifted_NV / temperature_N[:, None]).softmax(-1)
