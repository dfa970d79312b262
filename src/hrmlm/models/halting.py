"""Adaptive depth: when does a position stop? Adaptive computation time (Graves 2016, arXiv 1603.08983), per position.

After outer step s a position halts with probability p_s, read from its own state. It stops at the first s with
p_1 + … + p_s ≥ threshold, or at the last step; its output is Σ w_s · state_s with w_s = p_s, and the remainder
R = 1 − Σ_{s < stop} p_s at the stop, so that its weights sum to 1. The cost steps + R is differentiable through R.
Training and inference use the same rule, and no position looks at another one.

Shapes: B rows, L positions, D width.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hrmlm.config import StrictConfig
from hrmlm.models.blocks import ForwardCall, KeyHistory

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class HaltingConfig(StrictConfig):
    """Settings of learned halting.

    epsilon: a position stops when its halting probabilities sum to 1 − epsilon; step_cost: weight of the mean of
    steps + R in the training objective, in nats, the dial between depth and loss; target_depth: instead of making steps
    as few as possible, pull the mean of steps + R towards this number; exploration: share of training batches that are
    given a random minimum number of steps; initial_bias: of the halting logit, below 0 to start with deeper thinking.
    """

    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.01
    step_cost: NotNegative = 0.01
    target_depth: Annotated[float, Field(ge=2, allow_inf_nan=False)] | None = None
    exploration: Annotated[float, Field(ge=0, le=1)] = 0.1
    initial_bias: Annotated[float, Field(allow_inf_nan=False)] = -1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target_depth is not None and self.step_cost == 0:
            raise ValueError("target_depth has no effect with step_cost 0")
        return self


class HaltingHead(nn.Module):
    """Two logits per position, halt and continue, computed in float32 whatever the precision of the rest."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.q = nn.Linear(d_model, 2)

    def logits(self, state_BLD: Tensor) -> Tensor:
        """(…, D) → (…, 2): halt, continue."""
        with torch.autocast(state_BLD.device.type, enabled=False):
            bias = self.q.bias.float()
            return nn.functional.linear(state_BLD.float(), self.q.weight.float(), bias)

    def forward(self, state_BLD: Tensor) -> Tensor:
        """Probability to halt now, (B, L): σ(halt − continue)."""
        halt_BL, continue_BL = self.logits(state_BLD).unbind(-1)
        return torch.sigmoid(halt_BL - continue_BL)


@dataclass(frozen=True)
class Halting:
    """Where every position stands. Immutable: each step gives a new one, so nothing is shared between calls.

    output_BLD: weighted states so far; total_BL: sum of halting probabilities; steps_BL: outer steps executed (int64);
    remainder_BL: R of stopped positions; running_BL: who goes on.
    """

    output_BLD: Tensor
    total_BL: Tensor
    steps_BL: Tensor
    remainder_BL: Tensor
    running_BL: Tensor

    @classmethod
    def start(cls, state_BLD: Tensor) -> Self:
        """All positions run, none has an output yet."""
        zeros_BL = state_BLD.new_zeros(state_BLD.shape[:-1], dtype=torch.float32)
        return cls(
            output_BLD=torch.zeros_like(state_BLD),
            total_BL=zeros_BL,
            steps_BL=torch.zeros_like(zeros_BL, dtype=torch.long),
            remainder_BL=zeros_BL,
            running_BL=torch.ones_like(zeros_BL, dtype=torch.bool),
        )

    def advance(self, state_BLD: Tensor, p_BL: Tensor, threshold: float, may_stop: bool, must_stop: bool) -> "Halting":
        """After one more outer step of the running positions.

        p_BL: their halting probabilities; may_stop: False while a minimum number of steps is not reached, where
        nothing may be spent either; must_stop: this is the last step.
        """
        p_BL = p_BL if may_stop else torch.zeros_like(p_BL)
        total_BL = self.total_BL + p_BL
        stops_BL = torch.ones_like(self.running_BL) if must_stop else (total_BL >= threshold) & may_stop
        stops_BL = stops_BL & self.running_BL
        remainder_BL = 1 - self.total_BL
        weight_BL = torch.where(stops_BL, remainder_BL, p_BL) * self.running_BL
        return Halting(
            output_BLD=self.output_BLD + weight_BL[..., None].to(state_BLD.dtype) * state_BLD,
            total_BL=torch.where(self.running_BL, total_BL, self.total_BL),
            steps_BL=self.steps_BL + self.running_BL,
            remainder_BL=torch.where(stops_BL, remainder_BL, self.remainder_BL),
            running_BL=self.running_BL & ~stops_BL,
        )

    def cost_BL(self) -> Tensor:
        """steps + R of every position, differentiable through R."""
        return self.steps_BL + self.remainder_BL


