"""The transformer block of the house, the only attention in it, and what a forward call shares between blocks.

Shapes: B rows, L new positions, P all positions up to the last new one, D width, H heads, K head size, F hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hrmlm.models.cache import KVCache


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

    So what other positions see of a stopped one does not depend on whether it is computed again.
    """

    def __init__(self, stride: int) -> None:
        self.stride = stride  # slots per outer step
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def mix(self, slot: int, k_BHLK: Tensor, v_BHLK: Tensor, running_BL: Tensor | None) -> tuple[Tensor, Tensor]:
        """New keys and values of running positions (None: all of them), kept ones of stopped positions."""
        place = slot % self.stride
        if running_BL is not None:
            running_B1L1 = running_BL[:, None, :, None]
            old_k, old_v = self._kept[place]
            k_BHLK, v_BHLK = torch.where(running_B1L1, k_BHLK, old_k), torch.where(running_B1L1, v_BHLK, old_v)
        self._kept[place] = (k_BHLK, v_BHLK)
        return k_BHLK, v_BHLK


@dataclass
class ForwardCall:
    """What one forward call shares between all its applications: positions, mask, cache, window, statistics."""

    cos_BLK: Tensor
    sin_BLK: Tensor
    positions_BL: Tensor
    mask_B1LP: Tensor | None  # None: plain causal attention
    is_causal: bool
    lengths_B: Tensor | None = None  # how many of the new tokens of each row are real; None: all
    is_rotary: bool = True
    cache: KVCache | None = None
    truncate_gradient: bool = False
    backward_per_pass: bool = False  # the graph of a supervision pass is gone when the next one begins
    stats: list[ApplicationStats] | None = field(default=None)
    depth: int | None = None  # outer steps that were asked for; None: as trained, learned halting included
    halt_threshold: float | None = None  # sum of halting probabilities that stops a position; None: as trained
    rows: Tensor | None = None  # which rows of the cache this call works on; None: all
    history: KeyHistory | None = None
    running_BL: Tensor | None = None  # positions that have not stopped; None: all
    schedule: list[Application] = field(default_factory=list)
    minimum_steps: int = 1  # of learned halting, in an exploring training batch
    steps_BL: Tensor | None = None  # result: outer steps executed
    step_cost_BL: Tensor | None = None  # result: steps + remainder, differentiable
    q_B2: Tensor | None = None  # result: last halting logits of whole sequences

    def pick(self, x_BLD: Tensor) -> Tensor:
        """The rows of a tensor of the whole batch that this call works on."""
        return x_BLD if self.rows is None else x_BLD[self.rows.to(x_BLD.device)]

    def of_rows(self, rows: Tensor) -> "ForwardCall":
        """The call restricted to some rows: of batches in which only these go on."""

        def pick(table: Tensor) -> Tensor:
            return table if table.shape[0] == 1 else table[rows.to(table.device)]

        last = int(self.positions_BL[rows].max())
        return replace(
            self,
            cos_BLK=pick(self.cos_BLK),
            sin_BLK=pick(self.sin_BLK),
            mask_B1LP=None if self.mask_B1LP is None else pick(self.mask_B1LP)[..., : last + 1],
            positions_BL=self.positions_BL[rows],
            rows=rows,
        )

    @contextmanager
    def application(self, application: Application) -> Iterator[None]:
        """Switches gradients off while an application outside the gradient window runs."""
        outside = self.truncate_gradient and not application.in_window
        with torch.set_grad_enabled(torch.is_grad_enabled() and not outside):
            yield

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
    """Positions, rotation tables and mask for `length` new tokens in each of `batch_size` rows.

    Rotary tables follow Su et al. 2021 in the rotate-half layout; they are computed per call, which costs nothing
    beside the blocks and leaves no buffers behind.
    """
    if cache is None:
        positions_BL = torch.arange(length)[None]
        mask_B1LP, is_causal = None, True
    else:
        positions_BL = cache.reserve(length)
        start, is_uniform = int(positions_BL.min()), bool((positions_BL[:, 0] == positions_BL[0, 0]).all())
        is_causal = is_uniform and start == 0
        if is_causal or (is_uniform and length == 1):
            mask_B1LP = None  # a single new token sees everything that is stored
        else:
            all_P = torch.arange(int(positions_BL.max()) + 1)
            mask_B1LP = (all_P <= positions_BL[:, :, None])[:, None].to(device)
    frequencies_K = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles_BLK = positions_BL[..., None].double() * frequencies_K
    angles_BLK = torch.cat([angles_BLK, angles_BLK], dim=-1)[:, None]
    return ForwardCall(
        cos_BLK=angles_BLK.cos().float().to(device),
        sin_BLK=angles_BLK.sin().float().to(device),
        positions_BL=positions_BL.expand(batch_size, length),
        mask_B1LP=mask_B1LP,
        is_causal=is_causal,
        cache=cache,
    )


def rotate(x_BHLK: Tensor, call: ForwardCall) -> Tensor:
    """Turn queries or keys by their positions (rotate-half layout)."""
    if not call.is_rotary:
        return x_BHLK
    first, second = x_BHLK.chunk(2, dim=-1)
    turned = x_BHLK * call.cos_BLK + torch.cat([-second, first], dim=-1) * call.sin_BLK
    return turned.to(x_BHLK.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and optional grouped key/value heads (Ainslie et al. 2023)."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, d_model // n_heads
        self.dropout = dropout
        self.qkv = nn.Linear(d_model, (n_heads + 2 * n_kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x_BLD: Tensor, call: ForwardCall, slot: int) -> Tensor:
        """(B, L, D) → (B, L, D). Keys and values go to `slot` of the call's cache, if it has one."""
        B, L, D = x_BLD.shape
        heads_BHLK = self.qkv(x_BLD).view(B, L, -1, self.head_dim).transpose(1, 2)
        turned_BHLK, v_BHPK = heads_BHLK.split([self.n_heads + self.n_kv_heads, self.n_kv_heads], dim=1)
        q_BHLK, k_BHPK = rotate(turned_BHLK, call).split([self.n_heads, self.n_kv_heads], dim=1)
        if call.history is not None:
            k_BHPK, v_BHPK = call.history.mix(slot, k_BHPK, v_BHPK, call.running_BL)
        if call.cache is not None:
            k_BHPK, v_BHPK = call.cache.append(slot, call.positions_BL, k_BHPK, v_BHPK, call.rows)
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
        self.gate_up = nn.Linear(d_model, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) → (B, L, D)."""
        gate_BLF, up_BLF = self.gate_up(x_BLD).chunk(2, dim=-1)
        return self.down(F.silu(gate_BLF) * up_BLF)


class GeluMLP(nn.Module):
    """Plain feed-forward layer: down(gelu(up(x)))."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)

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
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BLD: Tensor, call: ForwardCall, slot: int) -> Tensor:
        """(B, L, D) → (B, L, D)."""
        x_BLD = x_BLD + self.dropout(self.attention(self.norm_attention(x_BLD), call, slot))
        return x_BLD + self.dropout(self.mlp(self.norm_mlp(x_BLD)))
