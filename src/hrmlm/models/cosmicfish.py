"""`cosmicfish`: adaptive depth by halting (arXiv 2605.28919), made causal, trained and cacheable.

    embed → input blocks → core, up to max_steps times → output blocks → RMSNorm → tied head
    one outer step: H_cycles times { L_cycles times { z_L = L_level(z_L + z_H + x) };  z_H = H_level(z_H + z_L) }

Core layers are post-norm: x ← RMSNorm(x + Attn(x)), x ← RMSNorm(x + MLP(x)). Halting "token" decides per position from
its own state (see halting.py). Halting "sequence" is the rule of the released checkpoints: one decision for a whole
sequence, made on the mean over its positions, so later tokens change earlier logits. It is there to run those, and is
neither trained nor cached.

Shapes: B rows, L positions, D width.
"""

import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hrmlm.config import Number, Positive
from hrmlm.errors import UserError
from hrmlm.models.adaptive import AdaptiveModel
from hrmlm.models.base import INIT_STD
from hrmlm.models.blocks import Application, Block, ForwardCall, GeluMLP, States, embedding
from hrmlm.models.cache import KVCache
from hrmlm.models.cache_policy import FULL, CachePolicy
from hrmlm.models.halting import HaltingConfig, HaltingHead
from hrmlm.models.registry import register
from hrmlm.models.settings import ModelConfig


class CosmicFishConfig(ModelConfig, HaltingConfig):
    """input_layers, output_layers: blocks before and after the core; H_layers, L_layers: layers of its two levels;
    H_cycles, L_cycles: how often they run in one outer step; max_steps: most outer steps; halting: "token" (trained,
    causal) or "sequence" (released checkpoints only); sequence_bias: favours halting outside training in the latter;
    positions: rotary, or a learned table of `context` vectors; mlp: swiglu or gelu."""

    family: Literal["cosmicfish"] = "cosmicfish"
    input_layers: Positive = 6
    output_layers: Positive = 6
    H_layers: Positive = 4
    L_layers: Positive = 4
    H_cycles: Positive = 2
    L_cycles: Positive = 2
    max_steps: Positive = 16
    halting: Literal["token", "sequence"] = "token"
    sequence_bias: Annotated[Number, Field(allow_inf_nan=False)] = 0.35
    positions: Literal["rotary", "learned"] = "rotary"
    mlp: Literal["swiglu", "gelu"] = "swiglu"

    @model_validator(mode="after")
    def _check_target(self) -> "CosmicFishConfig":
        self.check_target(self.max_steps)
        return self

    @property
    def slots_per_step(self) -> int:
        """Layer applications of one outer step."""
        return self.H_cycles * (self.L_cycles * self.L_layers + self.H_layers)

    def layer(self, block_class: type[Block]) -> Block:
        """A new layer, pre-norm (Block) or post-norm."""
        hidden = self.hidden or 4 * self.d_model
        layer = block_class(self.d_model, self.heads, self.kv_heads, hidden, self.norm_eps, self.dropout)
        if self.mlp == "gelu":
            layer.mlp = GeluMLP(self.d_model, hidden)
        return layer


class PostNormBlock(Block):
    """x ← RMSNorm(x + Attn(x)), then x ← RMSNorm(x + MLP(x))."""

    def forward(self, x_BLD: Tensor, call: ForwardCall, slot: int) -> Tensor:
        """(B, L, D) → (B, L, D)."""
        x_BLD = self.norm_attention(x_BLD + self.drop(self.attention(x_BLD, call, slot)))
        return self.norm_mlp(x_BLD + self.drop(self.mlp(x_BLD)))


