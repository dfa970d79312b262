"""The transformer block of the house, the only attention in it, and what a forward call shares between blocks.

Shapes: B rows, L new positions, P all positions up to the last new one, D width, H heads, K head size, F hidden size.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hrmlm.models.cache import KVCache, Placement

if TYPE_CHECKING:
    from hrmlm.models.halting import ExitRule


States = tuple[Tensor, ...]
"""What a model carries from one cycle of its depth to the next, each (B, L, D)."""


@dataclass(frozen=True)
class Application:
    """One call of a module in the unrolled schedule.

    name: for people, such as "fast 2.1"; module: attribute of the model that is called; slot: its key/value slot;
    in_window: whether training lets gradients flow through it; supervision_pass: counted from 0.
    """

    name: str
    module: str
    slot: int
    in_window: bool = True
    supervision_pass: int = 0


@dataclass(frozen=True)
class ApplicationStats:
    """What one application did, each (B, L): gate = share of the old state that was kept (None without a gate),
    rms = root mean square of the new state, change = norm of (new − old) divided by norm of old; rms and change are 0
    where the position had stopped."""

    name: str
    rms_BL: Tensor
    change_BL: Tensor
    gate_BL: Tensor | None


class KeyHistory:
    """Keys and values of stopped positions: at later outer steps they are those of the last step executed.

    So what other positions see of a stopped one does not depend on whether it is computed again. Reading twice what
    belongs to a slot gives the same twice: an application may be computed again for its gradients.
    """

    def __init__(self, stride: int) -> None:
        self.stride = stride  # slots per outer step
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def mix(self, slot: int, k_BHLK: Tensor, v_BHLK: Tensor, running_BL: Tensor | None) -> tuple[Tensor, Tensor]:
        """New keys and values of running positions (None: all of them), kept ones of stopped positions."""
        if running_BL is not None:
            running_B1L1 = running_BL[:, None, :, None]
            old_k, old_v = self._kept[slot - self.stride]
            k_BHLK, v_BHLK = torch.where(running_B1L1, k_BHLK, old_k), torch.where(running_B1L1, v_BHLK, old_v)
            if not torch.is_grad_enabled():
                del self._kept[slot - self.stride]
        self._kept[slot] = (k_BHLK, v_BHLK)
        return k_BHLK, v_BHLK


@dataclass
class ForwardCall:
    """What one forward call shares between all its applications: positions, mask, cache, window, statistics."""

    cos_B1LK: Tensor
    sin_B1LK: Tensor
    place: Placement
    mask_B1LP: Tensor | None  # None: plain causal attention
    is_causal: bool
    lengths_B: Tensor | None = None  # how many of the new tokens of each row are real; None: all
    is_rotary: bool = True
    cache: KVCache | None = None
    truncate_gradient: bool = False
    checkpoint_activations: bool = False  # see `run`
    backward_per_pass: bool = False  # the graph of a supervision pass is gone when the next one begins
    stats: list[ApplicationStats] | None = field(default=None)
    depth: int | None = None  # outer steps that were asked for; None: as trained, learned halting included
    halt_threshold: float | None = None  # sum of halting probabilities that stops a position; None: as trained
    exit: "ExitRule | None" = None  # decides when positions stop; None: as trained
    rows: Tensor | None = None  # which rows of the cache this call works on; None: all
    cycles: int = 0  # cycles of one pass: `depth`, or as trained
    history: KeyHistory | None = None
    running_BL: Tensor | None = None  # positions that have not stopped; None: all
    schedule: list[Application] = field(default_factory=list)
    minimum_steps: int = 1  # of learned halting, in an exploring training batch
    steps_BL: Tensor | None = None  # result: outer steps executed
    step_cost_BL: Tensor | None = None  # result: steps + remainder, differentiable
    q_B2: Tensor | None = None  # result: last halting logits of whole sequences
    early_cycle: int = 0  # in training: read out after so many cycles too; 0: no
    early_cut: bool = False  # the states lose their graph there
    early_BLD: Tensor | None = None  # result: readout state of that cycle, before the final norm

    @property
    def positions_BL(self) -> Tensor:
        """Where the new tokens stand, on the CPU."""
        return self.place.positions_BL

    def of_rows(self, rows: Tensor) -> "ForwardCall":
        """The call restricted to some rows: of batches in which only these go on."""

        def pick(table: Tensor) -> Tensor:
            return table if table.shape[0] == 1 else table[rows.to(table.device)]

        place = Placement.of(self.positions_BL[rows], self.cos_B1LK.device, rows)
        return replace(
            self,
            cos_B1LK=pick(self.cos_B1LK),
            sin_B1LK=pick(self.sin_B1LK),
            mask_B1LP=None if self.mask_B1LP is None else pick(self.mask_B1LP)[..., : place.end],
            place=place,
            rows=rows,
        )

    def application(self, application: Application) -> AbstractContextManager[object]:
        """Switches gradients off while an application outside the gradient window runs."""
        return torch.no_grad() if self.truncate_gradient and not application.in_window else nullcontext()

    def run(self, module: Callable[..., Any], *inputs: Any, slot: int) -> Any:
        """One application: module(*inputs, call, slot).

        With `checkpoint_activations` only the inputs are kept, and it is computed again in the backward pass, with the
        same dropout (Chen et al. 2016). It then meets the call as it is now: a copy, as the next step changes it.
        """
        if not (self.checkpoint_activations and torch.is_grad_enabled()):
            return module(*inputs, self, slot)
        return checkpoint(module, *inputs, copy(self), slot, use_reentrant=False)

    def record(
        self, application: Application, old_BLD: Tensor, new_BLD: Tensor, gate_BLD: Tensor | None = None
    ) -> None:
        """Keep the statistics of an application where they were asked for."""
        if self.stats is None:
            return
        with torch.no_grad():
            old, new = old_BLD.float(), new_BLD.float()
            change_BL = (new - old).norm(dim=-1) / old.norm(dim=-1).clamp_min(1e-12)
            rms_BL = new.square().mean(-1).sqrt()
            if self.running_BL is not None:
                rms_BL, change_BL = rms_BL * self.running_BL, change_BL * self.running_BL
            gate_BL = None if gate_BLD is None else gate_BLD.float().mean(-1)
            self.stats.append(ApplicationStats(application.name, rms_BL, change_BL, gate_BL))

    def record_at(self, slot: int, old_BLD: Tensor, new_BLD: Tensor) -> None:
        """`record` for the application that owns a slot."""
        if self.stats is not None:
            self.record(next(a for a in self.schedule if a.slot == slot), old_BLD, new_BLD)

    def record_skipped(self, slots: range) -> None:
        """Zeros for applications that no position executed, so that there is always one record per application."""
        if self.stats is not None and slots:
            nothing_BL = torch.zeros_like(self.stats[-1].rms_BL)
            skipped = [a.name for a in self.schedule if a.slot in slots]
            self.stats += [ApplicationStats(name, nothing_BL, nothing_BL, None) for name in skipped]


def prepare_call(
    batch_size: int, length: int, head_dim: int, theta: float, device: torch.device, cache: KVCache | None
) -> ForwardCall:
    """Positions, rotation tables and mask for `length` new tokens in each of `batch_size` rows."""
    if cache is None:
        place = Placement(torch.arange(length).expand(batch_size, length), length)
    else:
        place = Placement.of(cache.reserve(length), device)
    return call_at(place, head_dim, theta, device, cache)


def call_at(place: Placement, head_dim: int, theta: float, device: torch.device, cache: KVCache | None) -> ForwardCall:
    """`prepare_call` for new tokens that stand at given places; without a cache at 0, 1, 2, …"""
    length = place.positions_BL.shape[1]
    if cache is None:
        positions_BL = place.positions_BL[:1]
        mask_B1LP, is_causal = None, True
    else:
        start, is_uniform = place.end - length, place.index_L is not None
        is_causal = is_uniform and start == 0
        positions_BL = place.positions_BL[:1] if is_uniform else place.positions_BL
        if is_causal or (is_uniform and length == 1):
            mask_B1LP = None  # a single new token sees everything that is stored
        else:
            mask_B1LP = (torch.arange(place.end) <= positions_BL[:, :, None])[:, None].to(device)
    longest = length if cache is None else cache.max_length
    cos_PK, sin_PK = rotary_tables(1 << (longest - 1).bit_length(), head_dim, theta, str(device))
    index_BL = positions_BL.to(device)
    return ForwardCall(
        cos_B1LK=cos_PK[index_BL][:, None],
        sin_B1LK=sin_PK[index_BL][:, None],
        place=place,
        mask_B1LP=mask_B1LP,
        is_causal=is_causal,
        cache=cache,
    )


@lru_cache(maxsize=16)
def rotary_tables(length: int, head_dim: int, theta: float, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines (P, K) of rotary positions (Su et al. 2021) in the rotate-half layout; kept for the next call.

    The first half of the sines is negative: that is the sign with which the second half of a head enters the first.
    """
    frequencies_K = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles_PK = torch.arange(length, dtype=torch.float64)[:, None] * frequencies_K
    sin_PK = torch.cat([-angles_PK.sin(), angles_PK.sin()], dim=-1)
    return torch.cat([angles_PK, angles_PK], dim=-1).cos().float().to(device), sin_PK.float().to(device)


