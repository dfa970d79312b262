"""`hrm_lm`: two-speed shared-weight recurrence (arXiv 2604.14442). A fast cell at every step, a slow one every T steps.

    x = InputBlock(E[tokens]);  z_fast, z_slow = fixed prototype vectors at every position
    N cycles:  T times  z_fast ← FastCell(z_fast; z_slow, x);   then  z_slow ← SlowCell(z_slow; z_fast)
    logits = nn.RMSNorm(readout) · Eᵀ

The paper publishes no code. The cell below is a reconstruction that reproduces both published model sizes:
V·D + 61·D² weights (48 in three blocks, 7 in the fast cell, 6 in the slow cell) plus norms and biases.

Shapes: B rows, L positions, D width.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hrmlm.config import Number, Positive
from hrmlm.models.base import INIT_STD, LanguageModel
from hrmlm.models.blocks import Application, ForwardCall, Linear, States
from hrmlm.models.registry import register
from hrmlm.models.settings import RecurrentConfig


class HRMConfig(RecurrentConfig):
    """n_cycles: N; fast_steps: T fast steps per cycle; n_passes: S supervision passes over the same batch;
    gate: how a cell mixes old and new; readout: which state is read; prototype_std: spread of the start vectors."""

    family: Literal["hrm_lm"] = "hrm_lm"
    n_cycles: Positive = 2
    fast_steps: Positive = 2
    n_passes: Positive = 1
    gate: Literal["gru", "update_only", "none"] = "gru"
    readout: Literal["sum", "slow", "fast"] = "sum"
    prototype_std: Annotated[Number, Field(gt=0)] = INIT_STD

    @property
    def total_steps(self) -> int:
        """M = N·T."""
        return self.n_cycles * self.fast_steps

    @model_validator(mode="after")
    def _check_readout(self) -> "HRMConfig":
        # The slow step that ends the last cycle is not read by z_fast: only earlier ones can teach the slow cell.
        if self.readout == "fast" and self.window <= self.fast_steps:
            remedy = "at least 2 cycles" if self.n_cycles == 1 else f"a gradient window above {self.fast_steps}"
            raise ValueError(f"readout 'fast' needs {remedy}, or the slow cell is never trained")
        if self.trains_exits and self.n_cycles == 1:
            raise ValueError(f"{self.trains_exits} needs at least 2 cycles")
        if self.exit_weight and self.n_passes > 1:
            raise ValueError(
                f"exit_weight with {self.n_passes} passes: fewer cycles per pass are no beginning of the full forward "
                "pass, which has no readout of that depth; use exit_probability, or n_passes 1"
            )
        return self


class GatedCell(nn.Module):
    """A GRU-like cell (Cho et al. 2014) whose candidate is a transformer block.

    r, g = σ(W_rg [state ; context] + b);  u = RMSNorm(Block(W_in [r ⊙ state ; inputs]))
    state ← g ⊙ state + (1 − g) ⊙ u
    g is the share that is kept. Gate "update_only" has no r; "none" takes u as the new state.
    """

    def __init__(self, config: HRMConfig, n_inputs: int) -> None:
        super().__init__()
        D = config.d_model
        self.resets = config.gate == "gru"
        n_gates = {"gru": 2, "update_only": 1, "none": 0}[config.gate]
        self.gate = Linear(2 * D, n_gates * D) if n_gates else None
        self.mix = Linear((1 + n_inputs) * D, D, bias=False)
        self.block = config.block()
        self.norm = nn.RMSNorm(D, eps=config.norm_eps)

    def forward(
        self, state_BLD: Tensor, context_BLD: Tensor, inputs_BLD: list[Tensor], call: ForwardCall, slot: int
    ) -> tuple[Tensor, Tensor | None]:
        """The new state (B, L, D) and the gate (B, L, D), None without one."""
        kept_BLD, keep_BLD = state_BLD, None
        if self.gate is not None:
            gates = torch.sigmoid(self.gate(torch.cat([state_BLD, context_BLD], dim=-1)))
            if self.resets:
                reset_BLD, keep_BLD = gates.chunk(2, dim=-1)
                kept_BLD = reset_BLD * state_BLD
            else:
                keep_BLD = gates
        # As in a plain stack of blocks, the residual stream keeps the precision of the weights under autocast.
        mixed_BLD = self.mix(torch.cat([kept_BLD, *inputs_BLD], dim=-1)).to(self.norm.weight.dtype)
        candidate_BLD = self.norm(self.block(mixed_BLD, call, slot))
        if keep_BLD is None:
            return candidate_BLD, None
        return torch.lerp(candidate_BLD, state_BLD.to(candidate_BLD.dtype), keep_BLD.to(candidate_BLD.dtype)), keep_BLD


@register(HRMConfig)
class HRM(LanguageModel):
    """The hierarchical recurrent language model: three stored blocks, 1 + S·(M + N) applications."""

    config: HRMConfig
    fast_prototype: Tensor
    slow_prototype: Tensor

    def __init__(self, config: HRMConfig) -> None:
        super().__init__(config)
        self.n_passes = config.n_passes
        self.input_block = config.block()
        self.fast = GatedCell(config, n_inputs=2)
        self.slow = GatedCell(config, n_inputs=1)
        self.register_buffer("fast_prototype", torch.empty(config.d_model))
        self.register_buffer("slow_prototype", torch.empty(config.d_model))

    @property
    def trained_depth(self) -> int:
        """N, in cycles."""
        return self.config.n_cycles

    @property
    def gradient_share(self) -> float:
        """K/M."""
        return self.config.window / self.config.total_steps

    @property
    def warmup_steps(self) -> int:
        """max(1000, 100·N·T)."""
        return max(1000, 100 * self.config.total_steps)

    def repeated_modules(self) -> Iterable[nn.Module]:
        """Both cells."""
        return (self.fast, self.slow)

    def init_weights(self) -> None:
        """See LanguageModel.init_weights; the prototypes are drawn once and never trained."""
        super().init_weights()
        for prototype in (self.fast_prototype, self.slow_prototype):
            nn.init.normal_(prototype, std=self.config.prototype_std)

    def build_schedule(self, depth: int) -> list[Application]:
        """Input once, then per pass and cycle T fast steps and a slow step.

        With M' = depth·T, fast step m is inside the gradient window if m > M' − K, the slow step that ends cycle c if
        c·T > M' − K.
        """
        T = self.config.fast_steps
        before_window = depth * T - self.config.window
        schedule = [Application("input", "input_block", slot=0)]

        def add(name: str, module: str, step: int, supervision_pass: int) -> None:
            in_window = step > before_window
            schedule.append(Application(name, module, len(schedule), in_window, supervision_pass))

        for p in range(self.n_passes):
            label = f"pass {p + 1} " if self.n_passes > 1 else ""
            for cycle in range(1, depth + 1):
                for t in range(1, T + 1):
                    add(f"{label}fast {cycle}.{t}", "fast", (cycle - 1) * T + t, p)
                is_last = cycle == depth and p == self.n_passes - 1
                if not (is_last and self.config.readout == "fast"):  # nothing would read it
                    add(f"{label}slow {cycle}", "slow", cycle * T, p)
        return schedule

    @property
    def cycle_slots(self) -> tuple[int, int]:
        """After the input block, T fast steps and a slow one."""
        return 1, self.config.fast_steps + 1

    def begin(self, tokens_BL: Tensor, call: ForwardCall) -> States:
        """See LanguageModel.begin: the states of both cells, and x."""
        shape = (*tokens_BL.shape, self.config.d_model)
        return self.fast_prototype.expand(shape), self.slow_prototype.expand(shape), self._input(tokens_BL, call)

    def cycle(self, index: int, states: States, call: ForwardCall) -> States:
        """See LanguageModel.cycle."""
        fast_BLD, slow_BLD, x_BLD = states
        first, stride = self.cycle_slots
        for application in call.schedule[first + index * stride : first + (index + 1) * stride]:
            with call.application(application):
                if application.module == "fast":
                    fast_BLD = self._step(application, fast_BLD, slow_BLD + x_BLD, [slow_BLD, x_BLD], call)
                else:
                    slow_BLD = self._step(application, slow_BLD, fast_BLD, [fast_BLD], call)
        return fast_BLD, slow_BLD, x_BLD

    def read(self, states: States) -> Tensor:
        """See LanguageModel.read."""
        fast_BLD, slow_BLD, _ = states
        if self.config.readout == "sum":
            return fast_BLD + slow_BLD
        return slow_BLD if self.config.readout == "slow" else fast_BLD

    def cut(self, states: States) -> States:
        """See LanguageModel.cut: x stays as it is."""
        fast_BLD, slow_BLD, x_BLD = states
        return fast_BLD.detach(), slow_BLD.detach(), x_BLD

    def restart(self, tokens_BL: Tensor, states: States, call: ForwardCall) -> States:
        """See LanguageModel.restart; where the graph of x is gone, x is computed again."""
        fast_BLD, slow_BLD, x_BLD = self.cut(states)
        return fast_BLD, slow_BLD, self._input(tokens_BL, call) if call.backward_per_pass else x_BLD

    def _input(self, tokens_BL: Tensor, call: ForwardCall) -> Tensor:
        embedded_BLD = self.embed(tokens_BL)
        x_BLD = call.run(self.input_block, embedded_BLD, slot=0)
        call.record(call.schedule[0], embedded_BLD, x_BLD)
        return x_BLD

    def _step(
        self,
        application: Application,
        state_BLD: Tensor,
        context_BLD: Tensor,
        inputs_BLD: list[Tensor],
        call: ForwardCall,
    ) -> Tensor:
        cell: GatedCell = getattr(self, application.module)
        new_BLD, gate_BLD = call.run(cell, state_BLD, context_BLD, inputs_BLD, slot=application.slot)
        call.record(application, state_BLD, new_BLD, gate_BLD)
        return new_BLD
