"""A memory of several levels beside a text that is read segment by segment: reading, writing, and its state.

Positions read what was written by *earlier* segments only, and a segment is written when it is complete, so whatever
a position does is causal. The state of a row is its memory and the keys and values of its unfinished segment: it does
not grow with the text.

Shapes: B rows, N positions of one segment, S slots of all levels together (coarsest level first), D width, W width of
the memory's attention, H its heads.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hrmlm.errors import UserError
from hrmlm.models.blocks import Linear
from hrmlm.models.cache import KVCache, Placement

KeysValues = tuple[Tensor, Tensor]


class Memory(nn.Module):
    """Reads and writes of a memory with levels of `slots` slots each; one set of weights for all of them.

    read:  h + O · Attn(q = h, kv = slots of all levels, with a learned bias per level and head on the scores)
    write: a = Attn(q = slots, kv = h);  g = σ(W_g [slots ; a] + b_level);  slots ← (1 − g) ⊙ slots + g ⊙ U a

    Queries, keys and values are taken from RMS-normalised states and slots. Slots have no positions.
    """

    level_S: Tensor

    def __init__(
        self,
        d_model: int,
        slots: Sequence[int],
        gate_bias: Sequence[float],
        width: int,
        n_heads: int,
        norm_eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.n_heads, self.width = n_heads, width
        self.slots, self.initial_gate_bias = tuple(slots), tuple(gate_bias)
        self.start = nn.Parameter(torch.empty(sum(slots), d_model))
        self.norm_positions = nn.RMSNorm(d_model, eps=norm_eps)
        self.norm_written = nn.RMSNorm(d_model, eps=norm_eps)
        self.norm_slots = nn.RMSNorm(d_model, eps=norm_eps)
        self.read_query = Linear(d_model, width, bias=False)
        self.read_kv = Linear(d_model, 2 * width, bias=False)
        self.read_out = Linear(width, d_model, bias=False)
        self.write_query = Linear(d_model, width, bias=False)
        self.write_kv = Linear(d_model, 2 * width, bias=False)
        self.gate = Linear(d_model + width, d_model, bias=False)
        self.candidate = Linear(width, d_model, bias=False)
        # Vectors: like all biases they do not decay. A bias on all keys alike would change nothing: none for one level.
        self.gate_biases = nn.ParameterList(torch.empty(d_model) for _ in slots)
        self.read_bias = nn.Parameter(torch.empty(n_heads * len(slots))) if len(slots) > 1 else None
        self.dropout = nn.Dropout(dropout)

    def init_weights(self, iterations: int) -> None:
        """What differs from other weights: write gates nearly closed, coarse levels most, and no level preferred in
        reading; matrices that keep the size of what they are given, all but the last one.

        A write and a read pass six matrices on their way. With N(0, 0.02²) in each, what a segment left arrives so
        small that training is slow to find it. What is added to the positions in all `iterations` reads together starts
        below the size of their embeddings, or it would hide them.
        """
        for bias, value in zip(self.gate_biases, self.initial_gate_bias, strict=True):
            nn.init.constant_(bias, value)
        if self.read_bias is not None:
            nn.init.zeros_(self.read_bias)
        for linear in (self.read_query, self.read_kv, self.write_query, self.write_kv, self.gate, self.candidate):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.normal_(self.read_out.weight, std=0.02 / iterations)

    def per_slot(self, per_level: Sequence[Tensor]) -> Tensor:
        """Values of levels (…) repeated for their slots, (S, …)."""
        return torch.cat([value.expand(n, *value.shape) for value, n in zip(per_level, self.slots, strict=True)])

    def split_levels(self, x_S: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """A tensor over slots cut into its levels."""
        return x_S.split(self.slots, dim)

    def first(self, batch_size: int) -> Tensor:
        """M_0 for every row, (B, S, D)."""
        # Without gradients too, a view of a parameter would ask for one.
        start = self.start if torch.is_grad_enabled() else self.start.detach()
        return start.expand(batch_size, *start.shape)

    def _heads(self, x_BNW: Tensor) -> Tensor:
        return x_BNW.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def _score_bias(self, dtype: torch.dtype) -> Tensor | None:
        """(1, H, 1, S), added to the scores of the slots."""
        if self.read_bias is None:
            return None
        levels_LH = self.read_bias.view(len(self.slots), self.n_heads).unbind()
        return self.per_slot(levels_LH).T[None, :, None].to(dtype)

    def keys(self, memory_BSD: Tensor) -> KeysValues:
        """Keys and values (B, H, S, ·) that all reads of a segment share."""
        k_BSW, v_BSW = self.read_kv(self.norm_slots(memory_BSD)).chunk(2, dim=-1)
        return self._heads(k_BSW), self._heads(v_BSW)

    def read(self, h_BND: Tensor, keys: KeysValues) -> Tensor:
        """What the positions read, (B, N, D)."""
        q_BHNK = self._heads(self.read_query(self.norm_positions(h_BND)))
        y_BHNK = F.scaled_dot_product_attention(
            q_BHNK, keys[0].to(q_BHNK.dtype), keys[1].to(q_BHNK.dtype), attn_mask=self._score_bias(q_BHNK.dtype)
        )
        return self.read_out(y_BHNK.transpose(1, 2).flatten(2))

    def read_shares(self, h_BND: Tensor, keys: KeysValues) -> Tensor:
        """Attention of each position to each slot, mean over heads, (B, N, S)."""
        scores_BHNS = self._heads(self.read_query(self.norm_positions(h_BND))) @ keys[0].mT
        scores_BHNS = scores_BHNS * keys[0].shape[-1] ** -0.5
        bias = self._score_bias(scores_BHNS.dtype)
        return (scores_BHNS if bias is None else scores_BHNS + bias).softmax(-1).mean(1)

    def material(self, h_BND: Tensor) -> Tensor:
        """Keys and values that a write takes from positions, side by side (B, N, 2W)."""
        return self.write_kv(self.norm_written(h_BND))

    def write(
        self, memory_BSD: Tensor, materials_BNW: Sequence[Tensor], monitor: "MemoryMonitor | None" = None
    ) -> Tensor:
        """The memory after a complete segment: one gated write per iteration, (B, S, D)."""
        bias_SD = self.per_slot(list(self.gate_biases))
        for material_BNW in materials_BNW:
            k_BNW, v_BNW = material_BNW.chunk(2, dim=-1)
            q_BHSK = self._heads(self.write_query(self.norm_slots(memory_BSD)))
            a_BHSK = F.scaled_dot_product_attention(
                q_BHSK, self._heads(k_BNW).to(q_BHSK.dtype), self._heads(v_BNW).to(q_BHSK.dtype)
            )
            a_BSW = a_BHSK.transpose(1, 2).flatten(2)
            logits_BSD = self.gate(torch.cat([memory_BSD, a_BSW.to(memory_BSD.dtype)], dim=-1))
            gate_BSD = torch.sigmoid(logits_BSD.to(memory_BSD.dtype) + bias_SD)
            new_BSD = self.dropout(self.candidate(a_BSW)).to(memory_BSD.dtype)
            if monitor is not None:
                monitor.add_gate(gate_BSD)
            memory_BSD = torch.lerp(memory_BSD, new_BSD, gate_BSD)
        if monitor is not None:
            monitor.add_memory(memory_BSD)
        return memory_BSD

    def flops(self, length: int, segment: int, iterations: int, group: int | None = None) -> tuple[float, float]:
        """FLOPs of a sequence of `length` tokens: of products with weights, and of attention.

        group: segments that a gradient flows through, in training; None: the forward pass alone.
        """
        D, W, S = self.start.shape[1], self.width, len(self.start)
        segments = math.ceil(length / segment)
        writes = segments - 1  # the last segment is written for later tokens only
        read, write, keys = 1.0, float(writes), float(segments)
        if group is not None:
            without_gradient = math.ceil(segments / group) - 1
            read, write, keys = 3 * read, 3.0 * (writes - without_gradient) + without_gradient, 3 * keys
        products = read * iterations * length * 2 * D * W + keys * S * 2 * D * W
        products += write * iterations * (segment * 2 * D * W + S * (2 * D * W + (D + W) * D))
        attention = read * iterations * length * 2 * S * W + write * iterations * 2 * S * segment * W
        return 2.0 * products, 2.0 * attention


@dataclass
class MemoryMonitor:
    """Means over the writes of a training step: root mean square of the slots and openness of the gates, by level; and
    the gradients that arrived at every iteration."""

    slots: tuple[int, ...]
    gates: list[Tensor] = field(default_factory=list)
    sizes: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def _by_level(self, x_BSD: Tensor) -> Tensor:
        return torch.stack([level.mean() for level in x_BSD.detach().float().split(self.slots, dim=1)])

    def add_gate(self, gate_BSD: Tensor) -> None:
        """Openness of a write's gates."""
        self.gates.append(self._by_level(gate_BSD))

    def add_memory(self, memory_BSD: Tensor) -> None:
        """The memory after a segment."""
        self.sizes.append(self._by_level(memory_BSD.detach().float().square()).sqrt())

    def watch(self, iteration: int, h_BND: Tensor) -> None:
        """Sum the squares of the gradient that arrives at the state after an iteration."""
        if not h_BND.requires_grad:
            return

        def add(gradient: Tensor) -> None:
            square = gradient.detach().float().square().sum()
            self.gradients[iteration] = self.gradients[iteration] + square if iteration in self.gradients else square

        h_BND.register_hook(add)

    def values(self) -> dict[str, dict[str, float]]:
        """By level or iteration, counted from 1; what was not seen is left out."""
        found = {"memory_gate": self.gates, "memory_rms": self.sizes}
        values = {name: _numbered(torch.stack(seen).mean(0).tolist()) for name, seen in found.items() if seen}
        if self.gradients:
            norms = {str(i): float(square.sqrt()) for i, square in sorted(self.gradients.items())}
            values["iteration_gradient_norm"] = norms
        return values


