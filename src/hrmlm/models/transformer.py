"""`transformer`: independent blocks, one after the other. The baseline that stores a block per layer.

Shapes: B rows, L positions, D width.
"""

from typing import Literal

from torch import Tensor, nn

from hrmlm.config import Positive
from hrmlm.errors import UserError
from hrmlm.models.base import LanguageModel
from hrmlm.models.blocks import Application, ForwardCall, States
from hrmlm.models.registry import register
from hrmlm.models.settings import ModelConfig


class TransformerConfig(ModelConfig):
    """n_layers: number of independent blocks."""

    family: Literal["transformer"] = "transformer"
    n_layers: Positive = 4


@register(TransformerConfig)
class Transformer(LanguageModel):
    """A pre-norm decoder of n_layers independent blocks: V·D + 16·n_layers·D² weights."""

    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(config.block() for _ in range(config.n_layers))

    @property
    def trained_depth(self) -> int:
        """Number of layers."""
        return self.config.n_layers

    def check_depth(self, depth: int) -> None:
        """Raises: UserError: a depth is a number of first layers."""
        super().check_depth(depth)
        if depth > self.config.n_layers:
            raise UserError(f"depth {depth} is not possible; the model has {self.config.n_layers} layers")

    def build_schedule(self, depth: int) -> list[Application]:
        """One application per layer."""
        return [Application(f"layer {i + 1}", f"blocks.{i}", slot=i) for i in range(depth)]

    def begin(self, tokens_BL: Tensor, call: ForwardCall) -> States:
        """See LanguageModel.begin."""
        return (self.embed(tokens_BL),)

    def cycle(self, index: int, states: States, call: ForwardCall) -> States:
        """See LanguageModel.cycle: one layer."""
        application = call.schedule[index]
        new_BLD = call.run(self.blocks[index], states[0], slot=application.slot)
        call.record(application, states[0], new_BLD)
        return (new_BLD,)

    def read(self, states: States) -> Tensor:
        """See LanguageModel.read."""
        return states[0]
