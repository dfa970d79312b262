"""The equations of the models once more, with explicit matrices in float64, to compare with.

Written from the description of the models, without the library: weights come in as a dictionary of tensors.
Complex numbers turn the queries and keys, a loop goes over the heads, softmax and logarithm are spelled out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Weights = dict[str, Tensor]
EPS = 1e-5


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """x over its root mean square."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + EPS) * gain


def turned(x_LK: Tensor) -> Tensor:
    """Channel i and channel i + K/2 are one complex number, turned by position · 10000^(−2i/K)."""
    half = x_LK.shape[-1] // 2
    angle = torch.arange(x_LK.shape[0])[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x_LK[:, :half], x_LK[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


def attention(x_LD: Tensor, w: Weights, at: str, heads: int, kv_heads: int) -> Tensor:
    """Causal self-attention of one row."""
    width = x_LD.shape[-1]
    size = width // heads
    wq, wk, wv = (w[f"{at}qkv.weight"]).split([heads * size, kv_heads * size, kv_heads * size])
    results = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        q = turned(x_LD @ wq[head * size : (head + 1) * size].T)
        k = turned(x_LD @ wk[group * size : (group + 1) * size].T)
        v = x_LD @ wv[group * size : (group + 1) * size].T
        scores = torch.exp(q @ k.T / size**0.5).tril()
        results.append(scores / scores.sum(dim=-1, keepdim=True) @ v)
    return torch.cat(results, dim=-1) @ w[f"{at}out.weight"].T


def block(x_LD: Tensor, w: Weights, at: str, heads: int, kv_heads: int) -> Tensor:
    """Pre-norm block with SwiGLU."""
    x_LD = x_LD + attention(rms_norm(x_LD, w[f"{at}norm_attention.weight"]), w, f"{at}attention.", heads, kv_heads)
    normed = rms_norm(x_LD, w[f"{at}norm_mlp.weight"])
    gate, up = (normed @ w[f"{at}mlp.gate_up.weight"].T).chunk(2, dim=-1)
    return x_LD + (gate / (1 + torch.exp(-gate)) * up) @ w[f"{at}mlp.down.weight"].T


def cell(
    state: Tensor, context: Tensor, inputs: list[Tensor], w: Weights, at: str, heads: int, gate: str = "gru"
) -> Tensor:
    """One step of two-speed recurrence: state ← g ⊙ state + (1 − g) ⊙ u."""
    width = state.shape[-1]
    reset, keep = torch.ones_like(state), torch.zeros_like(state)
    if gate != "none":
        logits = torch.cat([state, context], dim=-1) @ w[f"{at}gate.weight"].T + w[f"{at}gate.bias"]
        gates = 1 / (1 + torch.exp(-logits))
        keep = gates[:, -width:]
        reset = gates[:, :width] if gate == "gru" else reset
    mixed = torch.cat([reset * state, *inputs], dim=-1) @ w[f"{at}mix.weight"].T
    candidate = rms_norm(block(mixed, w, f"{at}block.", heads, heads), w[f"{at}norm.weight"])
    return keep * state + (1 - keep) * candidate


def two_speed_logits(
    tokens_L: Tensor,
    w: Weights,
    heads: int,
    n: int,
    t: int,
    k: int | None = None,
    gate: str = "gru",
    readout: str = "sum",
) -> Tensor:
    """Logits (L, V) of one row: n cycles of t fast steps and a slow one; gradients only through the last k fast steps
    (None: all) and the slow steps that end a cycle c with c·t > n·t − k."""
    total = n * t
    k = total if k is None else k
    embedding = w["embedding.weight"]
    x = block(embedding[tokens_L], w, "input_block.", heads, heads)
    fast = w["fast_prototype"] + torch.zeros_like(x)
    slow = w["slow_prototype"] + torch.zeros_like(x)
    for m in range(1, total + 1):
        fast = cell(fast, slow + x, [slow, x], w, "fast.", heads, gate)
        if m <= total - k:
            fast = fast.detach()
        if m % t == 0:
            slow = cell(slow, fast, [fast], w, "slow.", heads, gate)
            if m <= total - k:
                slow = slow.detach()
    state = {"sum": fast + slow, "slow": slow, "fast": fast}[readout]
    return rms_norm(state, w["norm.weight"]) @ embedding.T


def stacked_logits(
    tokens_L: Tensor, w: Weights, heads: int, kv_heads: int, places: list[str], before: Callable[..., Tensor]
) -> Tensor:
    """Logits (L, V) of one row: the blocks at `places`, one after the other. before(h, embedded, index): input."""
    embedding = w["embedding.weight"]
    h = embedding[tokens_L]
    for index, place in enumerate(places):
        h = block(before(h, embedding[tokens_L], index), w, place, heads, kv_heads)
    return rms_norm(h, w["norm.weight"]) @ embedding.T


def cross_entropy_sum(logits_LV: Tensor, targets_L: Tensor) -> Tensor:
    """Nats of all targets together."""
    log_sum = torch.log(torch.exp(logits_LV).sum(dim=-1))
    return (log_sum - logits_LV[torch.arange(len(targets_L)), targets_L]).sum()
