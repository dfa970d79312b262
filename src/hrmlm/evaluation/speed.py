"""Speed of decoding under several settings, on the same text: what `hrmlm probe` prints as tokens per second.

One row is really decoded with the cache, token by token, by the decoder that generation uses (packed weights, sampling
step included); only the token that is taken is the next one of the given text, so that all settings decode the same
tokens. After a warm-up every setting decodes the same stretch once per round, in turn; the median of the rounds counts.
"""

import time
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
from hrmlm.inference.packing import packed
from hrmlm.inference.sampling import Sampler, SamplingOptions
from hrmlm.models.base import LanguageModel, evaluating
from hrmlm.models.cache_policy import FULL, CachePolicy
from hrmlm.steps import depth_keywords

WARM_UP = 4
ROUNDS = 3
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

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        return vars(self)


class Dictated(Sampler):
    """Takes the next token of a text, after the work of choosing one."""

    def __init__(self, ids: Tensor, device: torch.device) -> None:
        super().__init__([SamplingOptions(temperature=0, seed=0)], device)
        self._ids = ids.to(device)

    def __call__(self, logits_BLV: Tensor, first: Sequence[int]) -> Tensor:
        """See Sampler."""
        super().__call__(logits_BLV, first)
        return self._ids[None, first[0] : first[0] + logits_BLV.shape[1]]


class Stretch:
    """One row of one setting, which decodes the same tokens of a text again and again."""

    def __init__(self, model: LanguageModel, ids: Tensor, n_context: int, n_tokens: int, run: Run) -> None:
        keywords = depth_keywords(model, run.depth, run.halt_threshold, run.exit)
        sampler = Dictated(ids[n_context:], next(model.parameters()).device)
        room: dict[str, Any] = {"max_length": n_context + n_tokens, "prefill_chunk": 512, "policy": run.policy}
        self._decoder = Cached(Runner(model), [ids[:n_context].tolist()], sampler, Depth(**keywords), **room)
        self._decoder.next([0], [n_tokens + 1])
        self._start = self._decoder.cache.lengths_B, self._decoder.tokens_BL, self._decoder.lengths_B

    def decode(self, n_tokens: int) -> tuple[float, float]:
        """Seconds for the first so many tokens after the context, and mean cycles spent on each."""
        decoder = self._decoder
        decoder.cache.lengths_B, decoder.tokens_BL, decoder.lengths_B = self._start
        _wait(decoder.device)
        start = time.perf_counter()
        cycles = [decoder.next([number], [1 + n_tokens - number])[0][0].cycles for number in range(1, 1 + n_tokens)]
        _wait(decoder.device)
        return time.perf_counter() - start, sum(cycles) / n_tokens


@torch.no_grad()
def decode_speeds(
    model: LanguageModel, ids: Ids, runs: Sequence[Run], *, seconds: float = 30.0, most_tokens: int = 64
) -> list[Speed | None]:
    """Speed of every run on the beginning of a stream of ids; None where there is too little text to decode, or no
    cache to decode with.

    seconds: about how long the rounds may take together: stretches are shorter where `most_tokens` tokens each take
    longer. The context before a stretch is as long as the text and the model allow, 128 tokens at most.

    Raises: UserError for a run that this model cannot do with a cache, or seconds that are not above 0.
    """
    if not seconds > 0:
        raise UserError(f"{seconds:g} seconds for measuring are not possible; give a number above 0")
    try:
        model.new_cache(1, 1)
    except UserError:
        return [None] * len(runs)
    ids = torch.as_tensor(np.asarray(ids).astype(np.int64))
    room = min(len(ids) - 2, model.config.context - 1)  # the stretch takes one token more than it feeds
    n_tokens = min(most_tokens, room // 2)
    if n_tokens < 1:
        return [None] * len(runs)
    n_context = min(128, room - n_tokens)
    with packed(model), evaluating(model):
        stretches = [Stretch(model, ids, n_context, n_tokens, run) for run in runs]
        warm_up = min(WARM_UP, n_tokens)
        per_token = sum(stretch.decode(warm_up)[0] for stretch in stretches) / warm_up
        n_tokens = max(1, min(n_tokens, int(seconds / ROUNDS / per_token)))
        rounds = [[stretch.decode(n_tokens) for stretch in stretches] for _ in range(ROUNDS)]
    speeds: list[Speed | None] = []
    for measured in zip(*rounds, strict=True):
        timing = Timing(tuple(taken for taken, _ in measured))
        speeds.append(Speed(n_tokens / timing.median, timing.spread, ROUNDS, n_tokens, n_context, measured[0][1]))
    return speeds


def _wait(device: torch.device) -> None:
    """Until everything given to an accelerator is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
