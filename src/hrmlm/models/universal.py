"""`universal`: one block applied M times (Dehghani et al. 2018, flat sharing). The baseline without a hierarchy.

Shapes: B rows, L positions, D width.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import model_validator
from torch import Tensor, nn

from hrmlm.errors import UserError
from hrmlm.models.base import LanguageModel, Positive, RecurrentConfig
from hrmlm.models.blocks import Application, ForwardCall
from hrmlm.models.registry import register


class UniversalConfig(RecurrentConfig):
    """n_steps: M, how often the block is applied; input_injection: add the token embedding before each application;
    step_embedding: add a learned vector of the step's number before each application."""

    family: Literal["universal"] = "universal"
    n_steps: Positive = 12
    input_injection: bool = False
    step_embedding: Literal["none", "learned"] = "none"

    @property
    def total_steps(self) -> int:
        """M."""
        return self.n_steps

    @model_validator(mode="after")
    def _check_exits(self) -> "UniversalConfig":
        if self.exit_probability and self.n_steps == 1:
            raise ValueError("exit_probability needs at least 2 steps")
        return self


@register(UniversalConfig)
class UniversalTransformer(LanguageModel):
    """One pre-norm block, M times: V·D + 16·D² weights."""

    config: UniversalConfig

    def __init__(self, config: UniversalConfig) -> None:
        super().__init__(config)
        self.block = config.block()
        self.steps = nn.Embedding(config.n_steps, config.d_model) if config.step_embedding == "learned" else None

    @property
    def trained_depth(self) -> int:
        """M."""
        return self.config.n_steps

    @property
    def gradient_share(self) -> float:
        """K/M."""
        return self.config.window / self.config.n_steps

    @property
    def warmup_steps(self) -> int:
        """max(1000, 100·M), as for the hierarchical model."""
        return max(1000, 100 * self.config.n_steps)

    def repeated_modules(self) -> Iterable[nn.Module]:
        """The one block."""
        return (self.block,)

    def check_depth(self, depth: int) -> None:
        """Raises: UserError: learned step embeddings exist only for the trained steps."""
        super().check_depth(depth)
        if self.steps is not None and depth > self.config.n_steps:
            raise UserError(f"depth {depth} is not possible: step_embedding is learned for {self.config.n_steps} steps")

    def build_schedule(self, depth: int) -> list[Application]:
        """M applications of the block; the last K are inside the gradient window."""
        first = depth - self.config.window
        return [Application(f"step {m + 1}", "block", slot=m, in_window=m >= first) for m in range(depth)]

    def states(self, tokens_BL: Tensor, call: ForwardCall, schedule: list[Application]) -> Iterator[Tensor]:
        """See LanguageModel.states."""
        embedded_BLD = h_BLD = self.embed(tokens_BL)
        for application in schedule:
            with call.application(application):
                input_BLD = h_BLD
                if self.config.input_injection:
                    input_BLD = input_BLD + embedded_BLD
                if self.steps is not None:
                    input_BLD = input_BLD + self.steps.weight[application.slot]
                new_BLD = self.block(input_BLD, call, application.slot)
                call.record(application, h_BLD, new_BLD)
                h_BLD = new_BLD
        yield h_BLD