def _numbered(numbers: list[float]) -> dict[str, float]:
    return {str(i): number for i, number in enumerate(numbers, start=1)}


class MemoryState(KVCache):
    """All that a memory model keeps of the text so far; a constant number of bytes, however long the text is.

    memory_BSD: the memory after `written_B` segments; keys and values of the tokens behind these in one slot per
    iteration, like those of any cache, for positions 0 to C − 1 of a segment and one more that padding is written to;
    materials: what the writes of each iteration will need, (B, P, 2W) each; lengths_B: tokens read since the beginning.
    A complete segment is written when something follows it. One segment back is kept too, so that the state can be
    rewound (`crop`) to where that one began.
    """

    def __init__(
        self,
        n_slots: int,
        n_kv_heads: int,
        segment: int,
        head_dim: int,
        memory_BSD: Tensor,
        material_width: int,
        dtype: torch.dtype,
    ) -> None:
        B, device = len(memory_BSD), memory_BSD.device
        super().__init__(n_slots, B, n_kv_heads, segment + 1, head_dim, dtype, device)
        self.segment = segment
        self.materials = [torch.zeros(B, segment + 1, material_width, dtype=dtype, device=device) for _ in self.keys]
        self.memory_BSD = memory_BSD.detach().clone()
        self.written_B = torch.zeros(B, dtype=torch.long)
        self.read_keys: KeysValues | None = None  # of memory_BSD, made when they are needed
        self.held_S: Tensor | None = None  # slots that stay as they are: of studies, what is not to be carried on
        self.monitor: MemoryMonitor | None = None  # of studies: sees every write
        self.shares: list[Tensor] | None = None  # of studies: attention of every read to the slots, (S,)
        self._before = [torch.zeros_like(tensor) for tensor in self._contents()]
        self._can_return_B = torch.zeros(B, dtype=torch.bool)

    def _contents(self) -> list[Tensor]:
        """All tensors with a row of the batch in each row."""
        return [*self.keys, *self.values, *self.materials, self.memory_BSD]

    def _replace(self, contents: Sequence[Tensor]) -> None:
        n = self.n_slots
        self.keys, self.values = list(contents[:n]), list(contents[n : 2 * n])
        self.materials, self.memory_BSD = list(contents[2 * n : 3 * n]), contents[3 * n]
        self.read_keys = None

    @property
    def offsets_B(self) -> Tensor:
        """Tokens of each row that are not in its memory: of its unfinished segment, or of one that is complete."""
        return self.lengths_B - self.segment * self.written_B

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in [*self._contents(), *self._before])

    def reserve(self, n_new: int) -> Tensor:
        """Positions (B, L) in the whole text at which the next tokens of each row stand; there is always room."""
        return self.lengths_B[:, None] + torch.arange(n_new)

    def put(self, iteration: int, place: Placement, material_BNW: Tensor) -> None:
        """Keep what the writes of an iteration will take from these positions."""
        kept = self.materials[iteration]
        material_BNW = material_BNW.detach().to(kept.dtype)
        if place.index_L is not None:
            kept.index_copy_(1, place.index_L, material_BNW)
        else:
            assert place.rows_B1 is not None
            kept[place.rows_B1, place.index_BL] = material_BNW

    def carry(self, positions_BL: Tensor, first_slot: int, stride: int, steps_BL: Tensor) -> None:
        """See KVCache.carry; the same for what is going to be written: that of a stopped position is its last."""
        super().carry(positions_BL, first_slot, stride, steps_BL)
        for row, (positions, steps) in enumerate(zip(positions_BL.tolist(), steps_BL.tolist(), strict=True)):
            for done in set(steps):
                places = [position for position, step in zip(positions, steps, strict=True) if step == done]
                for slot in range(done, self.n_slots):
                    self.materials[slot][row, places] = self.materials[done - 1][row, places]

    def complete(self, rows_R: Tensor, memory_RSD: Tensor) -> None:
        """The memory of these rows after the segment they have finished; the next one begins."""
        there = rows_R.to(self.memory_BSD.device)
        if self.held_S is not None:
            memory_RSD = torch.where(self.held_S[:, None], self.memory_BSD[there], memory_RSD)
        for kept, tensor in zip(self._before, self._contents(), strict=True):
            kept.index_copy_(0, there, tensor.detach().index_select(0, there))
        self.memory_BSD.index_copy_(0, there, memory_RSD.detach().to(self.memory_BSD.dtype))
        self.written_B[rows_R] += 1
        self._can_return_B[rows_R] = True
        self.read_keys = None

    def crop(self, lengths_B: Tensor | int) -> None:
        """Forget what stands behind these lengths; rows that are shorter stay as they are.

        Raises: UserError for a row that would have to go back further than to the beginning of the last segment that
        was written: what an older memory was is not known any more.
        """
        new_B = torch.minimum(self.lengths_B, torch.as_tensor(lengths_B, dtype=torch.long))
        begin_B = self.segment * self.written_B
        back_B = new_B < begin_B
        lost_B = back_B & ((new_B < begin_B - self.segment) | ~self._can_return_B)
        if lost_B.any():
            row = int(lost_B.nonzero()[0])
            raise UserError(
                f"row {row} cannot go back from {int(self.lengths_B[row])} to {int(new_B[row])} tokens: a memory keeps "
                f"one finished segment of {self.segment} tokens; feed the text again into a new cache"
            )
        if back_B.any():
            rows_R = back_B.nonzero()[:, 0]
            there = rows_R.to(self.memory_BSD.device)
            for kept, tensor in zip(self._before, self._contents(), strict=True):
                tensor.index_copy_(0, there, kept.index_select(0, there))
            self.written_B[rows_R] -= 1
            self._can_return_B[rows_R] = False
            self.read_keys = None
        self.lengths_B = new_B

    def select(self, rows: list[int] | Tensor) -> None:
        """Keep only these rows, in this order."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        there = rows.to(self.memory_BSD.device)
        self._before = [tensor.index_select(0, there) for tensor in self._before]
        self._replace([tensor.index_select(0, there) for tensor in self._contents()])
        self.lengths_B, self.written_B = self.lengths_B[rows], self.written_B[rows]
        self._can_return_B = self._can_return_B[rows]

    def copy(self) -> "MemoryState":
        """A state of its own with the same contents, outside any graph."""
        new = copy.copy(self)
        new._replace([tensor.detach().clone() for tensor in self._contents()])
        new._before = [tensor.detach().clone() for tensor in self._before]
        for name in ("lengths_B", "written_B", "_can_return_B"):
            setattr(new, name, getattr(self, name).clone())
        return new

    def tensors(self) -> dict[str, Tensor]:
        """What has to be saved to go on from here (rewinding behind this point is not possible then)."""
        stacks = {"keys": self.keys, "values": self.values, "materials": self.materials}
        stacked = {name: torch.stack(tensors).detach() for name, tensors in stacks.items()}
        counts = {"lengths": self.lengths_B.clone(), "written": self.written_B.clone()}
        return {**stacked, "memory": self.memory_BSD.detach().clone(), **counts}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave. Raises: UserError if it is not that of such a state."""
        own = self.tensors()
        problems = [f"unknown {name}" for name in sorted(tensors.keys() - own.keys())]
        for name, tensor in own.items():
            if name not in tensors:
                problems.append(f"missing {name}")
            elif tensors[name].shape != tensor.shape or tensors[name].dtype != tensor.dtype:
                found = f"{tuple(tensors[name].shape)} {tensors[name].dtype}"
                problems.append(f"{name} is {found} where {tuple(tensor.shape)} {tensor.dtype} is needed")
            elif not torch.isfinite(tensors[name]).all() or (
                name in ("lengths", "written") and tensors[name].min() < 0
            ):
                problems.append(f"{name} holds impossible values")
        if not problems:
            offsets_B = tensors["lengths"] - self.segment * tensors["written"]
            if bool(((offsets_B < 0) | (offsets_B > self.segment)).any()):
                problems.append("lengths and written contradict each other")
        if problems:
            raise UserError("; ".join(problems))
        device = self.memory_BSD.device
        moved = [tensors[name].to(device) for name in ("keys", "values", "materials")]
        self._replace([*(slot.clone() for stack in moved for slot in stack), tensors["memory"].to(device, copy=True)])
        self.lengths_B, self.written_B = tensors["lengths"].cpu().clone(), tensors["written"].cpu().clone()
        self._can_return_B = torch.zeros_like(self._can_return_B)