def rotate(x_BHLK: Tensor, call: ForwardCall) -> Tensor:
    """Turn queries or keys by their positions (rotate-half layout)."""
    if not call.is_rotary:
        return x_BHLK
    first, second = x_BHLK.chunk(2, dim=-1)
    turned = torch.addcmul(x_BHLK * call.cos_B1LK, torch.cat([second, first], dim=-1), call.sin_B1LK)
    return turned.to(x_BHLK.dtype)


def embedding(rows: int, width: int) -> nn.Embedding:
    """A table with a row per id. Where there are only shapes nothing is drawn: that would import the compiler."""
    weight_RD = torch.empty(rows, width)
    return nn.Embedding.from_pretrained(weight_RD, freeze=False) if weight_RD.is_meta else nn.Embedding(rows, width)


class Linear(nn.Linear):
    """A linear layer whose weights can be stood in for by a packed copy of them, for decoding.

    packed: the weights in the layout that oneDNN chose for a few rows at a time; set and taken back by
    `hrmlm.inference.packing`, never saved, copied or trained. packed_version: of the weights when they were packed.
    """

    packed: Tensor | None = None
    packed_version = -1

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        if self.packed is None or not reads_packed(x, self.weight):
            return F.linear(x, self.weight, self.bias)
        return packed_linear(x, self.packed, self.bias)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "packed"}


