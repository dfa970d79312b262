"""Ways to get the next tokens of a batch: recompute everything, or go on from a cache. Drafting is in drafting.py.

B rows, L positions fed in one step, V ids that can be predicted.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hrmlm.inference.sampling import Sampler
from hrmlm.models.base import LanguageModel
from hrmlm.models.blocks import ForwardCall, States
from hrmlm.models.cache import KVCache
from hrmlm.models.cache_policy import FULL, CachePolicy
from hrmlm.models.halting import ExitRule


@dataclass(frozen=True)
class Drawn:
    """One token of a row. logprob: natural logarithm of the probability the model gave it, before the sampler's
    settings; cycles: cycles, steps or layers spent on the position it was read from; drafted: whether a draft guessed
    it."""

    id: int
    logprob: float
    cycles: int
    drafted: bool = False


@dataclass(frozen=True)
class Depth:
    """How deep a model runs: as trained, or by one of these."""

    depth: int | None = None
    halt_threshold: float | None = None
    exit: ExitRule | None = None


class Runner:
    """The parts of a step that take time, as functions of tensors: here as they are, elsewhere compiled."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def first(self, tokens_BL: Tensor, call: ForwardCall, cycles: int) -> tuple[States, Tensor]:
        """The states after the first so many cycles, and the logits (B, L, V) of what is read out there."""
        states = self.model.begin(tokens_BL, call)
        for index in range(cycles):
            states = self.model.cycle(index, states, call)
        return states, self._logits(states, call)

    def rest(self, states: States, call: ForwardCall, done: int, cycles: int) -> Tensor:
        """Logits (B, L, V) after `cycles` cycles, of states that have done some of them."""
        for index in range(done, cycles):
            states = self.model.cycle(index, states, call)
        return self._logits(states, call)

    def _logits(self, states: States, call: ForwardCall) -> Tensor:
        return self.model.readout(self.model.finish(self.model.read(states), call))


class Decoder(ABC):
    """What every way shares: the model, the rows, and the ids that the next step feeds."""

    def __init__(self, runner: Runner, prompts: Sequence[Sequence[int]], sampler: Sampler, depth: Depth) -> None:
        model = runner.model
        self.runner, self.model, self.sampler, self.depth = runner, model, sampler, depth
        self.total = model.total_cycles(depth.depth)
        self.device = next(model.parameters()).device
        self.forwards = 0
        # Right-padded ids, and how many of each row are real.
        self.lengths_B = torch.tensor([len(prompt) for prompt in prompts])
        self.tokens_BL = _right_padded(prompts).to(self.device)

    @abstractmethod
    def next(self, numbers: Sequence[int], room: Sequence[int]) -> list[list[Drawn]]:
        """New tokens of every row, at least one each.

        numbers: how many new tokens each row has already; room: how many it can still take.
        """

    def select(self, places_B: Tensor) -> None:
        """Keep only these rows, in this order."""
        self.lengths_B = self.lengths_B[places_B]
        self.tokens_BL = self.tokens_BL[places_B.to(self.device)]

    def forward(self, tokens_BL: Tensor, lengths_B: Tensor, cache: KVCache | None) -> tuple[Tensor, list[int]]:
        """Logits (B, V) that follow each row's last real token, and the cycles spent on that token."""
        self.forwards += 1
        ends_B = (lengths_B - 1).clamp_min(0)
        output = self.model(
            tokens_BL,
            cache=cache,
            lengths_B=lengths_B,
            read_B=ends_B,
            depth=self.depth.depth,
            halt_threshold=self.depth.halt_threshold,
            exit=self.depth.exit,
        )
        logits_BV = output.logits[:, 0]
        if output.steps_BL is None:
            return logits_BV, [self.total] * len(logits_BV)
        return logits_BV, output.steps_BL.gather(1, ends_B[:, None].to(output.steps_BL.device))[:, 0].tolist()

    def draw(
        self, logits_BV: Tensor, cycles: Sequence[int], numbers: Sequence[int]
    ) -> tuple[Tensor, list[list[Drawn]]]:
        """One id for every row: as (B, 1) to be fed next, and what it says."""
        ids_B1 = self.sampler(logits_BV[:, None], numbers)
        rows = zip(ids_B1[:, 0].tolist(), logprobs(logits_BV, ids_B1[:, 0]), cycles, strict=True)
        return ids_B1, [[Drawn(token, logprob, count)] for token, logprob, count in rows]


