"""Speed of decoding under several settings, on the same text: what `hrmlm probe` prints as tokens per second.

One row is really decoded with the cache, token by token, by the decoder that generation uses (packed weights, sampling
step included); only the token that is taken is the next one of the given text, so that all settings decode the same
tokens. After a warm-up every setting decodes the same stretch once per round, in turn; the median of the rounds counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hrmlm.errors import UserError
from hrmlm.evaluation.scoring import Ids
from hrmlm.evaluation.timing import Timing
from hrmlm.inference.decoding import Cached, Depth, Runner
from hrmlm.inference.drafting import Clock
from hrmlm.inference.packing import packed
from hrmlm.inference.sampling import Sampler, SamplingOptions
from hrmlm.models.base import LanguageModel, evaluating
from hrmlm.models.cache_policy import FULL, CachePolicy
from hrmlm.steps import depth_keywords

WARM_UP = 4
MOST_TOKENS = 64
FEW_TOKENS = 8
ROUNDS = 5
MOST_IDS = 256
"""The beginning of a text that is looked at."""


@dataclass(frozen=True)
class Run:
    """What is decoded with: depth, halt_threshold, exit as in `GenerationOptions`; policy of the cache."""

    depth: int | None = None
    halt_threshold: float | None = None
    exit: str | None = None
    policy: CachePolicy = FULL


@dataclass(frozen=True)
class Speed:
    """Of one row: tokens per second over a stretch of `tokens` tokens, the median of `rounds` rounds; spread: between
    the slowest and the fastest round, as a share of the median; context: tokens before the stretch; cycles: mean
    cycles spent on its tokens."""

    tokens_per_second: float
    spread: float
    rounds: int
    tokens: int
    context: int
    cycles: float

    def __str__(self) -> str:
        """For people: the rate and how far the rounds lie apart."""
        return f"{self.tokens_per_second:,.1f} ±{self.spread / 2:.0%}"

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        return vars(self)


def note(speeds: Sequence[Speed | None]) -> str:
    """What people must know about the rates of a table: over how many tokens, and whether that is enough to compare."""
    measured = [speed for speed in speeds if speed is not None]
    if not measured:
        return ""
    first = measured[0]
    text = f" tokens/s: one row, {first.tokens} tokens in each of {first.rounds} rounds, ± half their spread."
    if first.tokens < FEW_TOKENS:
        text += " So few tokens say little: give a larger --seconds."
    return text


class Dictated(Sampler):
    """Takes the next token of a text, after the work of choosing one."""

    def __init__(self, ids: Tensor, device: torch.device) -> None:
        super().__init__([SamplingOptions(temperature=0, seed=0)], device)
        self._ids = ids.to(device)

    def __call__(self, logits_BLV: Tensor, first: Sequence[int]) -> Tensor:
        """See Sampler."""
        super().__call__(logits_BLV, first)
        return self._ids[None, first[0] : first[0] + logits_BLV.shape[1]]


@dataclass(frozen=True)
class Stretch:
    """A text whose first `n_context` tokens are read and whose next ones are decoded, again for every measurement: the
    caches of many settings together may not fit into the memory."""

    model: LanguageModel
    ids: Tensor
    n_context: int

    def decode(self, run: Run, n_tokens: int) -> tuple[float, float, float]:
        """Seconds to read the context, seconds for so many tokens after it, and mean cycles spent on each."""
        model = self.model
        depth = Depth(**depth_keywords(model, run.depth, run.halt_threshold, run.exit))
        device = next(model.parameters()).device
        room: dict[str, Any] = {"max_length": self.n_context + n_tokens, "prefill_chunk": 512, "policy": run.policy}
        sampler = Dictated(self.ids[self.n_context :], device)
        clock = Clock(device)
        decoder = Cached(Runner(model), [self.ids[: self.n_context].tolist()], sampler, depth, **room)
        decoder.next([0], [n_tokens + 1])
        reading = clock.lap()
        cycles = [decoder.next([number], [1 + n_tokens - number])[0][0].cycles for number in range(1, 1 + n_tokens)]
        return reading, clock.lap(), sum(cycles) / n_tokens


def check_seconds(seconds: float) -> None:
    """Raises: UserError for a time in which nothing can be measured, or that never ends."""
    if not 0 < seconds < math.inf:
        raise UserError(f"{seconds:g} seconds for measuring are not possible; give a number above 0")


@torch.no_grad()
def decode_speeds(model: LanguageModel, ids: Ids, runs: Sequence[Run], *, seconds: float = 30.0) -> list[Speed | None]:
    """Speed of every run on the beginning of a stream of ids; None where there is too little text to decode, or no
    cache to decode with.

    seconds: about how long the rounds may take together; stretches are shorter where MOST_TOKENS tokens take longer,
    down to one token. As many tokens stand before a stretch as belong to it at most.

    Raises: UserError for a run that this model cannot do with a cache, or seconds that are not above 0.
    """
    check_seconds(seconds)
    try:
        model.new_cache(1, 1)
    except UserError:
        return [None] * len(runs)
    ids = torch.as_tensor(np.asarray(ids).astype(np.int64))
    # The stretch takes one token more than it feeds.
    n_tokens = min(MOST_TOKENS, min(len(ids) - 2, model.config.context - 1) // 2)
    if n_tokens < 1:
        return [None] * len(runs)
    stretch, warm_up = Stretch(model, ids, n_tokens), min(WARM_UP, n_tokens)
    with packed(model), evaluating(model):
        tried = [stretch.decode(run, warm_up) for run in runs]
        reading, per_token = sum(first for first, _, _ in tried), sum(rest for _, rest, _ in tried) / warm_up
        n_tokens = max(1, min(n_tokens, int((seconds / ROUNDS - reading) / per_token)))
        rounds = [[stretch.decode(run, n_tokens) for run in runs] for _ in range(ROUNDS)]
    speeds: list[Speed | None] = []
    for measured in zip(*rounds, strict=True):
        timing = Timing(tuple(taken for _, taken, _ in measured))
        speeds.append(
            Speed(n_tokens / timing.median, timing.spread, ROUNDS, n_tokens, stretch.n_context, measured[0][2])
        )
    return speeds
