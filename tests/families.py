"""One small configuration per model family and important option: a new family is covered by adding a row."""

from typing import Any

_COMMON: dict[str, Any] = {"vocab_size": 64, "context": 64, "d_model": 32, "n_heads": 2}

_FISH = {"input_layers": 1, "output_layers": 1, "H_layers": 1, "L_layers": 1}

_SLOTS = {"slots": [2, 3]}

FAMILIES: dict[str, dict[str, Any]] = {
    "transformer": {"family": "transformer", "n_layers": 2},
    "transformer-gqa": {"family": "transformer", "n_layers": 2, "n_heads": 4, "n_kv_heads": 2},
    "universal": {"family": "universal", "n_steps": 4},
    "universal-options": {
        "family": "universal",
        "n_steps": 4,
        "input_injection": True,
        "step_embedding": "learned",
        "gradient_window": 2,
    },
    "universal-halting": {
        "family": "universal",
        "n_steps": 4,
        "halting": "token",
        "input_injection": True,
        "step_embedding": "learned",
    },
    "universal-exits": {"family": "universal", "n_steps": 4, "gradient_window": 2, "exit_weight": 1.0},
    "hrm_lm": {"family": "hrm_lm", "n_cycles": 2, "fast_steps": 2},
    "hrm_lm-window": {"family": "hrm_lm", "n_cycles": 3, "fast_steps": 1, "gradient_window": 1},
    "hrm_lm-passes": {"family": "hrm_lm", "n_cycles": 2, "fast_steps": 2, "n_passes": 2},
    "hrm_lm-update-only": {"family": "hrm_lm", "n_cycles": 2, "fast_steps": 1, "gate": "update_only"},
    "hrm_lm-no-gate": {"family": "hrm_lm", "n_cycles": 1, "fast_steps": 3, "gate": "none", "readout": "slow"},
    "hrm_lm-fast-readout": {"family": "hrm_lm", "n_cycles": 2, "fast_steps": 1, "readout": "fast"},
    "hrm_lm-exits": {"family": "hrm_lm", "n_cycles": 3, "fast_steps": 1, "exit_weight": 0.5, "exit_every": 3},
    "cosmicfish": {"family": "cosmicfish", **_FISH, "max_steps": 4},
    "cosmicfish-options": {
        "family": "cosmicfish",
        **_FISH,
        "n_heads": 4,
        "n_kv_heads": 2,
        "max_steps": 3,
        "positions": "learned",
        "mlp": "gelu",
        "initial_bias": 0.5,
    },
    "memory_hrm": {"family": "memory_hrm", "iterations": 3, "segment": 5, **_SLOTS},
    "memory_hrm-options": {
        "family": "memory_hrm",
        "n_heads": 4,
        "n_kv_heads": 2,
        "iterations": 2,
        "segment": 4,
        "slots": [3],
        "memory_dim": 12,
        "memory_heads": 3,
        "memory_bptt": 3,
        "step_conditioning": "film",
        "scaled_init": False,
    },
    "memory_hrm-lora": {
        "family": "memory_hrm",
        "iterations": 3,
        "segment": 5,
        **_SLOTS,
        "step_conditioning": "lora",
        "lora_rank": 2,
        "gate_bias": [-3.0, -2.5],
    },
    "memory_hrm-halting": {"family": "memory_hrm", "iterations": 4, "segment": 5, **_SLOTS, "halting": "token"},
}
FAMILIES = {name: {**_COMMON, **settings} for name, settings in FAMILIES.items()}

AFTER_SEGMENTS = tuple(
    f"memory.{name}"
    for name in ("norm_slots", "norm_written", "read_kv", "write_query", "write_kv", "gate", "candidate")
)
"""Modules that see finished segments only: there positions may mix as they like."""