def reads_packed(x: Tensor, weight: Tensor) -> bool:
    """Whether a product may read packed weights: without gradients and autocast, in the precision they have."""
    return x.dtype == weight.dtype and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """(…, in) → (…, out) with weights that oneDNN packed."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


class Attention(nn.Module):
    """Causal self-attention with rotary positions and optional grouped key/value heads (Ainslie et al. 2023)."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, d_model // n_heads
        self.dropout = dropout
        self.qkv = Linear(d_model, (n_heads + 2 * n_kv_heads) * self.head_dim, bias=False)
        self.out = Linear(d_model, d_model, bias=False)

    def forward(self, x_BLD: Tensor, call: ForwardCall, slot: int) -> Tensor:
        """(B, L, D) → (B, L, D). Keys and values go to `slot` of the call's cache, if it has one."""
        B, L, D = x_BLD.shape
        heads_BHLK = self.qkv(x_BLD).view(B, L, -1, self.head_dim).transpose(1, 2)
        turned_BHLK, v_BHPK = heads_BHLK.split([self.n_heads + self.n_kv_heads, self.n_kv_heads], dim=1)
        q_BHLK, k_BHPK = rotate(turned_BHLK, call).split([self.n_heads, self.n_kv_heads], dim=1)
        if call.history is not None:
            k_BHPK, v_BHPK = call.history.mix(slot, k_BHPK, v_BHPK, call.running_BL)
        if call.cache is not None:
            k_BHPK, v_BHPK = call.cache.append(slot, call.place, k_BHPK, v_BHPK)
        y_BHLK = F.scaled_dot_product_attention(
            q_BHLK,
            k_BHPK.to(q_BHLK.dtype),
            v_BHPK.to(q_BHLK.dtype),
            attn_mask=call.mask_B1LP,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=call.is_causal,
            enable_gqa=self.n_kv_heads != self.n_heads,
        )
        return self.out(y_BHLK.transpose(1, 2).reshape(B, L, D))


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer 2020): down(silu(gate(x)) ⊙ up(x)), gate and up stored as one matrix."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = Linear(d_model, 2 * hidden, bias=False)
        self.down = Linear(hidden, d_model, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) → (B, L, D)."""
        gate_BLF, up_BLF = self.gate_up(x_BLD).chunk(2, dim=-1)
        return self.down(F.silu(gate_BLF) * up_BLF)


class GeluMLP(nn.Module):
    """Plain feed-forward layer: down(gelu(up(x)))."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(d_model, hidden, bias=False)
        self.down = Linear(hidden, d_model, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) → (B, L, D)."""
        return self.down(F.gelu(self.up(x_BLD)))


class Block(nn.Module):
    """Pre-norm transformer block: x + Attn(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)); 16·D² weights at its defaults."""

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int, hidden: int, norm_eps: float, dropout: float
    ) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(d_model, eps=norm_eps)
        self.attention = Attention(d_model, n_heads, n_kv_heads, dropout)
        self.norm_mlp = nn.RMSNorm(d_model, eps=norm_eps)
        self.mlp: nn.Module = SwiGLU(d_model, hidden)
        self.dropout = dropout

    def forward(self, x_BLD: Tensor, call: ForwardCall, slot: int) -> Tensor:
        """(B, L, D) → (B, L, D)."""
        x_BLD = x_BLD + self.drop(self.attention(self.norm_attention(x_BLD), call, slot))
        return x_BLD + self.drop(self.mlp(self.norm_mlp(x_BLD)))

    def drop(self, x_BLD: Tensor) -> Tensor:
        """Dropout, in training."""
        return F.dropout(x_BLD, self.dropout) if self.training and self.dropout else x_BLD
