"""Optimizers, parameter groups and learning-rate schedule: pure functions of the recipe, the model and the step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hrmlm.errors import UserError
from hrmlm.models import LanguageModel
from hrmlm.training.recipe import OptimizerConfig, ScheduleConfig


def parameter_groups(model: LanguageModel, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group.

    kind: "muon" (matrices inside the blocks, if the recipe says so) or "adamw"; lr_ratio: peak learning rate divided
    by `config.lr`. Matrices decay; gains, biases and vectors do not.
    """
    inside = block_matrices(model) if config.kind == "muon" else []
    chosen = {id(p) for p in inside}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    matrices, vectors = [p for p in others if p.ndim >= 2], [p for p in others if p.ndim < 2]
    muon_ratio = (config.muon_lr or config.lr) / config.lr
    groups = [
        {"kind": "muon", "params": inside, "weight_decay": config.weight_decay, "lr_ratio": muon_ratio},
        {"kind": "adamw", "params": matrices, "weight_decay": config.weight_decay, "lr_ratio": 1.0},
        {"kind": "adamw", "params": vectors, "weight_decay": 0.0, "lr_ratio": 1.0},
    ]
    return [group for group in groups if group["params"]]


def block_matrices(model: LanguageModel) -> list[nn.Parameter]:
    """Trainable weights of the linear layers inside the modules that the schedule applies, each once."""
    applied = {item.module for item in model.schedule()}
    layers = [part for name in applied for part in model.get_submodule(name).modules() if isinstance(part, nn.Linear)]
    wanted = {id(layer.weight) for layer in layers}
    return [p for p in model.parameters() if id(p) in wanted and p.requires_grad]


def build_optimizer(model: LanguageModel, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over all trainable parameters, or Muon for the matrices of the blocks and AdamW for the rest.

    AdamW is fused where torch has a fused kernel for the device. Raises: UserError for Muon on sharded weights.
    """
    groups = parameter_groups(model, config)
    by_kind = {kind: [group for group in groups if group["kind"] == kind] for kind in ("adamw", "muon")}
    adamw = torch.optim.AdamW(
        by_kind["adamw"],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=next(model.parameters()).device.type in ("cpu", "cuda", "mps", "xpu"),
    )
    if config.kind == "adamw":
        return adamw
    from torch.distributed.tensor import DTensor  # takes a while to import

    if any(isinstance(p, DTensor) for group in by_kind["muon"] for p in group["params"]):
        raise UserError(
            "optimizer.kind muon needs whole matrices and these weights are sharded over processes; use "
            "optimizer.kind=adamw, or the distribution that keeps whole weights in every process (ddp)"
        )
    muon = torch.optim.Muon(
        by_kind["muon"],
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        adjust_lr_fn=config.muon_adjust,
    )
    return Together({"adamw": adamw, "muon": muon})


class Together(torch.optim.Optimizer):
    """Several optimizers as one. parts: by the `kind` of the groups that each of them updates."""

    def __init__(self, parts: dict[str, torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts.values() for group in part.param_groups], {})
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Let each part update its groups."""
        assert closure is None
        for kind, part in self.parts.items():
            # Linked at every step: loading a state replaces the groups and the state of the whole.
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["kind"] == kind]
            part.step()


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of every step of a run, a pure function: nothing of it needs to be saved.

    Steps are counted from 1. warmup is linear from lr/warmup to lr.
    """

    config: ScheduleConfig
    peak: float
    steps: int
    warmup: int
    note: str

    @classmethod
    def of(cls, config: ScheduleConfig, peak: float, steps: int, model: LanguageModel) -> "LearningRate":
        """Resolve the warm-up: as given, else the family's rule, else (in a short run) a fraction of the run."""
        asked = model.warmup_steps if config.warmup is None else config.warmup
        longest = round(config.warmup_fraction * steps)
        if config.warmup is None and asked > longest:
            note = f"warm-up {longest} steps: the rule asks for {asked}, too long for a run of {steps} steps"
            return cls(config, peak, steps, longest, note)
        return cls(config, peak, steps, min(asked, steps), f"warm-up {min(asked, steps)} steps")

    def at(self, step: int) -> float:
        """Learning rate of `step` (1 … steps)."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        floor = self.config.min_ratio
        if self.config.kind == "cosine":
            done = (step - self.warmup) / max(1, self.steps - self.warmup)
            return self.peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        decay = max(1, round(self.config.decay_fraction * self.steps))
        left = min(1.0, (self.steps - step) / decay)
        return self.peak * (floor + (1 - floor) * left)
