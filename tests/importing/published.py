"""The published forward pass once more in float64, written from its description, without the library.

One row at a time; names of tensors and keys as published. Complex numbers turn neighbouring channels, a loop goes over
the heads.
"""

import math
from typing import Any

import torch
from torch import Tensor

HALT_BIAS = 0.35


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x over its root mean square."""
    return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def turned(x_LK: Tensor) -> Tensor:
    """Channels 2i and 2i + 1 are one complex number, turned by position · 10000^(−2i/K)."""
    length, size = x_LK.shape
    angle = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    z = torch.complex(x_LK[:, 0::2], x_LK[:, 1::2]) * torch.polar(torch.ones_like(angle), angle)
    return torch.stack([z.real, z.imag], dim=-1).reshape(length, size)


def attention(x_LD: Tensor, w: dict[str, Tensor], at: str, config: dict[str, Any]) -> Tensor:
    """Causal self-attention."""
    heads = config["n_head"]
    kv_heads = config["n_kv_head"] if config["use_gqa"] else heads
    size = x_LD.shape[-1] // heads
    q, k, v = (x_LD @ w[f"{at}{name}_proj.weight"].T for name in "qkv")
    results = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        ours, theirs = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
        q_LK, k_LK = q[:, ours], k[:, theirs]
        if config["use_rotary"]:
            q_LK, k_LK = turned(q_LK), turned(k_LK)
        scores = (q_LK @ k_LK.T / math.sqrt(size)).exp().tril()
        results.append(scores / scores.sum(-1, keepdim=True) @ v[:, theirs])
    return torch.cat(results, -1) @ w[f"{at}c_proj.weight"].T


def mlp(x: Tensor, w: dict[str, Tensor], at: str, config: dict[str, Any]) -> Tensor:
    """Gated with SiLU on `up`, or plain with GELU."""
    if not config["use_swiglu"]:
        inner = x @ w[f"{at}c_fc.weight"].T
        return (inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))) @ w[f"{at}c_proj.weight"].T
    up, gate = x @ w[f"{at}up.weight"].T, x @ w[f"{at}gate.weight"].T
    return (up / (1 + torch.exp(-up)) * gate) @ w[f"{at}down.weight"].T


def layer(x: Tensor, w: dict[str, Tensor], at: str, config: dict[str, Any], post_norm: bool) -> Tensor:
    """Norm before the branch, or after the sum."""
    eps, first, second = config["eps"], w[f"{at}ln_1.weight"], w[f"{at}ln_2.weight"]
    if post_norm:
        x = rms(x + attention(x, w, f"{at}attn.", config), first, eps)
        return rms(x + mlp(x, w, f"{at}mlp.", config), second, eps)
    x = x + attention(rms(x, first, eps), w, f"{at}attn.", config)
    return x + mlp(rms(x, second, eps), w, f"{at}mlp.", config)


def stack(x: Tensor, w: dict[str, Tensor], at: str, n: int, config: dict[str, Any], post_norm: bool = False) -> Tensor:
    """n layers."""
    for i in range(n):
        x = layer(x, w, f"{at}{i}.", config, post_norm)
    return x


def forward(ids_L: Tensor, w: dict[str, Tensor], config: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Logits (L, V), the last two halting logits, and the steps counted."""
    x = w["wte.weight"][ids_L]
    if not config["use_rotary"]:
        x = x + w["wpe.weight"][: len(ids_L)]
    x = stack(x, w, "input_blocks.", config["n_input_layers"], config)
    high, low = w["hrm_core.H_init"].expand_as(x), w["hrm_core.L_init"].expand_as(x)
    steps = 0
    while steps < config["hrm_max_steps"]:
        for _ in range(config["hrm_H_cycles"]):
            for _ in range(config["hrm_L_cycles"]):
                low = stack(low + high + x, w, "hrm_core.L_level.layers.", config["hrm_L_layers"], config, True)
            high = stack(high + low, w, "hrm_core.H_level.layers.", config["hrm_H_layers"], config, True)
        q = w["hrm_core.q_head.weight"] @ high.mean(0) + w["hrm_core.q_head.bias"]
        if config["hrm_max_steps"] > 1 and q[0] + HALT_BIAS > q[1]:
            break
        steps += 1
    x = stack(high, w, "output_blocks.", config["n_output_layers"], config)
    return rms(x, w["ln_f.weight"], config["eps"]) @ w["wte.weight"].T, q, steps
