"""`memory_hrm`: one shared recurrent unit beside a memory of several levels; the text is read segment by segment.

    M_0 learned;   for segment j = 1, 2, …:  h = E[tokens of segment j];  W = M_{j−1}
      T times:  read   h ← Block(h + O · Attn(q = h, kv = all slots of M_{j−1}))
                write  a = Attn(q = W, kv = h);  g = σ(W_g [W ; a] + b_level);  W ← (1 − g) ⊙ W + g ⊙ U a
      M_j = W;  logits from h

Reads see M_{j−1} only, so the writes of a segment can wait until it is complete: that makes decoding token by token and
reading whole segments the same computation. The state does not grow, so the text may be of any length.

Shapes: B rows, L tokens of a call, N of one segment, C tokens of a complete one, T iterations, S slots, D width.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hrmlm.config import Number, Positive
from hrmlm.data.batch import Batch
from hrmlm.errors import UserError
from hrmlm.models.adaptive import AdaptiveModel
from hrmlm.models.base import PartialLoss
from hrmlm.models.blocks import Application, ApplicationStats, Block, ForwardCall, States, call_at
from hrmlm.models.cache import KVCache, Placement
from hrmlm.models.cache_policy import FULL, CachePolicy
from hrmlm.models.halting import ExitRule, HaltingConfig, HaltingHead
from hrmlm.models.losses import text_loss
from hrmlm.models.memory import KeysValues, Memory, MemoryMonitor, MemoryState
from hrmlm.models.registry import register
from hrmlm.models.settings import ModelConfig, Probability

SATURATED = (0.001, 0.95)
"""A level whose mean gate is outside stands still, or forgets all of its past with every segment."""
DRIFT = 10.0
"""A level whose size changes by more than this factor after the warm-up drifts."""


class MemoryHRMConfig(ModelConfig, HaltingConfig):
    """iterations: T; segment: C, tokens read together; slots: of each level of the memory, coarsest first; gate_bias:
    of each level's write gates at the start (None: −4 to −2 in even steps); memory_dim: width of the memory's attention
    (None: a quarter of d_model); memory_heads: its heads (None: n_heads); memory_bptt: segments that gradients flow
    through; auxiliary_weight: of the loss at one random earlier iteration of a training step; curriculum_start:
    iterations at the beginning of training (None: T), which grow evenly to T over its first curriculum_fraction;
    step_conditioning: how the unit is told the iteration (lora_rank: of "lora"); write_dropout: on what is written;
    halting: "token": each position decides how many of the T iterations it takes; scaled_init: the unit's weights from
    N(0, (0.02/√T)²)."""

    family: Literal["memory_hrm"] = "memory_hrm"
    iterations: Positive = 8
    segment: Positive = 64
    slots: Annotated[tuple[Positive, ...], Field(min_length=1)] = (4, 8, 16)
    gate_bias: tuple[Annotated[Number, Field(allow_inf_nan=False)], ...] | None = None
    memory_dim: Positive | None = None
    memory_heads: Positive | None = None
    memory_bptt: Annotated[int, Field(ge=2, strict=True)] = 2
    auxiliary_weight: Annotated[Number, Field(ge=0, allow_inf_nan=False)] = 0.1
    curriculum_start: Positive | None = None
    curriculum_fraction: Annotated[Number, Field(gt=0, le=1)] = 0.5
    step_conditioning: Literal["none", "film", "lora"] = "none"
    lora_rank: Positive = 8
    write_dropout: Probability = 0.0
    halting: Literal["none", "token"] = "none"
    scaled_init: bool = True

    @property
    def total_steps(self) -> int:
        """T."""
        return self.iterations

    @property
    def gate_biases(self) -> tuple[float, ...]:
        """Initial bias of the write gates, by level."""
        if self.gate_bias is not None:
            return self.gate_bias
        if len(self.slots) == 1:
            return (-3.0,)
        return tuple(-4.0 + 2.0 * level / (len(self.slots) - 1) for level in range(len(self.slots)))

    @property
    def memory_width(self) -> int:
        """Width of the memory's attention, all heads together."""
        return self.memory_dim or max(self.n_memory_heads, self.d_model // 4)

    @property
    def n_memory_heads(self) -> int:
        """Heads of the memory's attention."""
        return self.memory_heads or self.heads

    @model_validator(mode="after")
    def _check_memory(self) -> "MemoryHRMConfig":
        if len(self.gate_biases) != len(self.slots):
            raise ValueError(f"gate_bias has {len(self.gate_biases)} values for the {len(self.slots)} levels of slots")
        if self.memory_width % self.n_memory_heads:
            raise ValueError(f"memory_dim {self.memory_width} must be a multiple of memory_heads {self.n_memory_heads}")
        if self.curriculum_start is not None and self.curriculum_start > self.iterations:
            raise ValueError(f"curriculum_start {self.curriculum_start} exceeds the {self.iterations} iterations")
        fields = MemoryHRMConfig.model_fields
        if self.lora_rank != fields["lora_rank"].default and self.step_conditioning != "lora":
            raise ValueError("lora_rank without effect: step_conditioning is not lora")
        if self.curriculum_fraction != fields["curriculum_fraction"].default and self.curriculum_start is None:
            raise ValueError("curriculum_fraction without effect: curriculum_start is not set")
        if self.halting == "none":
            changed = sorted(HaltingConfig.model_fields.keys() & self.model_fields_set)
            changed = [name for name in changed if getattr(self, name) != HaltingConfig.model_fields[name].default]
            if changed:
                raise ValueError(f"{', '.join(changed)} without effect: halting is none")
            return self
        if self.curriculum_start is not None:
            raise ValueError("curriculum_start with halting: depth is learned already; set curriculum_start to null")
        self.check_target(self.iterations)
        return self


class Unit(Block):
    """The shared block, whose two sublayers may be told which iteration it is.

    film: (1 + γ_t) ⊙ x + β_t; lora: x + B_t A_t x, which adds a matrix of low rank to all that reads x.
    """

    def __init__(self, config: MemoryHRMConfig) -> None:
        hidden = config.hidden or 4 * config.d_model
        super().__init__(config.d_model, config.heads, config.kv_heads, hidden, config.norm_eps, config.dropout)
        self.conditioning = config.step_conditioning
        T, D, r = config.iterations, config.d_model, config.lora_rank
        if self.conditioning == "film":
            self.film = nn.Parameter(torch.empty(2, T, 2 * D))
        elif self.conditioning == "lora":
            self.down = nn.Parameter(torch.empty(2, T, r, D))
            self.up = nn.Parameter(torch.empty(2, T, D, r))

    def _told(self, x_BND: Tensor, iteration: int, sublayer: int) -> Tensor:
        if self.conditioning == "film":
            scale_D, shift_D = _row(self.film[sublayer], iteration).chunk(2)
            return x_BND * (1 + scale_D) + shift_D
        if self.conditioning == "lora":
            low_BNR = nn.functional.linear(x_BND, _row(self.down[sublayer], iteration))
            return x_BND + nn.functional.linear(low_BNR, _row(self.up[sublayer], iteration))
        return x_BND

    def forward(self, x_BLD: Tensor, call: ForwardCall, slot: int) -> Tensor:
        """(B, L, D) → (B, L, D); slot: number of the iteration, from 0."""
        x_BLD = x_BLD + self.drop(self.attention(self._told(self.norm_attention(x_BLD), slot, 0), call, slot))
        return x_BLD + self.drop(self.mlp(self._told(self.norm_mlp(x_BLD), slot, 1)))


def _row(table: Tensor, index: int) -> Tensor:
    """table[index], in a way that a compiled graph serves every index."""
    return table.narrow(0, index, 1)[0]


_SHARED = (
    *("truncate_gradient", "checkpoint_activations", "depth", "halt_threshold"),
    *("exit", "cycles", "schedule", "minimum_steps"),
)
"""What the calls of the parts have from the call of the whole text."""


@dataclass
class _PartCall(ForwardCall):
    """A call within one segment. read_keys: of the memory it reads; embedded_BND: its embeddings, where they are known;
    seen: the states after each iteration, where there is no cache to keep what is going to be written."""

    read_keys: KeysValues = field(kw_only=True)
    embedded_BND: Tensor | None = None
    seen: list[Tensor] = field(default_factory=list)


@dataclass
class _Part:
    """Tokens of one segment in every row: N at most, fewer in some rows where `is_real_BN` says so.

    places_BN: of the call's tokens; positions_BN: in the segment, C for padding; both (1, N) where all rows are alike.
    """

    places_BN: Tensor
    positions_BN: Tensor
    is_real_BN: Tensor | None = None

    def take(self, x_BLD: Tensor) -> Tensor:
        """The part's columns (B, N, D) of a tensor of the whole call."""
        if self.is_real_BN is None:
            first = int(self.places_BN[0, 0])
            return x_BLD[:, first : first + self.places_BN.shape[1]]
        rows_B1 = torch.arange(len(x_BLD), device=x_BLD.device)[:, None]
        return x_BLD[rows_B1, self.places_BN.to(x_BLD.device)]

    def completed(self, segment: int, batch_size: int) -> Tensor:
        """Rows whose segment ends with this part."""
        ends_B = (self.positions_BN == segment - 1).any(dim=1)
        return ends_B.expand(batch_size).nonzero()[:, 0]


def _parts(length: int, segment: int, offsets_B: Tensor | None, new_B: Tensor | None) -> Iterator[_Part]:
    """Cut the `length` tokens of a call at the ends of segments. offsets_B: tokens already in each row's unfinished
    segment (None: none); new_B: how many of the tokens of each row are real (None: all)."""
    offsets_B = torch.zeros(1, dtype=torch.long) if offsets_B is None else offsets_B
    new_B = torch.tensor([length]) if new_B is None else new_B
    if bool((offsets_B == offsets_B[0]).all()) and bool((new_B == length).all()):
        start, offset = 0, int(offsets_B[0])
        while start < length:
            count = min(segment - offset, length - start)
            columns_1N = torch.arange(count)[None]
            yield _Part(start + columns_1N, offset + columns_1N)
            start, offset = start + count, 0
        return
    offsets_B, new_B = torch.broadcast_tensors(offsets_B, new_B)
    for number in range(max(1, int((offsets_B + new_B + segment - 1).max()) // segment)):
        first_B = (number * segment - offsets_B).clamp_min(0)
        last_B = torch.minimum((number + 1) * segment - offsets_B, new_B)
        count_B = (last_B - first_B).clamp_min(0)
        columns_BN = torch.arange(max(1, int(count_B.max())))[None]
        is_real_BN = columns_BN < count_B[:, None]
        start_B = offsets_B if number == 0 else torch.zeros_like(offsets_B)
        positions_BN = torch.where(is_real_BN, start_B[:, None] + columns_BN, segment)
        yield _Part((first_B[:, None] + columns_BN).clamp_max(length - 1), positions_BN, is_real_BN)


def _join(parts: Sequence[_Part], pieces: Sequence[Tensor], length: int) -> Tensor:
    """The parts' tensors (B, N, …) as one (B, L, …); zeros where there was padding."""
    if all(part.is_real_BN is None for part in parts):
        return torch.cat(list(pieces), dim=1) if len(pieces) > 1 else pieces[0]
    whole = pieces[0].new_zeros(pieces[0].shape[0], length, *pieces[0].shape[2:])
    for part, piece in zip(parts, pieces, strict=True):
        is_real_BN = part.is_real_BN
        if is_real_BN is None:
            is_real_BN = torch.ones(piece.shape[:2], dtype=torch.bool)
        rows_R, columns_R = is_real_BN.nonzero().to(piece.device).unbind(1)
        places_R = part.places_BN.to(piece.device).expand(piece.shape[:2])[rows_R, columns_R]
        whole = whole.index_put((rows_R, places_R), piece[rows_R, columns_R])
    return whole


@register(MemoryHRMConfig)
class MemoryHRM(AdaptiveModel):
    """A shared unit applied T times to each segment, and a memory that carries from segment to segment."""

    config: MemoryHRMConfig

    def __init__(self, config: MemoryHRMConfig) -> None:
        super().__init__(config)
        self.unit = Unit(config)
        self.memory = Memory(
            config.d_model,
            config.slots,
            config.gate_biases,
            config.memory_width,
            config.n_memory_heads,
            config.norm_eps,
            config.write_dropout,
        )
        self.halting = HaltingHead(config.d_model) if config.halting == "token" else None
        self._monitor = MemoryMonitor(config.slots)

    @property
    def carries_state(self) -> bool:
        """The memory, and the unfinished segment."""
        return True

    @property
    def sequence_limit(self) -> int:
        """None to speak of: the state does not grow with the text."""
        return sys.maxsize

    @property
    def trained_depth(self) -> int:
        """T."""
        return self.config.iterations

    @property
    def warmup_steps(self) -> int:
        """max(1000, 100·T), as for the other models of recurrent depth."""
        return max(1000, 100 * self.config.iterations)

    @property
    def memory_parameters(self) -> int:
        """Weights that exist for the memory's sake."""
        return sum(parameter.numel() for parameter in self.memory.parameters())

    def repeated_modules(self) -> Iterable[nn.Module]:
        """The unit."""
        return (self.unit,)

    def init_weights(self) -> None:
        """See AdaptiveModel.init_weights, and Memory.init_weights."""
        super().init_weights()
        self.memory.init_weights(self.config.iterations)

    def check_depth(self, depth: int) -> None:
        """Raises: UserError: a unit that is told its iteration knows the trained ones only."""
        super().check_depth(depth)
        if self.config.step_conditioning != "none" and depth > self.config.iterations:
            raise UserError(
                f"depth {depth} is not possible: step_conditioning is learned for {self.config.iterations} iterations"
            )

    def check_training(self, window: int | None = None) -> None:
        """See LanguageModel.check_training. Raises: UserError for windows of a single segment."""
        super().check_training(window)
        if window is not None and window <= self.config.segment:
            raise UserError(
                f"training windows of {window} tokens hold one segment of {self.config.segment}: nothing would ever be "
                "read from memory; make data.window at least twice model.segment"
            )

    def build_schedule(self, depth: int) -> list[Application]:
        """T applications of the unit, one slot each."""
        return [Application(f"step {t + 1}", "unit", slot=t) for t in range(depth)]

    # Costs

    def attended(self, length: int) -> tuple[float, float]:
        """See LanguageModel.attended: within segments."""
        full, rest = divmod(length, self.config.segment)
        sizes = {self.config.segment: full, rest: 1}
        causal = sum(count * size * (size + 1) / 2 for size, count in sizes.items())
        return causal / length, sum(count * size**2 for size, count in sizes.items()) / length

    def extra_flops(self, length: int, depth: int, training: bool) -> tuple[float, float]:
        """See LanguageModel.extra_flops: reads, writes and step conditioning."""
        group = self.config.memory_bptt if training else None
        products, attention = self.memory.flops(length, self.config.segment, depth, group)
        conditioning = 0.0
        if self.config.step_conditioning == "lora":
            conditioning = depth * 2 * 2.0 * 2 * self.config.d_model * self.config.lora_rank
        return products / length + conditioning * (3 if training else 1), attention / length

    def cached_values(self, length: int, depth: int) -> int:
        """See LanguageModel.cached_values: the same for every length; everything stands twice, to be rewound."""
        c, attention = self.config, self.unit.attention
        per_position = 2 * attention.n_kv_heads * attention.head_dim + 2 * self.memory.width
        return 2 * (depth * (c.segment + 1) * per_position + self.memory.start.numel())

    # One forward pass

    @property
    def cycle_slots(self) -> tuple[int, int]:
        """See LanguageModel.cycle_slots: one slot per iteration."""
        return 0, 1

    def new_call(self, batch_size: int, length: int, device: torch.device, cache: KVCache | None) -> ForwardCall:
        """See LanguageModel.new_call. A call that stays within a segment can be run cycle by cycle; any other one holds
        what its parts have in common, and `states` runs them one after another."""
        if not isinstance(cache, MemoryState):
            if length <= self.config.segment:
                part = _Part(torch.arange(length)[None], torch.arange(length)[None])
                return self._part_call(part, batch_size, device, None, self.memory.first(batch_size))
        else:
            self._settle(cache)
            offsets_B = cache.offsets_B
            if int(offsets_B.max()) + length <= self.config.segment:
                columns_1L = torch.arange(length)[None]
                part = _Part(columns_1L, offsets_B[:, None] + columns_1L)
                return self._part_call(part, batch_size, device, cache, cache.memory_BSD)
        positions_BL = torch.arange(length)[None] if cache is None else cache.reserve(length)
        nothing = torch.zeros(0, device=device)
        place = Placement(positions_BL.expand(batch_size, length), length)
        return ForwardCall(nothing, nothing, place, None, True, cache=cache)

    def _part_call(
        self, part: "_Part", batch_size: int, device: torch.device, cache: MemoryState | None, memory_BSD: Tensor
    ) -> "_PartCall":
        positions_BN = part.positions_BN.expand(batch_size, -1)
        if cache is None:
            place = Placement(positions_BN, positions_BN.shape[1])
        else:
            rows_B = None if part.is_real_BN is None else torch.arange(batch_size)
            place = Placement.of(positions_BN, device, rows_B)
        head_dim = self.config.d_model // self.config.heads
        own = call_at(place, head_dim, self.config.rope_theta, device, cache)
        keys = self.memory.keys(memory_BSD) if cache is None else self._keys(cache)
        return _PartCall(**vars(own), read_keys=keys)

    def _keys(self, state: MemoryState) -> KeysValues:
        if state.read_keys is None:
            state.read_keys = self.memory.keys(state.memory_BSD)
        return state.read_keys

    def begin(self, tokens_BL: Tensor, call: ForwardCall) -> States:
        """See LanguageModel.begin: the embeddings."""
        assert isinstance(call, _PartCall), "a text of several segments is not run cycle by cycle"
        call.seen.clear()
        return (self.embed(tokens_BL) if call.embedded_BND is None else call.embedded_BND,)

    def cycle(self, index: int, states: States, call: ForwardCall) -> States:
        """See LanguageModel.cycle: read the memory, apply the unit, keep what the write of this iteration needs."""
        assert isinstance(call, _PartCall)
        application, h_BND = call.schedule[index], states[0]
        k_BHSK, v_BHSK = (x if call.rows is None else x[call.rows.to(x.device)] for x in call.read_keys)
        new_BND = call.run(self._iterate, h_BND, (k_BHSK, v_BHSK), slot=application.slot)
        call.record(application, h_BND, new_BND)
        if isinstance(call.cache, MemoryState):
            if call.cache.shares is not None:
                call.cache.shares.append(self.memory.read_shares(h_BND, (k_BHSK, v_BHSK)).mean((0, 1)))
            call.cache.put(application.slot, call.place, self.memory.material(new_BND))
        else:  # a stopped position keeps its state
            running_BN = call.running_BL
            call.seen.append(new_BND if running_BN is None else torch.where(running_BN[..., None], new_BND, h_BND))
        return (new_BND,)

    def _iterate(self, h_BND: Tensor, keys: KeysValues, call: ForwardCall, slot: int) -> Tensor:
        """Read the memory, then apply the unit."""
        read_BND = self.memory.read(h_BND, keys).to(h_BND.dtype)
        return self.unit(h_BND + self.unit.drop(read_BND), call, slot)

    def read(self, states: States) -> Tensor:
        """See LanguageModel.read."""
        return states[0]

    def states(self, tokens_BL: Tensor, call: ForwardCall) -> Iterator[Tensor]:
        """See LanguageModel.states. In training the gradient is cut after every `memory_bptt` segments."""
        if isinstance(call, _PartCall) and call.lengths_B is None:
            yield from super().states(tokens_BL, call)
            return
        (B, L), state = tokens_BL.shape, call.cache
        assert state is None or isinstance(state, MemoryState)
        embedded_BLD = self.embed(tokens_BL)
        memory_BSD = self.memory.first(B)
        lengths_B = None if state is None else call.lengths_B
        parts = list(_parts(L, self.config.segment, None if state is None else state.offsets_B, lengths_B))
        calls, readouts = [], []
        for number, part in enumerate(parts):
            if number and state is not None:
                self._write(state, parts[number - 1].completed(self.config.segment, B))
            own, readout_BND = self._run(part, embedded_BLD, call, state, memory_BSD)
            if state is None and number + 1 < len(parts):
                memory_BSD = self.memory.write(memory_BSD, [self.memory.material(h_BND) for h_BND in own.seen])
                if call.truncate_gradient and (number + 1) % self.config.memory_bptt == 0:
                    memory_BSD = memory_BSD.detach()
            own.seen.clear()
            calls.append(own)
            readouts.append(readout_BND)
        self._collect(call, parts, calls, L)
        yield _join(parts, readouts, L)

    def _run(
        self, part: "_Part", embedded_BLD: Tensor, call: ForwardCall, state: MemoryState | None, memory_BSD: Tensor
    ) -> tuple["_PartCall", Tensor]:
        """Run one part of a call: what it recorded, and its readout (B, N, D)."""
        own = self._part_call(part, len(embedded_BLD), embedded_BLD.device, state, memory_BSD)
        for name in _SHARED:
            setattr(own, name, getattr(call, name))
        own.stats = None if call.stats is None else []
        own.embedded_BND = part.take(embedded_BLD)
        (readout_BND,) = super().states(own.embedded_BND, own)
        own.seen += own.seen[-1:] * (call.cycles - len(own.seen))  # all stopped: what is written is their last state
        return own, readout_BND

    def _settle(self, state: MemoryState) -> None:
        """Write the segments that are complete: something is going to follow them."""
        self._write(state, (state.offsets_B == self.config.segment).nonzero()[:, 0])

    def _write(self, state: MemoryState, rows_R: Tensor) -> None:
        if not len(rows_R):
            return
        there, dtype = rows_R.to(state.memory_BSD.device), self.memory.start.dtype
        materials = [kept[there, : self.config.segment].to(dtype) for kept in state.materials]
        state.complete(rows_R, self.memory.write(state.memory_BSD[there], materials, state.monitor))

    def _collect(self, call: ForwardCall, parts: list["_Part"], calls: Sequence[ForwardCall], length: int) -> None:
        """Put together what the parts recorded."""
        if calls[0].steps_BL is not None:
            call.steps_BL = _join(parts, [own.steps_BL for own in calls if own.steps_BL is not None], length)
            costs = [own.step_cost_BL for own in calls if own.step_cost_BL is not None]
            call.step_cost_BL = _join(parts, costs, length)
        if call.stats is None:
            return
        for place, first in enumerate(calls[0].stats or []):
            own = [one.stats[place] for one in calls if one.stats is not None]
            rms_BL, change_BL = (
                _join(parts, [getattr(record, kind) for record in own], length) for kind in ("rms_BL", "change_BL")
            )
            call.stats.append(ApplicationStats(first.name, rms_BL, change_BL, None))

    # State

    def check_exit(self, depth: int | None = None, halt_threshold: float | None = None) -> None:
        """See LanguageModel.check_exit. Raises: UserError always."""
        raise UserError(
            "exit rules look at the iterations of a whole text, and this model reads it segment by segment; give a "
            "depth, or train it with halting: token"
        )

    def check_cache_policy(self, policy: CachePolicy, depth: int | None = None, exit: ExitRule | None = None) -> None:
        """See LanguageModel.check_cache_policy: every iteration keeps what it has of the unfinished segment."""
        if not policy.is_exact:
            raise UserError(
                f"cache policy {policy.name} saves nothing here: this model's state does not grow; use full"
            )

    def new_cache(
        self,
        batch_size: int,
        max_length: int,
        depth: int | None = None,
        dtype: torch.dtype | None = None,
        policy: CachePolicy = FULL,
    ) -> KVCache:
        """The state before any token, whatever `max_length`. dtype: of keys and values (None: as the weights).

        Raises: UserError for any policy but `full`.
        """
        self.check_cache_policy(policy, depth)
        attention = self.unit.attention
        return MemoryState(
            len(self.schedule(depth)),
            attention.n_kv_heads,
            self.config.segment,
            attention.head_dim,
            self.memory.first(batch_size),
            2 * self.memory.width,
            dtype or self.embedding.weight.dtype,
        )

    def new_state(self, batch_size: int, depth: int | None = None) -> KVCache:
        """See LanguageModel.new_state."""
        return self.new_cache(batch_size, 0, depth)

    def continued(self, state: KVCache) -> KVCache:
        """See LanguageModel.continued."""
        if not isinstance(state, MemoryState) or state.segment != self.config.segment:
            raise UserError("the state is not one of this model; begin with model.new_state(rows)")
        return state.copy()

    # Training

    def _iterations_at(self, progress: float) -> int:
        """The curriculum: iterations after this share of the training."""
        first, T = self.config.curriculum_start or self.config.iterations, self.config.iterations
        return min(T, first + int((T - first + 1) * progress / self.config.curriculum_fraction))

    def n_parts(self, length: int) -> int:
        """See LanguageModel.n_parts: one per `memory_bptt` segments."""
        return -(-length // (self.config.memory_bptt * self.config.segment))

    def losses(self, batch: Batch, rng: random.Random | None = None, progress: float = 1.0) -> Iterator[PartialLoss]:
        """One partial loss per `memory_bptt` segments; the memory goes on from one to the next without its graph.

        The memory of every row begins as M_0. See LanguageModel.losses.
        """
        depth = self._iterations_at(progress)
        (B, L), stride = batch.inputs_BL.shape, self.config.memory_bptt * self.config.segment
        call = self._begin(batch.inputs_BL, None, None)
        call.schedule, call.cycles = self.schedule(depth), depth
        self.prepare_training(call, rng)
        auxiliary = None
        if rng is not None and depth > 1 and self.config.auxiliary_weight > 0:
            auxiliary = int(rng.random() * (depth - 1))
        memory_BSD = self.memory.first(B)
        for begin in range(0, L, stride):
            piece = batch.positions(begin, min(begin + stride, L))
            length, is_last = piece.inputs_BL.shape[1], begin + stride >= L
            group = list(_parts(length, self.config.segment, None, None))
            embedded_BLD = self.embed(piece.inputs_BL)
            calls, readouts, earlier = [], [], []
            for number, part in enumerate(group, start=1):
                own, readout_BND = self._run(part, embedded_BLD, call, None, memory_BSD)
                calls.append(own)
                readouts.append(readout_BND)
                if auxiliary is not None:
                    earlier.append(own.seen[auxiliary])
                for iteration, state_BND in enumerate(own.seen, start=1):
                    self._monitor.watch(iteration, state_BND)
                with torch.set_grad_enabled(torch.is_grad_enabled() and number < len(group)):
                    if number < len(group) or not is_last:
                        materials = [self.memory.material(state_BND) for state_BND in own.seen]
                        memory_BSD = self.memory.write(memory_BSD, materials, self._monitor)
            self._collect(call, group, calls, length)
            partial = self.partial_loss(_join(group, readouts, length), piece, call, depth)
            if auxiliary is not None:
                hard = Batch(piece.inputs_BL, piece.targets_BL)
                nats, nats_1 = self.loss_of(_join(group, earlier, length), text_loss(hard))
                partial.objective = partial.objective + self.config.auxiliary_weight * nats
                partial.extra["auxiliary"] = nats_1[0]
            yield partial
            memory_BSD = memory_BSD.detach()

    def monitors(self) -> dict[str, Any]:
        """Size and gate of every level, gradient norm at every iteration (see MemoryMonitor)."""
        values = self._monitor.values()
        self._monitor = MemoryMonitor(self.config.slots)
        return values

    def complaints(self, now: dict[str, Any], before: dict[str, Any]) -> dict[str, str]:
        """See LanguageModel.complaints: a gate that is saturated, a level whose size drifts."""
        found = {}
        for level, gate in now.get("memory_gate", {}).items():
            if not SATURATED[0] <= gate <= SATURATED[1]:
                what = "stands still" if gate < SATURATED[0] else "forgets everything with each segment"
                advice = "raise" if gate < SATURATED[0] else "lower"
                found[f"memory_gate/{level}"] = (
                    f"the write gates of memory level {level} are open {gate:.2g} on average: it {what}; "
                    f"{advice} model.gate_bias of that level, or lower optimizer.lr"
                )
        for level, rms in now.get("memory_rms", {}).items():
            start = before.get("memory_rms", {}).get(level)
            if start and not 1 / DRIFT <= rms / start <= DRIFT:
                found[f"memory_rms/{level}"] = (
                    f"the size of memory level {level} went from {start:.3g} to {rms:.3g} (root mean square) since the "
                    "warm-up: it drifts; lower optimizer.lr or model.gate_bias"
                )
        return found
