"""Lossless self-drafting: the first r cycles of a model guess tokens; going on from there, all its cycles verify them.

A round: each of up to γ + 1 tokens runs the first r cycles, and what is read out there guesses the next one. Then the
remaining cycles run for all of them at once, from the states that were kept. Every token is drawn from the full depth
with the random numbers that plain decoding would use (see sampling.py); a guess is accepted where it is that token. So
the text is the text of plain decoding, greedy or sampled, whatever r and γ are. Nothing is computed twice, and reading
weights, the price of decoding, is shared by all tokens of a round.

Speculative decoding: Leviathan et al. 2023 (arXiv 2211.17192); drafts from early exits of the same model:
Elhoushi et al. 2024 (arXiv 2404.16710). Shapes: B rows, L positions, V ids.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hrmlm.errors import UserError
from hrmlm.inference.decoding import Cached, Depth, Drawn, Runner, logprobs
from hrmlm.inference.sampling import Sampler
from hrmlm.models.base import LanguageModel
from hrmlm.models.blocks import ForwardCall
from hrmlm.models.cache_policy import FULL, CachePolicy

MOST_TOKENS = 12
PROBED = 32
"""So many last positions of the prompt tell how often each depth agrees with the full one."""
REMEMBERED = 64.0
"""Agreement is that of about so many last guesses."""
PATIENCE = 8
"""Plain steps before a draft is tried although none promises enough; after every such try twice as many."""
WORTHWHILE = 1.03
"""A draft must promise this speed against plain decoding."""


@dataclass(frozen=True)
class DraftOptions:
    """cycles: r, how many cycles guess; tokens: γ, how many tokens are guessed at most. None: as measured."""

    cycles: int | None = None
    tokens: int | None = None


def check_drafting(model: LanguageModel, draft: DraftOptions, depth: Depth) -> None:
    """Raises: UserError if this model cannot draft like that."""
    if model.carries_state:
        raise UserError("drafting needs the text itself, and this model replaces it by a memory as it goes")
    if depth.exit is not None:
        raise UserError("drafting and an exit rule exclude each other: drafts need all positions at the same depth")
    if model.learns_depth and depth.depth is None:
        raise UserError("drafting needs all positions at the same depth, and this model learns it; give a depth")
    most = model.total_cycles(depth.depth) - 1
    if most < 1:
        raise UserError("drafting needs a model of at least 2 cycles")
    if draft.cycles is not None and not 1 <= draft.cycles <= most:
        raise UserError(f"{draft.cycles} cycles cannot draft; this model can draft with 1 to {most}")
    if draft.tokens is not None and draft.tokens < 1:
        raise UserError(f"{draft.tokens} tokens cannot be drafted; give at least 1")


class Drafting(Cached):
    """Decoding with a cache in rounds of guessing and verifying."""

    def __init__(
        self,
        runner: Runner,
        prompts: Sequence[Sequence[int]],
        sampler: Sampler,
        depth: Depth,
        *,
        draft: DraftOptions,
        policy: CachePolicy = FULL,
        **room: Any,
    ) -> None:
        check_drafting(runner.model, draft, depth)
        if policy.is_sequential:
            raise UserError(f"cache policy {policy.name} cannot draft: tokens are verified together, not one at a time")
        super().__init__(runner, prompts, sampler, depth, policy=policy, **room)
        self.planner = Planner(self.total, draft, reading_shares(self.model, self.depth.depth))

    def next(self, numbers: Sequence[int], room: Sequence[int]) -> list[list[Drawn]]:
        """See Decoder.next."""
        if not self.prefilled:
            return super().next(numbers, room)
        # No draft beyond what the longest-lived row can take, nor beyond the room of any row's cache.
        limit = min(max(room) - 1, self.cache.max_length - int(self.cache.lengths_B.max()) - 1)
        plan = self.planner.plan(limit)
        if plan is not None:
            return self._round(numbers, *plan)
        clock = Clock(self.device)
        drawn = self.plain_step(numbers)
        self.planner.observe_plain(clock.lap())
        return drawn

    def forward_prompt(self, tokens_BL: Tensor, lengths_B: Tensor) -> tuple[Tensor, list[int]]:
        """Cycle by cycle, so that every depth can be compared with the full one on the last positions."""
        self.forwards += 1
        call = self._prepare(tokens_BL, lengths_B)
        states = self.model.begin(tokens_BL, call)
        ends_B = (lengths_B - 1).clamp_min(0)
        offsets_L = torch.arange(min(PROBED, tokens_BL.shape[1])).flip(0)
        places_BL = (ends_B[:, None] - offsets_L).clamp_min(0).to(self.device)
        rows_B1 = torch.arange(len(ends_B), device=self.device)[:, None]
        choices = []
        for index in range(self.total):
            states = self.model.cycle(index, states, call)
            if index + 1 == self.total or self.planner.wants_probe:
                state_BLD = self.model.read(states)
                logits_BLV = self.model.readout(self.model.finish(state_BLD, call)[rows_B1, places_BL])
                choices.append(self.sampler(logits_BLV, [0] * len(ends_B)))
        self.cache.lengths_B = self.cache.lengths_B + lengths_B
        real_BL = offsets_L <= ends_B[:, None]
        for index, choice_BL in enumerate(choices[:-1], start=1):
            agrees_BL = (choice_BL == choices[-1]).cpu() & real_BL
            self.planner.observe_agreement(index, int(agrees_BL.sum()), int(real_BL.sum()))
        return logits_BLV[:, -1], [self.total] * len(ends_B)

    def _prepare(self, tokens_BL: Tensor, lengths_B: Tensor | None = None) -> ForwardCall:
        return self.model.prepare(tokens_BL, cache=self.cache, lengths_B=lengths_B, depth=self.depth.depth)

    def _round(self, numbers: Sequence[int], r: int, n_drafts: int) -> list[list[Drawn]]:
        """Guess, verify, keep what agrees."""
        self.forwards += 1
        clock = Clock(self.device)
        before_B = self.cache.lengths_B
        fed, kept, tokens_B1 = [self.tokens_BL], [], self.tokens_BL
        for guessed in range(n_drafts + 1):
            states, logits_BLV = self.runner.first(tokens_B1, self._prepare(tokens_B1), r)
            kept.append(states)
            self.cache.lengths_B = self.cache.lengths_B + 1
            if guessed < n_drafts:
                tokens_B1 = self.sampler(logits_BLV, [number + guessed for number in numbers])
                fed.append(tokens_B1)
        drafted = clock.lap()
        self.cache.lengths_B = before_B
        tokens_BL = torch.cat(fed, dim=1)
        states = tuple(torch.cat(parts, dim=1) for parts in zip(*kept, strict=True))
        logits_BLV = self.runner.rest(states, self._prepare(tokens_BL), r, self.total)
        ids_BL = self.sampler(logits_BLV, numbers)
        agrees_BL = ids_BL[:, :-1] == tokens_BL[:, 1:]
        accepted_B = agrees_BL.long().cumprod(dim=1).sum(dim=1)
        accepted = accepted_B.tolist()
        self.planner.observe_round(r, n_drafts, drafted, clock.lap(), accepted)
        self.cache.lengths_B = before_B + accepted_B.cpu() + 1
        rows = zip(ids_BL.tolist(), logprobs(logits_BLV, ids_BL), accepted, strict=True)
        drawn = [
            [Drawn(row_ids[i], row_logprobs[i], self.total, i < count) for i in range(count + 1)]
            for row_ids, row_logprobs, count in rows
        ]
        return self.take(ids_BL.gather(1, accepted_B[:, None]), drawn)


def reading_shares(model: LanguageModel, depth: int | None) -> tuple[float, float, float]:
    """Shares of a token's time, by the weights that are read: what runs once, one cycle, the head."""
    schedule = model.schedule(depth)
    total = model.total_cycles(depth)
    weights = {
        name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in {a.module for a in schedule}
    }
    first, stride = model.cycle_slots or (0, 1)
    once = sum(weights[a.module] for a in schedule if a.slot < first)
    cycle = sum(weights[a.module] for a in schedule if first <= a.slot < first + stride)
    head = model.config.n_predicted * model.config.d_model
    read = once + total * cycle + head
    return once / read, cycle / read, head / read


