"""Widths that are solved for give what they were solved for."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrmlm.errors import UserError
from hrmlm.evaluation.cost import cost_of
from hrmlm.models import build_model
from hrmlm.studies.matching import quantity_of, solve
from hrmlm.studies.spec import Match

COMMON = {"vocab_size": 4096, "context": 128}
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"family": "transformer", "n_layers": 3, **COMMON},
    "universal": {"family": "universal", "n_steps": 5, **COMMON},
    "hrm_lm": {"family": "hrm_lm", "n_cycles": 2, "fast_steps": 2, **COMMON},
    "grouped": {"family": "transformer", "n_layers": 2, "n_kv_heads": 2, **COMMON},
    "heads": {"family": "transformer", "n_layers": 2, "n_heads": 3, **COMMON},
}


@pytest.mark.parametrize("quantity", ["parameters", "forward_flops", "training_flops"])
@pytest.mark.parametrize("name", MODELS)
def test_matched_within_a_percent(name: str, quantity: Any) -> None:
    other = {"family": "hrm_lm", "n_cycles": 2, "fast_steps": 2, "d_model": 128, **COMMON}
    target = quantity_of(cost_of(other, 128), quantity)
    found = solve(MODELS[name], Match(quantity=quantity, to=target), target, 128)
    assert quantity_of(cost_of(found, 128), quantity) == pytest.approx(target, rel=0.01)


@settings(deadline=None, max_examples=15)
@given(st.floats(3e5, 3e9))
def test_any_number_of_parameters_can_be_met(target: float) -> None:
    model = {**MODELS["universal"], "vocab_size": 512}
    found = solve(model, Match(to=target), target, 128)
    assert cost_of(found).parameters == pytest.approx(target, rel=0.01)


def test_the_matched_model_can_be_built_and_has_these_parameters() -> None:
    found = solve(MODELS["transformer"], Match(to=1_525_376.0), 1_525_376, 128)
    assert sum(p.numel() for p in build_model(found).parameters()) == pytest.approx(1_525_376, rel=0.01)
    assert found["d_model"] % found["n_heads"] == 0


def test_published_sizes_are_found_again() -> None:
    """One block of the published 1,218 M parameters is 7,296 wide."""
    model = {"family": "universal", "n_steps": 12, "vocab_size": 50257, "context": 1024}
    found = solve(model, Match(to=1.2184e9), 1.2184e9, 1024)
    assert found["d_model"] == pytest.approx(7296, rel=0.005)


def test_hidden_alone_leaves_the_width() -> None:
    model = {**MODELS["transformer"], "d_model": 128}
    target = 1.1 * cost_of(model).parameters
    found = solve(model, Match(to=target, vary="hidden"), target, 128)
    assert found["d_model"] == 128
    assert cost_of(found).parameters == pytest.approx(target, rel=0.01)


@pytest.mark.parametrize(("model", "target"), [("hrm_lm", 1000.0), ("heads", 2e4), ("transformer", 1e15)])
def test_an_impossible_match_names_the_closest(model: str, target: float) -> None:
    with pytest.raises(UserError, match=r"within 1\.00%; the closest is .* with d_model \d+"):
        solve(MODELS[model], Match(to=target), target, 128)
