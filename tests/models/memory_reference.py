"""A model with a memory once more in float64: row by row, segment by segment, slot by slot, head by head."""

import torch
from torch import Tensor

from tests.models.reference import Weights, attention, rms_norm


def _attend(q_NW: Tensor, k_MW: Tensor, v_MW: Tensor, heads: int, bias_HM: Tensor | None = None) -> Tensor:
    size = q_NW.shape[-1] // heads
    parts = []
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        scores = q_NW[:, own] @ k_MW[:, own].T / size**0.5
        if bias_HM is not None:
            scores = scores + bias_HM[head]
        weight = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
        parts.append(weight / weight.sum(dim=1, keepdim=True) @ v_MW[:, own])
    return torch.cat(parts, dim=-1)


def _told(x: Tensor, w: Weights, iteration: int, sublayer: int) -> Tensor:
    if "unit.film" in w:
        scale, shift = w["unit.film"][sublayer, iteration].chunk(2)
        return x * (1 + scale) + shift
    if "unit.up" in w:
        return x + x @ w["unit.down"][sublayer, iteration].T @ w["unit.up"][sublayer, iteration].T
    return x


def _unit(h: Tensor, w: Weights, heads: int, kv_heads: int, iteration: int) -> Tensor:
    x = _told(rms_norm(h, w["unit.norm_attention.weight"]), w, iteration, 0)
    h = h + attention(x, w, "unit.attention.", heads, kv_heads)
    x = _told(rms_norm(h, w["unit.norm_mlp.weight"]), w, iteration, 1)
    gate, up = (x @ w["unit.mlp.gate_up.weight"].T).chunk(2, dim=-1)
    return h + (gate / (1 + torch.exp(-gate)) * up) @ w["unit.mlp.down.weight"].T


def memory_logits(
    tokens_L: Tensor,
    w: Weights,
    *,
    heads: int,
    kv_heads: int,
    memory_heads: int,
    slots: list[int],
    segment: int,
    iterations: int,
    bptt: int | None = None,
) -> Tensor:
    """Logits (L, V) of one row; the memory's graph is cut after every `bptt` segments (None: never)."""
    level_of = [level for level, n in enumerate(slots) for _ in range(n)]
    memory = w["memory.start"]
    bias = None
    if "memory.read_bias" in w:
        bias = w["memory.read_bias"].view(len(slots), memory_heads)[level_of].T
    logits = []
    for number, part_L in enumerate(tokens_L.split(segment), start=1):
        h = w["embedding.weight"][part_L]
        written = memory
        for iteration in range(iterations):
            k, v = (rms_norm(memory, w["memory.norm_slots.weight"]) @ w["memory.read_kv.weight"].T).chunk(2, dim=-1)
            q = rms_norm(h, w["memory.norm_positions.weight"]) @ w["memory.read_query.weight"].T
            h = h + _attend(q, k, v, memory_heads, bias) @ w["memory.read_out.weight"].T
            h = _unit(h, w, heads, kv_heads, iteration)
            k, v = (rms_norm(h, w["memory.norm_written.weight"]) @ w["memory.write_kv.weight"].T).chunk(2, dim=-1)
            q = rms_norm(written, w["memory.norm_slots.weight"]) @ w["memory.write_query.weight"].T
            a = _attend(q, k, v, memory_heads)
            rows = []
            for slot, level in enumerate(level_of):
                seen = torch.cat([written[slot], a[slot]]) @ w["memory.gate.weight"].T
                g = 1 / (1 + torch.exp(-(seen + w[f"memory.gate_biases.{level}"])))
                rows.append((1 - g) * written[slot] + g * (a[slot] @ w["memory.candidate.weight"].T))
            written = torch.stack(rows)
        memory = written.detach() if bptt is not None and number % bptt == 0 else written
        logits.append(rms_norm(h, w["norm.weight"]) @ w["embedding.weight"].T)
    return torch.cat(logits)