class Clock:
    """Seconds between laps; waits for an accelerator to finish."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._now()

    def lap(self) -> float:
        """Seconds since the start or the last lap."""
        start, self._start = self._start, self._now()
        return self._start - start

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


class Average:
    """An average of numbers that come one by one, in which the last few count most."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, number: float) -> None:
        """Take one more in. Of the first three the smallest counts: they hold what only a start costs."""
        self.count += 1
        if self.count <= 3:
            self.value = number if self.count == 1 else min(self.value, number)
        else:  # far above the usual is a disturbance from outside: it moves the average, but not far
            self.value += 0.15 * (min(number, 2 * abs(self.value)) - self.value)


class Planner:
    """Chooses r and γ, or no draft at all, from what was measured: the times of plain steps and of both halves of a
    round, and how often each depth agrees with the full one. What is given is not chosen.

    shares: of a plain step's time, before anything is measured: what runs once, one cycle, the head.
    """

    def __init__(self, total: int, draft: DraftOptions, shares: tuple[float, float, float]) -> None:
        self._total, self._draft = total, draft
        self._begin, self._cycle, self._head = shares
        self._plain = Average()
        depths = range(1, total) if draft.cycles is None else (draft.cycles,)
        self._drafting = {r: Average() for r in depths}  # a draft's seconds against those its shares predict
        self._verifying = Average()  # how much dearer verifying becomes per further token
        # Two agreements in three, before anything is known: enough to be tried.
        self._agreed = dict.fromkeys(depths, 2.0)
        self._compared = dict.fromkeys(depths, 3.0)
        self._since_draft, self._patience = 0, PATIENCE

    @property
    def wants_probe(self) -> bool:
        """Whether agreement on the prompt helps to choose."""
        return self._draft.cycles is None or self._draft.tokens is None

    def plan(self, limit: int) -> tuple[int, int] | None:
        """(r, γ) for the next round, γ <= limit; None for a plain step."""
        if limit < 1:
            return None
        if self._draft.cycles is not None and self._draft.tokens is not None:
            return self._draft.cycles, min(self._draft.tokens, limit)
        if self._plain.count < 3:
            return None  # too little is timed yet
        best = max(self._candidates(limit), key=lambda plan: self.gain(*plan))
        if self.gain(*best) > WORTHWHILE:
            self._since_draft, self._patience = 0, PATIENCE
            return best
        self._since_draft += 1
        if self._since_draft < self._patience:
            return None
        self._since_draft, self._patience = 0, 2 * self._patience  # texts change: look again, ever more rarely
        return best[0], 1

    def observe_plain(self, seconds: float) -> None:
        """Seconds of a plain step."""
        self._plain.add(seconds)

    def observe_agreement(self, r: int, agreed: int, compared: int) -> None:
        """How many tokens that r cycles guess are those of the full depth."""
        if r in self._agreed:
            self._agreed[r] += agreed
            self._compared[r] += compared
            if self._compared[r] > REMEMBERED:  # old comparisons fade
                shrink = REMEMBERED / self._compared[r]
                self._agreed[r], self._compared[r] = self._agreed[r] * shrink, REMEMBERED

    def observe_round(self, r: int, n_drafts: int, drafted: float, verified: float, accepted: Sequence[int]) -> None:
        """Seconds of both halves of a round, and how many of its guesses each row accepted."""
        for count in accepted:
            self.observe_agreement(r, count, min(count + 1, n_drafts))
        if self._plain.count:
            self._drafting[r].add(drafted / self._plain.value / self._draft_shares(r, n_drafts))
            self._verifying.add((verified / self._plain.value / self._verify_share(r) - 1) / n_drafts)

    def _candidates(self, limit: int) -> list[tuple[int, int]]:
        most = min(limit, MOST_TOKENS)
        tokens = range(1, most + 1) if self._draft.tokens is None else [min(self._draft.tokens, limit)]
        return [(r, n) for r in self._agreed for n in tokens]

    def gain(self, r: int, n_drafts: int) -> float:
        """Expected speed against plain decoding."""
        alpha = min(self._agreed[r] / self._compared[r], 0.99)
        tokens = (1 - alpha ** (n_drafts + 1)) / (1 - alpha)
        drafting = self._drafting[r].value if self._drafting[r].count else 1.0
        slope = self._verifying.value if self._verifying.count else 0.1
        verifying = self._verify_share(r) * max(1 + slope * n_drafts, 0.5)
        return tokens / (drafting * self._draft_shares(r, n_drafts) + verifying)

    def _draft_shares(self, r: int, n_drafts: int) -> float:
        return (n_drafts + 1) * (self._begin + r * self._cycle + self._head)

    def _verify_share(self, r: int) -> float:
        return (self._total - r) * self._cycle + self._head