def run_adaptive(
    step: Callable[[int, tuple[Tensor, ...], ForwardCall], tuple[Tensor, ...]],
    states: tuple[Tensor, ...],
    head: HaltingHead,
    call: ForwardCall,
    max_steps: int,
    threshold: float,
    slots: tuple[int, int],
) -> Tensor:
    """Apply `step` to every position until it stops; return the weighted output (B, L, D).

    step: (index from 0, states, call) → new states; the first state, (B, L, D) like all, is the one that halting reads
    and the output weights. slots: first key/value slot of the first step, and slots per step. A call with a fixed depth
    runs exactly that many steps and outputs the last state. While one token per row is decoded, rows that stopped are
    not computed any more; keys and values of stopped positions stand in for their later steps in any case, so the
    result is the same. Leaves `steps_BL` and `step_cost_BL` on the call.
    """
    halting = Halting.start(states[0])
    last = call.depth or max_steps
    decoding = call.cache is not None and states[0].shape[1] == 1
    call.history = None if decoding else KeyHistory(slots[1])
    for index in range(last):
        if decoding:
            states = _step_rows(step, index, states, call, halting.running_BL[:, 0])
        else:
            new = step(index, states, call)
            running_BL1 = halting.running_BL[..., None]
            states = tuple(torch.where(running_BL1, after, before) for after, before in zip(new, states, strict=True))
        may_stop = index + 1 >= (call.depth or call.minimum_steps)
        halting = halting.advance(states[0], head(states[0]), threshold, may_stop, index + 1 == last)
        if not halting.running_BL.any():
            break
        if call.history is not None:
            call.history.running_BL = halting.running_BL
    call.history = None
    if call.cache is not None:
        call.cache.carry(call.positions_BL, *slots, halting.steps_BL)
    call.steps_BL, call.step_cost_BL = halting.steps_BL, halting.cost_BL()
    return halting.output_BLD


def _step_rows(
    step: Callable[[int, tuple[Tensor, ...], ForwardCall], tuple[Tensor, ...]],
    index: int,
    states: tuple[Tensor, ...],
    call: ForwardCall,
    running_B: Tensor,
) -> tuple[Tensor, ...]:
    """One outer step of the running rows only."""
    if running_B.all():
        return step(index, states, call)
    rows = running_B.nonzero()[:, 0]
    new = step(index, tuple(state[rows] for state in states), call.of_rows(rows.cpu()))
    return tuple(before.index_copy(0, rows, after.to(before.dtype)) for after, before in zip(new, states, strict=True))


class AdaptiveDepth:
    """Mixed into a family whose depth is learned: exploration and step cost of its training. Needs `config`."""

    config: Any

    def explore(self, call: ForwardCall, max_steps: int, rng: random.Random | None) -> None:
        """Give a share of the training batches a random minimum number of steps."""
        if rng is not None and max_steps > 1 and rng.random() < self.config.exploration:
            call.minimum_steps = rng.randint(2, max_steps)

    def step_penalty(self, call: ForwardCall, scored_BL: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Penalty in the objective, a sum over scored tokens, and sums for the record.

        scored_BL: which positions have a target. Weighted by token like the loss itself.
        """
        assert call.step_cost_BL is not None
        assert call.steps_BL is not None
        cost = call.step_cost_BL[scored_BL].sum()
        target = self.config.target_depth
        pulled = cost if target is None else (cost - target * scored_BL.sum()).abs()
        penalty = self.config.step_cost * pulled
        steps = call.steps_BL[scored_BL]
        sums = {"step_cost": penalty.detach(), "steps": steps.sum()}
        for number, count in enumerate(torch.bincount(steps).tolist()):
            if count:
                sums[f"steps_share/{number}"] = torch.tensor(count)
        return penalty, sums
