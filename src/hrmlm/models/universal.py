"""`universal`: one block applied M times (Dehghani et al. 2018, flat sharing). The baseline without a hierarchy.

With `halting: token` every position decides how often, M at most: the adaptive Universal Transformer (see halting.py).

Shapes: B rows, L positions, D width.
"""

from collections.abc import Iterable
from typing import Literal

from pydantic import model_validator
from torch import Tensor, nn

from hrmlm.config import Positive
from hrmlm.errors import UserError
from hrmlm.models.adaptive import AdaptiveModel
from hrmlm.models.blocks import Application, ForwardCall, States, embedding
from hrmlm.models.halting import HaltingConfig, HaltingHead
from hrmlm.models.registry import register
from hrmlm.models.settings import RecurrentConfig


class UniversalConfig(RecurrentConfig, HaltingConfig):
    """n_steps: M, how often the block is applied; input_injection: add the token embedding before each application;
    step_embedding: add a learned vector of the step's number before each application; halting: "none", or "token": each
    position decides how often, M at most."""

    family: Literal["universal"] = "universal"
    n_steps: Positive = 12
    input_injection: bool = False
    step_embedding: Literal["none", "learned"] = "none"
    halting: Literal["none", "token"] = "none"

    @property
    def total_steps(self) -> int:
        """M."""
        return self.n_steps

    @model_validator(mode="after")
    def _check_exits(self) -> "UniversalConfig":
        if self.trains_exits and self.n_steps == 1:
            raise ValueError(f"{self.trains_exits} needs at least 2 steps")
        return self

    @model_validator(mode="after")
    def _check_halting(self) -> "UniversalConfig":
        if self.halting == "none":
            changed = sorted(HaltingConfig.model_fields.keys() & self.model_fields_set)
            changed = [name for name in changed if getattr(self, name) != HaltingConfig.model_fields[name].default]
            if changed:
                raise ValueError(f"{', '.join(changed)} without effect: halting is none")
            return self
        if self.window < self.n_steps:
            raise ValueError(
                f"halting with gradient_window {self.window} of {self.n_steps} steps: what stops before the window "
                "opens would teach the block nothing; leave gradient_window unset"
            )
        if self.trains_exits:
            raise ValueError(f"{self.trains_exits} with halting: depth is learned already; exploration varies it")
        self.check_target(self.n_steps)
        return self


@register(UniversalConfig)
class UniversalTransformer(AdaptiveModel):
    """One pre-norm block, M times: V·D + 16·D² weights, and 2·D + 2 of a halting head."""

    config: UniversalConfig

    def __init__(self, config: UniversalConfig) -> None:
        super().__init__(config)
        self.block = config.block()
        self.steps = embedding(config.n_steps, config.d_model) if config.step_embedding == "learned" else None
        self.halting = HaltingHead(config.d_model) if config.halting == "token" else None

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

    @property
    def cycle_slots(self) -> tuple[int, int]:
        """One slot per step."""
        return 0, 1

    def begin(self, tokens_BL: Tensor, call: ForwardCall) -> States:
        """See LanguageModel.begin: the state, and the embedding it starts from."""
        embedded_BLD = self.embed(tokens_BL)
        return embedded_BLD, embedded_BLD

    def cycle(self, index: int, states: States, call: ForwardCall) -> States:
        """See LanguageModel.cycle: one step."""
        application, (h_BLD, embedded_BLD) = call.schedule[index], states
        with call.application(application):
            input_BLD = h_BLD
            if self.config.input_injection:
                input_BLD = input_BLD + embedded_BLD
            if self.steps is not None:
                input_BLD = input_BLD + self.steps.weight[application.slot]
            new_BLD = call.run(self.block, input_BLD, slot=application.slot)
            call.record(application, h_BLD, new_BLD)
        return new_BLD, embedded_BLD

    def cut(self, states: States) -> States:
        """See LanguageModel.cut: the embedding stays as it is."""
        h_BLD, embedded_BLD = states
        return h_BLD.detach(), embedded_BLD

    def read(self, states: States) -> Tensor:
        """See LanguageModel.read."""
        return states[0]
