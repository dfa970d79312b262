"""Published sizes, counted on the meta device, and the exact formulas behind them."""

from typing import Any

import pytest
import torch

from hrmlm.models import LanguageModel, build_model

GPT2 = 50_257
TWO_SPEED_1B = {"family": "hrm_lm", "d_model": 4096}
PUBLISHED = [
    ({**TWO_SPEED_1B, "n_cycles": 2, "fast_steps": 2}, 1_229),
    ({**TWO_SPEED_1B, "n_cycles": 2, "fast_steps": 4}, 1_229),
    ({**TWO_SPEED_1B, "n_cycles": 4, "fast_steps": 3}, 1_229),
    ({"family": "hrm_lm", "d_model": 2048, "n_cycles": 12, "fast_steps": 3}, 359),
    ({"family": "transformer", "d_model": 4096, "n_layers": 2}, 743),
    ({"family": "transformer", "d_model": 4096, "n_layers": 4}, 1_280),
    ({"family": "transformer", "d_model": 4096, "n_layers": 12}, 3_430),
    ({"family": "universal", "d_model": 7296, "n_steps": 12}, 1_218),
    ({"family": "cosmicfish", "vocab_size": 50_304, "d_model": 448, "n_heads": 8, "n_kv_heads": 4}, 82.77),
]


def _on_meta(settings: dict[str, Any]) -> LanguageModel:
    with torch.device("meta"):
        model = build_model({"vocab_size": GPT2, **settings})
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    return model


def _count(model: LanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("settings", "millions"), PUBLISHED)
def test_published_sizes(settings: dict[str, Any], millions: int) -> None:
    assert _count(_on_meta(settings)) == pytest.approx(millions * 1e6, rel=1e-3)


@pytest.mark.parametrize(("gate", "matrices", "biases"), [("gru", 61, 4), ("update_only", 57, 2), ("none", 53, 0)])
def test_two_speed_formula(gate: str, matrices: int, biases: int) -> None:
    """V·D + 61·D², 9 gains (two per block, one per cell, the last one) and 4 biases of width D; fewer gates, less."""
    D = 256
    model = _on_meta({"family": "hrm_lm", "d_model": D, "gate": gate})
    assert _count(model) == GPT2 * D + matrices * D * D + (9 + biases) * D


def test_stored_weights_do_not_grow_with_depth() -> None:
    for family, depth in (("hrm_lm", "n_cycles"), ("universal", "n_steps"), ("cosmicfish", "max_steps")):
        assert len({_count(_on_meta({"family": family, depth: steps})) for steps in (1, 3, 50)}) == 1


def test_stacked_and_flat_formulas() -> None:
    D = 128
    assert _count(_on_meta({"family": "transformer", "d_model": D, "n_layers": 3})) == GPT2 * D + 48 * D * D + 7 * D
    assert _count(_on_meta({"family": "universal", "d_model": D})) == GPT2 * D + 16 * D * D + 3 * D
    learned = {"family": "universal", "d_model": D, "n_steps": 5, "step_embedding": "learned"}
    assert _count(_on_meta(learned)) == GPT2 * D + 16 * D * D + (3 + 5) * D
    grouped = {"family": "transformer", "d_model": D, "n_layers": 1, "n_heads": 4, "n_kv_heads": 1, "hidden": 200}
    assert _count(_on_meta(grouped)) == GPT2 * D + (2 * D + 2 * D // 4) * D + 3 * 200 * D + 3 * D


def test_formula_of_learned_depth() -> None:
    D, context = 128, 32
    halting = {"family": "universal", "d_model": D, "halting": "token"}
    assert _count(_on_meta(halting)) == GPT2 * D + 16 * D * D + 3 * D + 2 * D + 2
    layers = {"input_layers": 1, "output_layers": 2, "H_layers": 3, "L_layers": 4, "n_heads": 4}
    grouped = {"family": "cosmicfish", "d_model": D, **layers, "n_kv_heads": 2}
    assert _count(_on_meta(grouped)) == GPT2 * D + 10 * (15 * D * D + 2 * D) + 5 * D + 2
    other = {"family": "cosmicfish", "d_model": D, **layers, "mlp": "gelu", "positions": "learned", "context": context}
    assert _count(_on_meta(other)) == GPT2 * D + 10 * (12 * D * D + 2 * D) + 5 * D + 2 + context * D
