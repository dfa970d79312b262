"""Costs: published sizes, and FLOPs and cache bytes against independent counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hrmlm.data.batch import Batch
from hrmlm.errors import UserError
from hrmlm.evaluation.cost import cost, cost_of, show
from hrmlm.models import LanguageModel, build_model
from hrmlm.training.recipe import load_recipe
from tests.families import FAMILIES

families = pytest.mark.parametrize("family", FAMILIES)

GPT2_VOCABULARY = 50_257
HRM = {"family": "hrm_lm", "d_model": 4096, "vocab_size": GPT2_VOCABULARY}
TRANSFORMER = {"family": "transformer", "d_model": 4096, "vocab_size": GPT2_VOCABULARY}

PUBLISHED_MILLIONS: list[tuple[dict[str, Any], float]] = [
    ({**HRM, "n_cycles": 2, "fast_steps": 2}, 1229),
    ({**HRM, "n_cycles": 2, "fast_steps": 4}, 1229),
    ({**HRM, "n_cycles": 4, "fast_steps": 3}, 1229),
    ({**HRM, "d_model": 2048, "n_cycles": 12, "fast_steps": 3}, 359),
    ({**TRANSFORMER, "n_layers": 2}, 743),
    ({**TRANSFORMER, "n_layers": 4}, 1280),
    ({**TRANSFORMER, "n_layers": 12}, 3430),
    ({"family": "universal", "d_model": 7296, "n_steps": 12, "vocab_size": GPT2_VOCABULARY}, 1218),
    (load_recipe("cosmicfish-82m").model, 82.77),
]


@pytest.mark.parametrize(("settings", "millions"), PUBLISHED_MILLIONS)
def test_published_sizes_come_out(settings: dict[str, Any], millions: float) -> None:
    report = cost_of(settings)
    assert report.parameters == pytest.approx(millions * 1e6, rel=1e-3)
    assert report.weight_bytes["bfloat16"] == pytest.approx(2 * millions * 1e6, rel=1e-3)
    assert report.weight_bytes["float32"] == 2 * report.weight_bytes["bfloat16"]


@families
def test_forward_flops_equal_an_independent_count(family: str) -> None:
    model, length = never_stops(build_model(FAMILIES[family])).eval(), 48
    with counted_products() as counter, torch.no_grad():
        model(torch.zeros(2, length, dtype=torch.long))
    report = cost(model, length)
    elsewhere = model.extra_flops(length, model.trained_depth, training=False)[1]
    attention = report.forward_attention_flops_per_token - elsewhere
    expected = as_if_not_causal(model, length, report.forward_flops_per_token, attention)
    assert counter.get_total_flops() / (2 * length) == pytest.approx(expected, rel=1e-6)


@families
def test_training_flops_equal_an_independent_count(family: str) -> None:
    """What differs: gradients that nobody needs are not computed, such as that of a state from outside the window."""
    model, length = never_stops(build_model(FAMILIES[family])).train(), 48
    tokens = torch.zeros(2, length, dtype=torch.long)
    with counted_products() as counter:
        for part in model.losses(Batch(tokens, tokens)):
            part.objective.backward()
    report = cost(model, length)
    elsewhere = model.extra_flops(length, model.trained_depth, training=True)[1]
    attention = report.training_attention_flops_per_token - elsewhere
    expected = as_if_not_causal(model, length, report.training_flops_per_token, attention)
    assert counter.get_total_flops() / (2 * length) == pytest.approx(expected, rel=0.03)


def never_stops(model: LanguageModel) -> LanguageModel:
    """The model, with its halting head, if it has one, set to never stop: costs are those of the most steps."""
    if model.learns_depth:
        with torch.no_grad():
            model.halting.q.bias[0] = -30
    assert cost(model).depth_is_learned == model.learns_depth
    return model


@contextmanager
def counted_products() -> Iterator[FlopCounterMode]:
    """Counts matrix products, those of attention too: the counter does not know the fused kernel of the CPU."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def as_if_not_causal(model: LanguageModel, length: int, flops: float, attention: float) -> float:
    """The counter's rule for causal attention: a query meets all keys, not those that it may see on average."""
    seen, met = model.attended(length)
    return flops - attention + attention * met / seen


@families
def test_cache_bytes_equal_what_is_allocated(family: str) -> None:
    model = build_model(FAMILIES[family])
    report = cost(model)
    assert model.new_cache(1, report.context).bytes == pytest.approx(report.kv_cache_bytes_context["float32"], rel=0.05)
    if model.sequence_limit > report.context:
        assert set(report.kv_cache_bytes_per_token.values()) == {0}
        assert model.new_cache(3, 10).bytes == 3 * model.new_cache(1, 10_000).bytes
        return
    assert model.new_cache(3, 10).bytes == pytest.approx(30 * report.kv_cache_bytes_per_token["float32"], rel=0.05)


def test_the_window_and_the_passes_are_counted() -> None:
    full = cost_of({**FAMILIES["hrm_lm"], "n_cycles": 4, "fast_steps": 1})
    window = cost_of({**FAMILIES["hrm_lm"], "n_cycles": 4, "fast_steps": 1, "gradient_window": 1})
    assert (full.applications, full.applications_in_window) == (9, 9)
    assert (window.applications, window.applications_in_window) == (9, 3)
    assert window.forward_flops_per_token == full.forward_flops_per_token
    assert window.training_flops_per_token < full.training_flops_per_token == 3 * full.forward_flops_per_token
    twice = cost_of({**FAMILIES["hrm_lm"], "n_passes": 2})
    once = cost_of(FAMILIES["hrm_lm"])
    assert twice.training_flops_per_token == 2 * once.training_flops_per_token
    assert once.forward_flops_per_token < twice.forward_flops_per_token < 2 * once.forward_flops_per_token


def test_depth_and_length_change_the_cost() -> None:
    short = cost_of(FAMILIES["universal"], length=8)
    assert short.forward_flops_per_token < cost_of(FAMILIES["universal"]).forward_flops_per_token
    assert short.kv_cache_bytes_context == cost_of(FAMILIES["universal"]).kv_cache_bytes_context
    assert cost_of(FAMILIES["universal"], depth=2).applications == 2
    for length in (0, 65):
        with pytest.raises(UserError, match=r"from 1 to the model's context, 64"):
            cost_of(FAMILIES["universal"], length=length)


def test_costs_need_no_memory_and_the_table_names_them() -> None:
    console = Console(record=True, width=100)
    show(cost_of({**TRANSFORMER, "d_model": 65_536, "n_layers": 100}), console, "giant")  # 27 TB of weights
    text = console.export_text()
    assert all(
        words in text for words in ("giant", "parameters", "KV cache per token", "100 x layer", "gradient window")
    )
    show(report := cost_of({"family": "memory_hrm", "vocab_size": 300, "d_model": 64}), console, "memory")
    text = console.export_text()
    assert f"{report.kv_cache_bytes_context['float32'] / 1024:,.1f} KiB" in text
    assert "state at any length, float32" in text
    assert "KV cache" not in text
