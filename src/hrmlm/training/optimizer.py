"""Optimizer, parameter groups and learning-rate schedule: pure functions of the recipe, the model and the step."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from hrmlm.models import LanguageModel
from hrmlm.training.recipe import OptimizerConfig, ScheduleConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Every trainable parameter in exactly one of two groups: matrices decay; gains, biases and vectors do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all trainable parameters, fused where torch has a fused kernel for the device."""
    device = next(model.parameters()).device.type
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=device in ("cpu", "cuda", "mps", "xpu"),
    )


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
