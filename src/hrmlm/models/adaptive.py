"""A family that can learn its depth: exploration, step cost and initial bias of its halting head.

Shapes: B rows, L positions, D width.
"""

import random

import torch
from torch import Tensor

from hrmlm.models.base import LanguageModel
from hrmlm.models.blocks import ForwardCall
from hrmlm.models.halting import ExitRule, HaltingHead, LearnedHalting


class AdaptiveModel(LanguageModel):
    """A family that learns its depth where its configuration says `halting: token`: exploration and step cost of its
    training. Its configuration is a HaltingConfig, its head is `self.halting`, its most steps are `trained_depth`."""

    halting: HaltingHead | None

    @property
    def learns_depth(self) -> bool:
        """Whether positions decide how many steps they take."""
        return self.config.halting == "token"

    def init_weights(self) -> None:
        """See LanguageModel.init_weights; the halting logit starts at its initial bias."""
        super().init_weights()
        if self.halting is not None:
            with torch.no_grad():
                self.halting.q.bias.copy_(torch.tensor([self.config.initial_bias, 0.0]))

    def exit_rule(self, call: ForwardCall) -> ExitRule | None:
        """See LanguageModel.exit_rule; the learned one where no other is asked for."""
        if call.exit is not None or not self.learns_depth:
            return call.exit
        assert self.halting is not None
        threshold = 1 - self.config.epsilon if call.halt_threshold is None else call.halt_threshold
        return LearnedHalting(self.halting, threshold)

    def prepare_training(self, call: ForwardCall, rng: random.Random | None) -> None:
        """Exploration: give a share of the training batches a random minimum number of steps."""
        most = self.trained_depth
        if self.learns_depth and rng is not None and most > 1 and rng.random() < self.config.exploration:
            call.minimum_steps = rng.randint(2, most)

    def penalties(self, call: ForwardCall, scored_BL: Tensor) -> tuple[Tensor | float, dict[str, Tensor]]:
        """See LanguageModel.penalties: the step cost, weighted by token like the loss itself."""
        if not self.learns_depth:
            return super().penalties(call, scored_BL)
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
