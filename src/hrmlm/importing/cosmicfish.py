"""The released CosmicFish-HRM files: a configuration in JSON, weights in safetensors.

Three things differ from this library under the same names: rotary positions turn neighbouring channels there (2i, 2i+1)
and channels i and i + K/2 here; SiLU is applied to `up` there and to `gate` here; queries, keys and values, and the two
matrices of the gated layer, are one matrix each here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hrmlm.config import nearest
from hrmlm.errors import UserError
from hrmlm.importing import Source
from hrmlm.models.cosmicfish import CosmicFishConfig

TIES = {"lm_head.weight": "wte.weight"}
DIRECT = {
    "vocab_size": "vocab_size",
    "n_embd": "d_model",
    "block_size": "context",
    "n_input_layers": "input_layers",
    "n_output_layers": "output_layers",
    "n_head": "n_heads",
    "hrm_H_layers": "H_layers",
    "hrm_L_layers": "L_layers",
    "hrm_H_cycles": "H_cycles",
    "hrm_L_cycles": "L_cycles",
    "hrm_max_steps": "max_steps",
    "eps": "norm_eps",
}
SWITCHES = ("use_rotary", "use_gqa", "use_swiglu")
OPTIONAL = {"bias", "dropout", "n_kv_head"}  # n_kv_head is needed, and checked, where use_gqa is true
# Nothing the loaded model computes depends on these.
IGNORED = {
    "hrm_exploration_prob",
    "forward_dtype",
    "model_type",
    "architectures",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "_name_or_path",
}


def settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of our model for a published configuration.

    config: the published keys; where: names their file in messages.

    Raises: UserError naming every key that is missing, unknown, or asks for what this library does not have.
    """
    known = {*DIRECT, *SWITCHES, *OPTIONAL}
    needed = {*DIRECT, *SWITCHES, *({"n_kv_head"} if config.get("use_gqa") is True else ())}
    problems = [f"missing {key}" for key in sorted(needed - config.keys())]
    problems += [f"unknown {key}, {nearest(key, known)}" for key in sorted(config.keys() - known - IGNORED)]
    for key in (*SWITCHES, "bias"):
        if key in config and not isinstance(config[key], bool):
            problems.append(f"{key} must be true or false, not {config[key]!r}")
    # null is not "choose yourself" as in our own settings: a wrong number of heads would still fit every shape.
    problems += [f"{key} must not be null" for key in sorted(needed - {*SWITCHES}) if config.get(key, 0) is None]
    if config.get("bias") is True:
        problems.append("bias: true, biases in the linear layers, is not supported")
    if problems:
        raise UserError(f"{where}: {'; '.join(problems)}")
    return {
        "family": CosmicFishConfig.model_fields["family"].default,
        **{ours: config[theirs] for theirs, ours in DIRECT.items()},
        "n_kv_heads": config["n_kv_head"] if config["use_gqa"] else config["n_head"],
        "dropout": config.get("dropout", 0.0),
        "positions": "rotary" if config["use_rotary"] else "learned",
        "mlp": "swiglu" if config["use_swiglu"] else "gelu",
        "halting": "sequence",
    }


def sources(config: CosmicFishConfig) -> dict[str, Source]:
    """For each tensor of our model: the published ones it is made of."""
    D, rows = config.d_model, config.vocab_size
    assert rows is not None
    found = {
        "embedding.weight": Source({"wte.weight": (rows, D)}),
        "norm.weight": Source({"ln_f.weight": (D,)}),
        "H_init": Source({"hrm_core.H_init": (D,)}),
        "L_init": Source({"hrm_core.L_init": (D,)}),
        "halting.q.weight": Source({"hrm_core.q_head.weight": (2, D)}),
        "halting.q.bias": Source({"hrm_core.q_head.bias": (2,)}),
    }
    if config.positions == "learned":
        found["position_table.weight"] = Source({"wpe.weight": (config.context, D)})
    for ours, theirs, layers in (
        ("input_blocks", "input_blocks", config.input_layers),
        ("output_blocks", "output_blocks", config.output_layers),
        ("H_level", "hrm_core.H_level.layers", config.H_layers),
        ("L_level", "hrm_core.L_level.layers", config.L_layers),
    ):
        for i in range(layers):
            found |= _layer(config, f"{ours}.{i}.", f"{theirs}.{i}.")
    return found


def _layer(config: CosmicFishConfig, ours: str, theirs: str) -> dict[str, Source]:
    D, hidden = config.d_model, config.hidden or 4 * config.d_model
    narrow = D // config.heads * config.kv_heads
    attn, mlp = f"{theirs}attn.", f"{theirs}mlp."
    projections = {
        f"{attn}q_proj.weight": (D, D),
        f"{attn}k_proj.weight": (narrow, D),
        f"{attn}v_proj.weight": (narrow, D),
    }
    found = {
        f"{ours}norm_attention.weight": Source({f"{theirs}ln_1.weight": (D,)}),
        f"{ours}attention.qkv.weight": Source(projections, _fused(config)),
        f"{ours}attention.out.weight": Source({f"{attn}c_proj.weight": (D, D)}),
        f"{ours}norm_mlp.weight": Source({f"{theirs}ln_2.weight": (D,)}),
    }
    if config.mlp == "gelu":
        found[f"{ours}mlp.up.weight"] = Source({f"{mlp}c_fc.weight": (hidden, D)})
        found[f"{ours}mlp.down.weight"] = Source({f"{mlp}c_proj.weight": (D, hidden)})
    else:  # what SiLU is applied to comes first here
        gated = {f"{mlp}up.weight": (hidden, D), f"{mlp}gate.weight": (hidden, D)}
        found[f"{ours}mlp.gate_up.weight"] = Source(gated, lambda up, gate: torch.cat([up, gate]))
        found[f"{ours}mlp.down.weight"] = Source({f"{mlp}down.weight": (D, hidden)})
    return found


def _fused(config: CosmicFishConfig) -> Callable[..., Tensor]:
    size = config.d_model // config.heads

    def halves(weight: Tensor) -> Tensor:
        """Rows of each head: first the even channels, then the odd ones."""
        if config.positions == "learned":
            return weight
        return weight.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2)

    return lambda q, k, v: torch.cat([halves(q), halves(k), v])