class Recomputing(Decoder):
    """Without a cache: the whole text again for every token."""

    def next(self, numbers: Sequence[int], room: Sequence[int]) -> list[list[Drawn]]:
        """See Decoder.next."""
        self.tokens_BL = self.tokens_BL[:, : int(self.lengths_B.max())]  # a long row may have left
        logits_BV, cycles = self.forward(self.tokens_BL, self.lengths_B, None)
        ids_B1, drawn = self.draw(logits_BV, cycles, numbers)
        ends_B1 = self.lengths_B.to(self.device)[:, None]
        self.tokens_BL = F.pad(self.tokens_BL, (0, 1)).scatter(1, ends_B1, ids_B1)
        self.lengths_B = self.lengths_B + 1
        return drawn


class Cached(Decoder):
    """With a cache: the prompts in chunks, then one token after another."""

    def __init__(
        self,
        runner: Runner,
        prompts: Sequence[Sequence[int]],
        sampler: Sampler,
        depth: Depth,
        *,
        max_length: int,
        prefill_chunk: int,
        policy: CachePolicy = FULL,
        cache: KVCache | None = None,
    ) -> None:
        super().__init__(runner, prompts, sampler, depth)
        self.model.check_cache_policy(policy, depth.depth, depth.exit)
        self.cache = cache or self.model.new_cache(len(prompts), max_length, depth=depth.depth, policy=policy)
        self.prefill_chunk = 1 if policy.is_sequential else prefill_chunk
        self.prefilled = False

    def next(self, numbers: Sequence[int], room: Sequence[int]) -> list[list[Drawn]]:
        """See Decoder.next."""
        if not self.prefilled:
            logits_BV, cycles = self.prefill()
        elif self.decides_depth:
            logits_BV, cycles = self.forward(self.tokens_BL, self.lengths_B, self.cache)
        else:
            return self.plain_step(numbers)
        return self.take(*self.draw(logits_BV, cycles, numbers))

    @property
    def decides_depth(self) -> bool:
        """Whether positions stop at cycles of their own."""
        return self.depth.exit is not None or (self.model.learns_depth and self.depth.depth is None)

    def plain_step(self, numbers: Sequence[int]) -> list[list[Drawn]]:
        """One new token per row, of a model that runs all positions to the same depth."""
        self.forwards += 1
        call = self.model.prepare(self.tokens_BL, cache=self.cache, depth=self.depth.depth)
        _, logits_BLV = self.runner.first(self.tokens_BL, call, self.total)
        self.cache.lengths_B = self.cache.lengths_B + 1
        return self.take(*self.draw(logits_BLV[:, -1], [self.total] * len(logits_BLV), numbers))

    def take(self, ids_B1: Tensor, drawn: list[list[Drawn]]) -> list[list[Drawn]]:
        """Make these the tokens that the next step feeds."""
        self.tokens_BL, self.lengths_B = ids_B1, torch.ones(len(ids_B1), dtype=torch.long)
        return drawn

    def prefill(self) -> tuple[Tensor, list[int]]:
        """Feed the prompts, some positions at a time; what follows each row's last one, wherever that stands."""
        self.prefilled = True
        logits: list[Tensor | None] = [None] * len(self.lengths_B)
        cycles = [0] * len(self.lengths_B)
        for start in range(0, self.tokens_BL.shape[1], self.prefill_chunk):
            chunk_BL = self.tokens_BL[:, start : start + self.prefill_chunk]
            real_B = (self.lengths_B - start).clamp(0, chunk_BL.shape[1])
            logits_BV, cycles_B = self.forward_prompt(chunk_BL, real_B)
            ends_here = (self.lengths_B > start) & (self.lengths_B <= start + chunk_BL.shape[1])
            for row in ends_here.nonzero()[:, 0].tolist():
                logits[row], cycles[row] = logits_BV[row], cycles_B[row]
        return torch.stack([row for row in logits if row is not None]), cycles

    def forward_prompt(self, tokens_BL: Tensor, lengths_B: Tensor) -> tuple[Tensor, list[int]]:
        """`forward` for a chunk of the prompts."""
        return self.forward(tokens_BL, lengths_B, self.cache)

    def select(self, places_B: Tensor) -> None:
        """See Decoder.select."""
        super().select(places_B)
        self.cache.select(places_B)


def logprobs(logits_V: Tensor, ids: Tensor) -> list:
    """Natural logarithms of the probabilities of ids (…) in logits (…, V), as nested lists."""
    return (logits_V.gather(-1, ids[..., None])[..., 0] - logits_V.logsumexp(-1)).tolist()


def _right_padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids (B, L), zeros behind shorter rows, which no real token sees."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
