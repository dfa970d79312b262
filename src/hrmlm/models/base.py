"""What every family shares: embedding and tied head, forward, losses, initialisation, cache.

Shapes: B rows, L positions, D width, V vocabulary.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hrmlm.data.batch import IGNORE, Batch
from hrmlm.errors import UserError
from hrmlm.models.blocks import (
    Application,
    ApplicationStats,
    Attention,
    ForwardCall,
    States,
    embedding,
    packed_linear,
    prepare_call,
    reads_packed,
)
from hrmlm.models.cache import KVCache
from hrmlm.models.cache_policy import FULL, CachePolicy
from hrmlm.models.early_readout import exit_loss, join_windows
from hrmlm.models.halting import ExitRule, run_adaptive
from hrmlm.models.losses import PositionLoss, in_chunks, text_loss
from hrmlm.models.settings import ModelConfig

INIT_STD = 0.02
MAX_DEPTH = 10_000


@dataclass
class ModelOutput:
    """logits (B, L, V) in float32, or (B, 1, V) where one position was asked for; stats per application, if asked;
    steps_BL: outer steps each position took, of models that decide it themselves; halting_logits_B2: last halt and
    continue logits, where whole sequences decide; state: what the next call may go on from, if a state was given."""

    logits: Tensor
    stats: list[ApplicationStats] | None = None
    steps_BL: Tensor | None = None
    halting_logits_B2: Tensor | None = None
    state: KVCache | None = None


@dataclass
class PartialLoss:
    """One part of a training step's loss, to be sent backward as it comes.

    objective: scalar with a graph, a *sum* over target tokens (the trainer divides by the targets of the whole step);
    task_nats: cross-entropy alone, summed, no graph; n_targets: tokens in it; counted: whether it belongs to the loss
    that is reported (of several passes over the same tokens only the last does); depth: cycles or steps that were run;
    extra: further sums by name (step costs, auxiliary losses), never mixed into task_nats.
    """

    objective: Tensor
    task_nats: Tensor
    n_targets: int
    counted: bool = True
    depth: int = 0
    extra: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout) without gradients; afterwards the mode before.

    `no_grad`, not `inference_mode`: what a model computes on first use must stay usable in training.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class LanguageModel(nn.Module, ABC):
    """A decoder-only language model: tokens in, next-token logits out, whatever happens in between.

    A family says what happens in between: `schedule` lists the applications of its modules; `begin`, then `cycle` again
    and again, then `read` and `finish` run them. Whoever wants to stop, draft or go on in between can.
    """

    config: Any  # the family's own subclass of ModelConfig
    n_passes: int = 1
    packed_head: Tensor | None = None  # see blocks.Linear
    packed_version = -1
    loss_chunk: int | None = None  # in training: positions whose logits exist at once; None: all
    checkpoint_activations = False  # in training: applications keep their inputs and are computed again when needed

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UserError("model.vocab_size is not set; give it, or prepared data that decides it")
        self.config = config
        self.embedding = embedding(config.vocab_size, config.d_model)
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "packed_head"}

    @property
    def learns_depth(self) -> bool:
        """Whether positions decide how many steps they take."""
        return False

    @property
    def is_rotary(self) -> bool:
        """Whether positions turn queries and keys."""
        return True

    @property
    def carries_state(self) -> bool:
        """Whether a state of constant size stands for the text so far, instead of keys and values of all of it."""
        return False

    @property
    def sequence_limit(self) -> int:
        """The most tokens a sequence may have."""
        return self.config.context

    @property
    @abstractmethod
    def trained_depth(self) -> int:
        """Cycles, steps or layers of the full forward pass."""

    @abstractmethod
    def build_schedule(self, depth: int) -> list[Application]:
        """The applications of a forward pass of this depth, in order.

        Of a model with one supervision pass, a smaller depth has the first slots of a larger one.
        """

    @abstractmethod
    def begin(self, tokens_BL: Tensor, call: ForwardCall) -> States:
        """The states before the first cycle: embedding, and what runs once per token."""

    @abstractmethod
    def cycle(self, index: int, states: States, call: ForwardCall) -> States:
        """The states after one more cycle, step or layer; `index` counts from 0, over all supervision passes."""

    @abstractmethod
    def read(self, states: States) -> Tensor:
        """The state (B, L, D) that would be read out now; any number of times, it changes nothing."""

    def finish(self, state_BLD: Tensor, call: ForwardCall) -> Tensor:
        """What runs once per token after the last cycle: readout state (B, L, D), before the final norm."""
        return state_BLD

    @property
    def finishes(self) -> bool:
        """Whether anything but the head runs after the last cycle."""
        return type(self).finish is not LanguageModel.finish

    @property
    def cycle_slots(self) -> tuple[int, int] | None:
        """First key/value slot of the first cycle, and slots per cycle; None where cycles do not share their weights.

        Where positions stop at different cycles, their keys and values stand in for those of later cycles.
        """
        return None

    def cut(self, states: States) -> States:
        """The states without their graph; what runs once per token keeps its own."""
        return tuple(state.detach() for state in states)

    def restart(self, tokens_BL: Tensor, states: States, call: ForwardCall) -> States:
        """The states with which the next supervision pass starts: those of the one before, without their graph."""
        return self.cut(states)

    def exit_rule(self, call: ForwardCall) -> ExitRule | None:
        """What decides when positions stop; None: all run every cycle."""
        return call.exit

    def states(self, tokens_BL: Tensor, call: ForwardCall) -> Iterator[Tensor]:
        """Run the call's schedule; yield the readout state (B, L, D), before the final norm, after every pass."""
        states = self.begin(tokens_BL, call)
        rule = self.exit_rule(call)
        if rule is not None:
            assert self.cycle_slots is not None
            most = call.cycles * self.n_passes
            yield self.finish(run_adaptive(self, states, rule, call, most, self.cycle_slots), call)
            return
        for supervision_pass in range(self.n_passes):
            first = supervision_pass * call.cycles
            if first:
                states = self.restart(tokens_BL, states, call)
            for index in range(first, first + call.cycles):
                states = self.cycle(index, states, call)
                if index + 1 == call.early_cycle:
                    call.early_BLD = self.finish(self.read(states), call)
                    states = self.cut(states) if call.early_cut else states
            yield self.finish(self.read(states), call)

    def total_cycles(self, depth: int | None = None) -> int:
        """Cycles, steps or layers of a whole pass of this depth (None: as trained), over all supervision passes."""
        return (depth or self.trained_depth) * self.n_passes

    def repeated_modules(self) -> Iterable[nn.Module]:
        """Modules whose weights are applied M times and start smaller (scaled init)."""
        return ()

    @property
    def gradient_share(self) -> float:
        """K/M, by which the trainer scales the largest gradient norm it lets through."""
        return 1.0

    @property
    def warmup_steps(self) -> int:
        """Learning-rate warm-up the family asks for, in optimizer steps."""
        return 1000

    @cached_property
    def _schedules(self) -> dict[int, list[Application]]:
        return {}

    def schedule(self, depth: int | None = None) -> list[Application]:
        """The applications of a forward pass. depth: cycles, steps or layers (None: as trained).

        Raises: UserError for a depth the model cannot run.
        """
        depth = self.trained_depth if depth is None else depth
        if depth not in self._schedules:
            self.check_depth(depth)
            self._schedules[depth] = self.build_schedule(depth)
        return list(self._schedules[depth])

    def check_depth(self, depth: int) -> None:
        """Raises: UserError if the model cannot run at this depth."""
        if depth > MAX_DEPTH:
            raise UserError(f"depth {depth} is beyond the {MAX_DEPTH:,} that this program unrolls")
        if depth < 1:
            raise UserError(f"depth {depth} is not possible; the model was trained at depth {self.trained_depth}")

    def attended(self, length: int) -> tuple[float, float]:
        """Keys per query in the applications of a sequence: those it may see, on average, and those in a product that
        does not know of causality."""
        return (length + 1) / 2, float(length)

    def extra_flops(self, length: int, depth: int, training: bool) -> tuple[float, float]:
        """FLOPs per token outside the applications and the head: of products with weights, and of attention."""
        return 0.0, 0.0

    def cached_values(self, length: int, depth: int) -> int:
        """Numbers that decoding keeps of a sequence."""
        applications = [self.get_submodule(item.module) for item in self.schedule(depth)]
        parts = [part for module in applications for part in module.modules() if isinstance(part, Attention)]
        return length * sum(2 * part.n_kv_heads * part.head_dim for part in parts)

    def init_weights(self) -> None:
        """Matrices from N(0, 0.02²), repeated ones from N(0, (0.02/√M)²); gains 1, biases 0."""
        repeated = {id(p) for module in self.repeated_modules() for p in module.parameters()}
        scale = self.config.total_steps**-0.5 if repeated and self.config.scaled_init else 1.0
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=INIT_STD * (scale if id(parameter) in repeated else 1.0))
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """Embeddings (B, L, D)."""
        return self.embedding(tokens_BL)

    def readout(self, state_BLD: Tensor) -> Tensor:
        """Logits (B, L, V) in float32 of a readout state, through the final norm and the tied head."""
        normed_BLD = self.norm(state_BLD)
        if self.packed_head is not None and reads_packed(normed_BLD, self.embedding.weight):
            return packed_linear(normed_BLD, self.packed_head).float()
        return F.linear(normed_BLD, self._head_VD()).float()

    def _head_VD(self) -> Tensor:
        """Rows of the embedding that can be predicted."""
        weight_VD = self.embedding.weight
        if self.config.n_predicted < len(weight_VD):  # a slice costs a table of zeros in every backward pass
            return weight_VD[: self.config.n_predicted]
        return weight_VD

    def loss_of(self, state_BLD: Tensor, loss: PositionLoss) -> tuple[Tensor, Tensor]:
        """A loss of the logits of readout states, summed over their positions: objective, and sums for the record."""
        if self.loss_chunk is None:
            return loss(self.readout(state_BLD).flatten(0, 1), slice(None))
        return in_chunks(self.norm(state_BLD).flatten(0, 1), self._head_VD(), self.loss_chunk, loss)

    def forward(
        self,
        tokens_BL: Tensor,
        *,
        cache: KVCache | None = None,
        state: KVCache | None = None,
        lengths_B: Tensor | None = None,
        read_B: Tensor | None = None,
        depth: int | None = None,
        halt_threshold: float | None = None,
        exit: ExitRule | None = None,
        stats: bool = False,
    ) -> ModelOutput:
        """Logits of the next token at every position.

        tokens_BL: ids; with `cache` the continuation of what each row has cached, and the cache grows by it.
        state: like a cache, but left as it is: the output has the new one (models that carry a state; the first is
        `new_state(rows)`).
        lengths_B: how many of the L tokens of each row are real, the rest being padding on the right (None: all).
        read_B: read the logits at this one position of each row only. depth: run so many cycles, steps or layers.
        halt_threshold: sum of halting probabilities that stops a position (None: as trained; learned halting only).
        exit: rule by which each position stops at a cycle of its own (None: as trained).
        stats: also return what each application did.

        Raises: UserError if the sequence is longer than the context, an id is outside the vocabulary, or the depth is
        impossible.
        """
        if halt_threshold is not None:
            self.check_threshold(halt_threshold, depth)
        if exit is not None:
            self.check_exit(depth, halt_threshold)
        if state is not None:
            if cache is not None:
                raise UserError("cache and state exclude each other; give one of them")
            cache = self.continued(state)
        if cache is not None:
            self.check_cache_policy(cache.policy, depth, exit)
        call = self.prepare(tokens_BL, cache=cache, lengths_B=lengths_B, depth=depth)
        call.stats = [] if stats else None
        call.halt_threshold, call.exit = halt_threshold, exit
        for state_BLD in self.states(tokens_BL, call):
            last_BLD = state_BLD
        if cache is not None:
            cache.lengths_B = cache.lengths_B + (tokens_BL.shape[1] if lengths_B is None else lengths_B.cpu())
        if read_B is not None:
            if int(read_B.min()) < 0 or int(read_B.max()) >= tokens_BL.shape[1]:
                raise UserError(f"read_B holds positions outside the {tokens_BL.shape[1]} tokens of this call")
            rows_B = torch.arange(last_BLD.shape[0], device=last_BLD.device)
            last_BLD = last_BLD[rows_B, read_B.to(last_BLD.device)][:, None]
        new_state = None if state is None else cache
        return ModelOutput(self.readout(last_BLD), call.stats, call.steps_BL, call.q_B2, new_state)

    def new_state(self, batch_size: int, depth: int | None = None) -> KVCache:
        """The state before any token, for `forward(state=…)`. Raises: UserError for models that carry none."""
        raise UserError(
            f"a {self.config.family} model keeps all of its text and has no state of constant size; "
            "use cache=model.new_cache(rows, length)"
        )

    def continued(self, state: KVCache) -> KVCache:
        """A cache with the contents of a state. Raises: UserError as `new_state`."""
        return self.new_state(len(state.lengths_B))

    def check_threshold(self, halt_threshold: float, depth: int | None) -> None:
        """Raises: UserError if the model cannot stop its positions at this sum of halting probabilities."""
        if depth is not None:
            raise UserError(f"depth {depth} and halt_threshold {halt_threshold:g} exclude each other; give one of them")
        if not self.learns_depth:
            raise UserError(
                f"halt_threshold {halt_threshold:g}: this model does not learn when to stop; give a depth instead"
            )
        if not 0 < halt_threshold <= 1:
            raise UserError(
                f"halt_threshold {halt_threshold:g}: a position stops when its halting probabilities sum to it, so "
                "give a number above 0 and at most 1"
            )

    def check_exit(self, depth: int | None = None, halt_threshold: float | None = None) -> None:
        """Raises: UserError if positions of this model cannot stop at cycles of their own by a rule that is given."""
        if depth is not None or halt_threshold is not None:
            raise UserError("an exit rule, depth and halt_threshold exclude each other; give one of them")
        if self.cycle_slots is None:
            raise UserError("an exit rule needs cycles that share their weights; give this model a depth instead")

    def check_cache_policy(self, policy: CachePolicy, depth: int | None = None, exit: ExitRule | None = None) -> None:
        """Raises: UserError if this model cannot decode with such a cache."""
        if policy.is_exact:
            return
        if self.cycle_slots is None:
            raise UserError(f"cache policy {policy.name} needs cycles that share their weights; this model needs full")
        if exit is not None or (self.learns_depth and depth is None):
            raise UserError(
                f"cache policy {policy.name} needs all positions at the same depth: of a position that stops earlier "
                "the stored cycles would be missing; give a depth, or the policy full"
            )

    def prepare(
        self,
        tokens_BL: Tensor,
        *,
        cache: KVCache | None = None,
        lengths_B: Tensor | None = None,
        depth: int | None = None,
    ) -> ForwardCall:
        """What `begin`, `cycle`, `read` and `finish` need to run for these tokens; arguments and errors of `forward`.

        The cache's lengths stay as they are: who runs the cycles decides which tokens stay.
        """
        schedule = self.schedule(depth)
        if cache is not None:
            self._check_cache(cache, schedule, tokens_BL.shape, lengths_B)
        call = self._begin(tokens_BL, cache, lengths_B)
        call.schedule, call.depth, call.cycles = schedule, depth, depth or self.trained_depth
        return call

    def _begin(self, tokens_BL: Tensor, cache: KVCache | None, lengths_B: Tensor | None) -> ForwardCall:
        B, L = tokens_BL.shape
        if B == 0 or L == 0:
            raise UserError(f"tokens of shape {tuple(tokens_BL.shape)}: at least one token is needed")
        if tokens_BL.device.type == "cpu":  # elsewhere the look would stall the queue of kernels
            lowest, highest = (int(bound) for bound in tokens_BL.aminmax())
            if lowest < 0 or highest >= self.config.vocab_size:
                bad = lowest if lowest < 0 else highest
                raise UserError(f"token id {bad} is outside the model's vocabulary of {self.config.vocab_size}")
        new_B = L if lengths_B is None else lengths_B.cpu()
        longest = L if cache is None else int((cache.lengths_B + new_B).max())
        if longest > self.sequence_limit:
            raise UserError(
                f"a sequence of {longest} tokens is longer than the model's context of {self.sequence_limit}"
            )
        call = self.new_call(B, L, tokens_BL.device, cache)
        call.truncate_gradient, call.lengths_B, call.is_rotary = self.training, lengths_B, self.is_rotary
        call.checkpoint_activations = self.training and self.checkpoint_activations
        return call

    def new_call(self, batch_size: int, length: int, device: torch.device, cache: KVCache | None) -> ForwardCall:
        """What the applications of one forward pass share."""
        head_dim = self.config.d_model // self.config.heads
        return prepare_call(batch_size, length, head_dim, self.config.rope_theta, device, cache)

    @staticmethod
    def _check_cache(cache: KVCache, schedule: list[Application], shape: torch.Size, lengths_B: Tensor | None) -> None:
        """Raises: UserError if a cache does not fit the call."""
        needed = 1 + max(application.slot for application in schedule)
        if cache.n_slots < needed:
            raise UserError(
                f"the cache has {cache.n_slots} slots and this depth needs {needed}; make one for the depth"
            )
        if cache.policy.is_sequential and shape[1] > 1:
            raise UserError(
                f"cache policy {cache.policy.name} needs tokens one at a time and {shape[1]} came: earlier positions "
                "must have run all their cycles"
            )
        if len(cache.lengths_B) != shape[0]:
            raise UserError(f"the cache holds {len(cache.lengths_B)} rows and {shape[0]} rows of tokens came")
        if lengths_B is not None and (int(lengths_B.min()) < 0 or int(lengths_B.max()) > shape[1]):
            raise UserError(f"lengths_B holds numbers outside 0..{shape[1]}, the tokens of this call")

    def check_training(self, window: int | None = None) -> None:
        """Raises: UserError if this model cannot be trained, on windows of so many tokens where that is known."""
        self.schedule()

    def n_parts(self, length: int) -> int:
        """How many partial losses `losses` gives for rows of `length` tokens, whatever is in them."""
        return self.n_passes

    def losses(self, batch: Batch, rng: random.Random | None = None, progress: float = 1.0) -> Iterator[PartialLoss]:
        """Partial losses of a training step, one per supervision pass, each with its own graph.

        rng: decides exit sampling (None: always the full depth). progress: share of the training that is done, for
        what a family changes on the way.
        """
        depth = self._training_depth(rng)
        call = self._begin(batch.inputs_BL, None, None)
        call.backward_per_pass, call.schedule, call.cycles = True, self.schedule(depth), depth
        offset = self._prepare_early(call, rng) if depth == self.trained_depth else 0
        self.prepare_training(call, rng)
        for index, state_BLD in enumerate(self.states(batch.inputs_BL, call)):
            is_last = index == self.n_passes - 1
            yield self.partial_loss(state_BLD, batch, call, depth, counted=is_last, early_offset=offset)

    def partial_loss(
        self,
        state_BLD: Tensor,
        batch: Batch,
        call: ForwardCall,
        depth: int,
        counted: bool = True,
        early_offset: int = 0,
    ) -> PartialLoss:
        """The loss of one readout state of training: cross-entropy, a teacher's part, the family's penalties."""
        objective, sums_K = self.loss_of(state_BLD, text_loss(batch))
        extra = {} if batch.soft is None else {"distillation": sums_K[1]}
        scored_BL = batch.targets_BL != IGNORE
        penalty, sums = self.penalties(call, scored_BL)
        if call.early_BLD is not None:
            compared = slice(early_offset, None, self.config.exit_every)
            last = exit_loss(self.readout, state_BLD[:, compared], scored_BL[:, compared], self.config.exit_every)
            apart, apart_1 = self.loss_of(call.early_BLD[:, compared], last)
            penalty = penalty + self.config.exit_weight * apart
            extra["exit_divergence"] = apart_1[0]
        return PartialLoss(objective + penalty, sums_K[0], batch.n_targets, counted, depth, {**extra, **sums})

    def monitors(self) -> dict[str, Any]:
        """What a family has seen in the training passes since the last call, by name, for the record."""
        return {}

    def complaints(self, now: dict[str, Any], before: dict[str, Any]) -> dict[str, str]:
        """Warnings by kind from what `monitors` gave: lately, and soon after the warm-up."""
        return {}

    def prepare_training(self, call: ForwardCall, rng: random.Random | None) -> None:
        """What a family decides at random before a training forward pass."""

    def penalties(self, call: ForwardCall, scored_BL: Tensor) -> tuple[Tensor | float, dict[str, Tensor]]:
        """What a family adds to the objective after a training forward pass, and sums for the record.

        scored_BL: positions with a target; everything is a sum over them, like the loss.
        """
        return 0.0, {}

    def _training_depth(self, rng: random.Random | None) -> int:
        probability = getattr(self.config, "exit_probability", 0.0)
        if rng is not None and self.trained_depth > 1 and rng.random() < probability:
            return rng.randint(1, self.trained_depth - 1)
        return self.trained_depth

    def _prepare_early(self, call: ForwardCall, rng: random.Random | None) -> int:
        """Choose the smaller depth whose readout a step of full depth trains too; the first position compared."""
        if rng is None or not getattr(self.config, "exit_weight", 0.0):
            return 0
        call.early_cycle = rng.randint(1, self.trained_depth - 1)
        call.schedule, call.early_cut = join_windows(self.schedule(call.early_cycle), call.schedule)
        return rng.randint(0, self.config.exit_every - 1)

    def new_cache(
        self,
        batch_size: int,
        max_length: int,
        depth: int | None = None,
        dtype: torch.dtype | None = None,
        policy: CachePolicy = FULL,
    ) -> KVCache:
        """An empty cache for `batch_size` rows of up to `max_length` positions, one slot per application.

        dtype: of keys and values (None: as the weights). policy: which cycles keep theirs; only `full` is exact.

        Raises: UserError for a policy that this model cannot follow.
        """
        self.check_cache_policy(policy, depth)
        weight = self.embedding.weight
        attention = next(m for m in self.modules() if isinstance(m, Attention))
        return KVCache(
            1 + max(application.slot for application in self.schedule(depth)),
            batch_size,
            attention.n_kv_heads,
            max_length,
            attention.head_dim,
            dtype or weight.dtype,
            weight.device,
            policy,
            self.cycle_slots,
        )
