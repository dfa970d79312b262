"""Adaptive depth: when does a position stop? Adaptive computation time (Graves 2016, arXiv 1603.08983), per position.

After outer step s a position halts with probability p_s, read from its own state. It stops at the first s with
p_1 + … + p_s ≥ threshold, or at the last step; its output is Σ w_s · state_s with w_s = p_s, and the remainder
R = 1 − Σ_{s < stop} p_s at the stop, so that its weights sum to 1. The cost steps + R is differentiable through R.
Training and inference use the same rule, and no position looks at another one.

Shapes: B rows, L positions, D width.
"""

from dataclasses import dataclass
from typing import Annotated, Protocol, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hrmlm.config import StrictConfig
from hrmlm.models.blocks import ForwardCall, KeyHistory, States

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

    def check_target(self, most: int) -> None:
        """Raises: ValueError if target_depth cannot be reached in `most` steps."""
        if self.target_depth is not None and self.target_depth > most:
            raise ValueError(f"target_depth {self.target_depth:g} exceeds the model's {most} steps")


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32 at least, whatever the precision of the rest."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


class HaltingHead(nn.Module):
    """Two logits per position, halt and continue, in float32."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.q = Float32Linear(d_model, 2)

    def forward(self, state_BLD: Tensor) -> Tensor:
        """Probability to halt now, (B, L): σ(halt − continue)."""
        halt_BL, continue_BL = self.q(state_BLD).unbind(-1)
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

    def advance(self, state_BLD: Tensor, p_BL: Tensor, threshold: float, share: float, must_stop: bool) -> "Halting":
        """After one more outer step of the running positions.

        p_BL: their halting probabilities; share: how much of them counts, below 1 where nobody may stop yet;
        must_stop: this is the last step.
        """
        p_BL = share * p_BL
        total_BL = self.total_BL + p_BL
        stops_BL = torch.ones_like(self.running_BL) if must_stop else (total_BL >= threshold) & (share == 1)
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


class ExitRule(Protocol):
    """When does a position stop? Read after every outer step; no position looks at another one."""

    @property
    def threshold(self) -> float:
        """A position stops once its probabilities sum to this."""

    def __call__(self, before: Tensor, after: Tensor) -> Tensor:
        """Probability to stop now, (…), from the states (…, D) that would be read out before and after the step."""


@dataclass(frozen=True)
class LearnedHalting:
    """The exit rule of a trained head."""

    head: HaltingHead
    threshold: float

    def __call__(self, before: Tensor, after: Tensor) -> Tensor:
        """See ExitRule."""
        return self.head(after)


class Stepwise(Protocol):
    """What `run_adaptive` asks of a model: see LanguageModel for both."""

    def cycle(self, index: int, states: States, call: ForwardCall) -> States:
        """One outer step."""

    def read(self, states: States) -> Tensor:
        """The state that is read out, (B, L, D)."""


def run_adaptive(
    model: Stepwise, states: States, rule: ExitRule, call: ForwardCall, max_steps: int, slots: tuple[int, int]
) -> Tensor:
    """Apply outer steps to every position until it stops; return the weighted readout state (B, L, D).

    states: where the model begins. slots: first key/value slot of the first step, and slots per step. A call with a
    fixed depth runs exactly that many steps and outputs the last state. While one token per row is decoded, rows that
    stopped are not computed any more; keys and values of stopped positions stand in for their later steps in any case,
    so the result is the same. Leaves `steps_BL` and `step_cost_BL` on the call.
    """
    state_BLD = model.read(states)
    halting = Halting.start(state_BLD)
    last = call.depth or max_steps
    # Statistics are recorded of all rows, so all are computed where they are asked for.
    decoding = call.cache is not None and state_BLD.shape[1] == 1 and call.stats is None
    call.history = None if decoding else KeyHistory(slots[1])
    for index in range(last):
        call.running_BL = halting.running_BL if index else None
        if decoding:
            states = _cycle_rows(model, index, states, call, halting.running_BL[:, 0])
        else:
            new = model.cycle(index, states, call)
            running_BL1 = halting.running_BL[..., None]
            states = tuple(torch.where(running_BL1, after, before) for after, before in zip(new, states, strict=True))
        before_BLD, state_BLD = state_BLD, model.read(states)
        share = _share(index + 1, call)
        p_BL = _probabilities(rule, before_BLD, state_BLD, halting.running_BL if decoding else None)
        halting = halting.advance(state_BLD, p_BL, rule.threshold, share, index + 1 == last)
        if not halting.running_BL.any():
            break
    call.record_skipped(range(slots[0] + (index + 1) * slots[1], slots[0] + last * slots[1]))
    call.history = call.running_BL = None
    if call.cache is not None:
        call.cache.carry(call.positions_BL, *slots, halting.steps_BL)
    call.steps_BL, call.step_cost_BL = halting.steps_BL, halting.cost_BL()
    return halting.output_BLD


def _share(step: int, call: ForwardCall) -> float:
    """How much of the halting probabilities counts at a step, from 1.

    Nothing before the last step of a fixed depth, whose output is its last state. In an exploring batch so much that at
    least half of the weight is left at the minimum number of steps: what earlier steps get still tells the head whether
    going on was worth it. Without that, a head that stops everything at step 1 would never hear of anything else, as
    the one weight of such a position is 1 whatever p is.
    """
    if call.depth is not None:
        return float(step == call.depth)
    return 1.0 if step >= call.minimum_steps else 0.5 / (call.minimum_steps - 1)


def _probabilities(rule: ExitRule, before_BLD: Tensor, after_BLD: Tensor, running_BL: Tensor | None) -> Tensor:
    """The rule's probabilities (B, L), 0 where nothing runs any more (None: all run)."""
    if running_BL is None or running_BL.all():
        return rule(before_BLD, after_BLD)
    p_BL = torch.zeros_like(running_BL, dtype=torch.float32)
    p_BL[running_BL] = rule(before_BLD[running_BL], after_BLD[running_BL]).to(p_BL.dtype)
    return p_BL


def _cycle_rows(model: Stepwise, index: int, states: States, call: ForwardCall, running_B: Tensor) -> States:
    """One outer step of the running rows only."""
    if running_B.all():
        return model.cycle(index, states, call)
    rows = running_B.nonzero()[:, 0]
    new = model.cycle(index, tuple(state[rows] for state in states), call.of_rows(rows.cpu()))
    return tuple(before.index_copy(0, rows, after.to(before.dtype)) for after, before in zip(new, states, strict=True))