@register(CosmicFishConfig)
class CosmicFish(AdaptiveModel):
    """Input blocks, a recurrent core of two levels with a halting head, output blocks."""

    config: CosmicFishConfig
    halting: HaltingHead

    def __init__(self, config: CosmicFishConfig) -> None:
        super().__init__(config)
        self.input_blocks = nn.ModuleList(config.layer(Block) for _ in range(config.input_layers))
        self.H_level = nn.ModuleList(config.layer(PostNormBlock) for _ in range(config.H_layers))
        self.L_level = nn.ModuleList(config.layer(PostNormBlock) for _ in range(config.L_layers))
        self.output_blocks = nn.ModuleList(config.layer(Block) for _ in range(config.output_layers))
        self.H_init = nn.Parameter(torch.empty(config.d_model))
        self.L_init = nn.Parameter(torch.empty(config.d_model))
        self.halting = HaltingHead(config.d_model)
        self.position_table = embedding(config.context, config.d_model) if config.positions == "learned" else None

    @property
    def trained_depth(self) -> int:
        """The most outer steps."""
        return self.config.max_steps

    @property
    def is_rotary(self) -> bool:
        """Whether positions turn queries and keys; else a table adds them."""
        return self.config.positions == "rotary"

    @property
    def _core_slot(self) -> int:
        return self.config.input_layers + self.config.output_layers

    def init_weights(self) -> None:
        """See AdaptiveModel.init_weights; start vectors from N(0, 0.02²)."""
        super().init_weights()
        for start in (self.H_init, self.L_init):
            nn.init.normal_(start, std=INIT_STD)

    def build_schedule(self, depth: int) -> list[Application]:
        """Slots: input blocks, output blocks, then the core step by step; in order of execution."""
        c = self.config
        core = []
        for step in range(1, depth + 1):
            slot = self._core_slot + (step - 1) * c.slots_per_step
            for module in self._core_modules():
                core.append(Application(f"step {step} {module}", module, slot))
                slot += 1
        first = [Application(f"input {i + 1}", f"input_blocks.{i}", i) for i in range(c.input_layers)]
        last = [
            Application(f"output {i + 1}", f"output_blocks.{i}", c.input_layers + i) for i in range(c.output_layers)
        ]
        return first + core + last

    def _core_modules(self) -> list[str]:
        """Names of the layers in one outer step, in order."""
        c = self.config
        low = [f"L_level.{i}" for i in range(c.L_layers)] * c.L_cycles
        return (low + [f"H_level.{i}" for i in range(c.H_layers)]) * c.H_cycles

    @property
    def cycle_slots(self) -> tuple[int, int]:
        """The core, step by step."""
        return self._core_slot, self.config.slots_per_step

    def begin(self, tokens_BL: Tensor, call: ForwardCall) -> States:
        """See LanguageModel.begin: the states of both levels, and what the input blocks made of the tokens."""
        x_BLD = self.embed(tokens_BL)
        if self.position_table is not None:
            x_BLD = x_BLD + self.position_table(call.positions_BL.clamp_max(self.config.context - 1).to(x_BLD.device))
        x_BLD = self._stack(self.input_blocks, x_BLD, call, 0)
        return self.H_init.expand_as(x_BLD), self.L_init.expand_as(x_BLD), x_BLD

    def cycle(self, index: int, states: States, call: ForwardCall) -> States:
        """See LanguageModel.cycle: one outer step."""
        c, slot = self.config, self._core_slot + index * self.config.slots_per_step
        H_BLD, L_BLD, x_BLD = states
        for _ in range(c.H_cycles):
            for _ in range(c.L_cycles):
                L_BLD = self._stack(self.L_level, L_BLD + H_BLD + x_BLD, call, slot)
                slot += c.L_layers
            H_BLD = self._stack(self.H_level, H_BLD + L_BLD, call, slot)
            slot += c.H_layers
        return H_BLD, L_BLD, x_BLD

    def read(self, states: States) -> Tensor:
        """See LanguageModel.read."""
        return states[0]

    def finish(self, state_BLD: Tensor, call: ForwardCall) -> Tensor:
        """See LanguageModel.finish: the output blocks."""
        return self._stack(self.output_blocks, state_BLD, call, self.config.input_layers)

    def states(self, tokens_BL: Tensor, call: ForwardCall) -> Iterator[Tensor]:
        """See LanguageModel.states. The schedule lists what runs at most; halting decides what runs."""
        if self.config.halting == "sequence":
            yield self.finish(self._sequence_core(self.begin(tokens_BL, call), call), call)
        else:
            yield from super().states(tokens_BL, call)

    def _stack(self, layers: nn.ModuleList, x_BLD: Tensor, call: ForwardCall, slot: int) -> Tensor:
        for place, layer in enumerate(layers, start=slot):
            new_BLD = call.run(layer, x_BLD, slot=place)
            call.record_at(place, x_BLD, new_BLD)
            x_BLD = new_BLD
        return x_BLD

    def _sequence_core(self, states: States, call: ForwardCall) -> Tensor:
        """The released rule; a row that stopped is frozen. Counts the outer steps before the one that stopped it."""
        if call.cache is not None:
            raise UserError("halting 'sequence' looks at the whole text and cannot be cached; generate with --no-cache")
        H_BLD, L_BLD, x_BLD = states
        bias = 0.0 if self.training else self.config.sequence_bias
        running_B = torch.ones(len(x_BLD), dtype=torch.bool, device=x_BLD.device)
        last = call.depth or self.config.max_steps
        decides = call.depth is None and last > 1  # of a single step the head has no say, as published
        steps_B = torch.full_like(running_B, last, dtype=torch.long)
        for index in range(last):
            call.running_BL = running_B[:, None]
            new_H_BLD, new_L_BLD, _ = self.cycle(index, (H_BLD, L_BLD, x_BLD), call)
            running_B11 = running_B[:, None, None]
            H_BLD, L_BLD = torch.where(running_B11, new_H_BLD, H_BLD), torch.where(running_B11, new_L_BLD, L_BLD)
            call.q_B2 = self.halting.q(_mean(H_BLD, call.lengths_B))
            stops_B = (call.q_B2[:, 0] + bias > call.q_B2[:, 1]) & running_B & decides
            steps_B = torch.where(stops_B, index, steps_B)
            running_B = running_B & ~stops_B
            if not running_B.any():
                break
        slot, stride = self._core_slot, self.config.slots_per_step
        call.record_skipped(range(slot + (index + 1) * stride, slot + last * stride))
        call.running_BL, call.steps_BL = None, steps_B[:, None].expand(x_BLD.shape[:2])
        return H_BLD

    def check_training(self, window: int | None = None) -> None:
        """See LanguageModel.check_training. Raises: UserError with halting "sequence"."""
        super().check_training(window)
        if self.config.halting == "sequence":
            raise UserError("halting 'sequence' gives its head no gradient and is not trained; use halting: token")

    def losses(self, batch: Any, rng: random.Random | None = None, progress: float = 1.0) -> Iterator[Any]:
        """See LanguageModel.losses. Raises: UserError with halting "sequence"."""
        self.check_training()
        return super().losses(batch, rng, progress)

    def check_exit(self, depth: int | None = None, halt_threshold: float | None = None) -> None:
        """See LanguageModel.check_exit. Raises: UserError with halting "sequence"."""
        super().check_exit(depth, halt_threshold)
        if self.config.halting == "sequence":
            raise UserError(
                "halting 'sequence' stops whole texts, so no exit rule can stop single positions; give a depth"
            )

    def new_cache(
        self,
        batch_size: int,
        max_length: int,
        depth: int | None = None,
        dtype: torch.dtype | None = None,
        policy: CachePolicy = FULL,
    ) -> KVCache:
        """See LanguageModel.new_cache. Raises: UserError with halting "sequence"."""
        if self.config.halting == "sequence":
            raise UserError("halting 'sequence' looks at the whole text and cannot be cached; generate with --no-cache")
        return super().new_cache(batch_size, max_length, depth, dtype, policy)


def _mean(x_BLD: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Mean over the real positions of each row, (B, D)."""
    if lengths_B is None:
        return x_BLD.mean(dim=1)
    lengths_B1 = lengths_B.to(x_BLD.device)[:, None]
    real_BL1 = (torch.arange(x_BLD.shape[1], device=x_BLD.device) < lengths_B1)[..., None]
    return (x_BLD * real_BL1).sum(dim=1) / lengths_B1
