"""Configurations: strict, complete, unchanged by a round trip; every documented value runs."""

import json
import math
import random
from typing import Any

import pytest
import torch

from hrmlm.errors import UserError
from hrmlm.models import build_model, families, model_config
from tests.families import FAMILIES
from tests.models.helpers import random_batch, random_tokens, step

SMALL = {"vocab_size": 64, "context": 16, "d_model": 32, "n_heads": 2}
EVERYWHERE: list[dict[str, Any]] = [
    {},
    {"dropout": 0.1},
    {"n_heads": 4, "n_kv_heads": 1},
    {"n_heads": 4, "n_kv_heads": 2},
    {"n_heads": None, "d_model": 128},
    {"hidden": 48},
    {"used_vocab": 60},
    {"norm_eps": 1e-6, "rope_theta": 500_000.0},
]
RECURRENT: list[dict[str, Any]] = [
    {"gradient_window": 1},
    {"gradient_window": 4},
    {"scaled_init": False},
    {"exit_probability": 0.5},
    {"exit_probability": 1.0},
    {"exit_weight": 1.0},
    {"exit_weight": 0.1, "exit_every": 1, "exit_probability": 0.5, "gradient_window": 1},
]
HALTING: list[dict[str, Any]] = [
    {},
    {"epsilon": 0.2, "initial_bias": 3.0},
    {"step_cost": 0.0},
    {"target_depth": 2.5, "step_cost": 0.1},
    {"exploration": 0.0},
    {"exploration": 1.0},
]
FISH = {"input_layers": 1, "output_layers": 1, "H_layers": 1, "L_layers": 1, "max_steps": 3}
FISH_OPTIONS: list[dict[str, Any]] = [
    *HALTING,
    {"positions": "learned"},
    {"mlp": "gelu"},
    {"H_layers": 2, "L_layers": 2, "H_cycles": 1, "L_cycles": 3},
    {"max_steps": 1},
]
MEMORY = {"iterations": 3, "segment": 2, "slots": [2, 3]}
MEMORY_OPTIONS: list[dict[str, Any]] = [
    {},
    {"slots": [4, 8, 16]},
    {"slots": [3]},
    {"gate_bias": [-1.0, 2.0]},
    {"memory_dim": 12, "memory_heads": 3},
    {"memory_bptt": 3},
    {"auxiliary_weight": 0.0},
    {"auxiliary_weight": 1.0},
    {"curriculum_start": 1, "curriculum_fraction": 0.9},
    *[{"step_conditioning": value} for value in ("none", "film", "lora")],
    {"step_conditioning": "lora", "lora_rank": 1},
    {"write_dropout": 0.5},
    {"iterations": 1},
    {"scaled_init": False},
    *[{"halting": "token", **own} for own in HALTING],
]
OWN: dict[str, list[dict[str, Any]]] = {
    "hrm_lm": [
        *[{"gate": gate} for gate in ("gru", "update_only", "none")],
        *[{"readout": readout} for readout in ("sum", "slow", "fast")],
        {"n_cycles": 3, "fast_steps": 1},
        {"n_cycles": 1, "fast_steps": 4},
        {"n_passes": 2, "exit_probability": 0.5, "gradient_window": 1},
        {"prototype_std": 1.0},
    ],
    "universal": [
        {"n_steps": 1},
        {"input_injection": True},
        {"step_embedding": "learned"},
        {"step_embedding": "none"},
        {"step_embedding": "learned", "input_injection": True, "exit_probability": 0.5},
        *[{"halting": "token", **own} for own in HALTING],
        {"halting": "token", "n_steps": 1},
    ],
    "transformer": [{"n_layers": 1}, {"n_layers": 3}],
    "memory_hrm": [{**MEMORY, **own} for own in MEMORY_OPTIONS],
    "cosmicfish": [{**FISH, **own} for own in FISH_OPTIONS],
}


def _options() -> list[tuple[str, dict[str, Any]]]:
    rows = []
    for family, (config_class, _) in families().items():
        recurrent = RECURRENT if "exit_probability" in config_class.model_fields else []
        steps = {"n_steps": 4} if family == "universal" else {}
        rows += [(family, {**steps, **own}) for own in [*EVERYWHERE, *recurrent, *OWN.get(family, [])]]
    return rows


@pytest.mark.parametrize(("family", "options"), _options())
def test_every_option_value_builds_and_trains_a_step(family: str, options: dict[str, Any]) -> None:
    model = build_model({"family": family, **SMALL, **options}).train()
    for seed in range(2):
        partials = step(model, random_batch(model, length=5, seed=seed), random.Random(seed))
        assert math.isfinite(float(partials[-1].task_nats))
    assert model.eval()(random_tokens(model, 1, 5)).logits.shape == (1, 5, model.config.n_predicted)


def test_every_family_is_covered() -> None:
    assert {settings["family"] for settings in FAMILIES.values()} == set(families()) == set(OWN)


@pytest.mark.parametrize(("family", "options"), _options())
def test_three_round_trips_through_json(family: str, options: dict[str, Any]) -> None:
    config = model_config({"family": family, **SMALL, **options})
    first = json.dumps(config.model_dump(mode="json"))
    text = first
    for _ in range(3):
        again = model_config(json.loads(text))
        text = json.dumps(again.model_dump(mode="json"))
        assert again == config
        assert text == first
    assert type(again) is type(config)


@pytest.mark.parametrize("family", families())
def test_a_misspelt_key_names_the_nearest_valid_one(family: str) -> None:
    for field in families()[family][0].model_fields:
        if field == "family":
            continue
        with pytest.raises(UserError, match=f"unknown key, did you mean '{field}'") as caught:
            model_config({"family": family, f"{field}x": 1})
        assert "\n" not in str(caught.value)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"family": "hrm-lm"}, "'hrm_lm'"),
    ({"family": "nothing like it"}, "transformer"),
    ({}, "family"),
    ({"family": None}, "family"),
    ({"family": "transformer", "n_layers": 0}, "greater than 0"),
    ({"family": "transformer", "n_layers": -1}, "greater than 0"),
    ({"family": "transformer", "n_layers": 1.5}, "integer"),
    ({"family": "transformer", "n_layers": "many"}, "integer"),
    ({"family": "transformer", "gradient_window": 1}, "unknown key"),
    ({"family": "transformer", "dropout": 1.0}, "less than 1"),
    ({"family": "transformer", "dropout": -0.1}, "greater than or equal to 0"),
    ({"family": "transformer", "dropout": math.nan}, "dropout"),
    ({"family": "transformer", "norm_eps": 0.0}, "greater than 0"),
    ({"family": "transformer", "d_model": 30, "n_heads": 4}, "30.*4"),
    ({"family": "transformer", "d_model": 30, "n_heads": 2}, "even head size"),
    ({"family": "transformer", "n_heads": 4, "n_kv_heads": 3}, "3.*4"),
    ({"family": "transformer", "n_heads": 2, "n_kv_heads": 4}, "4.*2"),
    ({"family": "transformer", "vocab_size": 64, "used_vocab": 65}, "65.*64"),
    ({"family": "universal", "n_steps": 4, "gradient_window": 5}, "5.*4"),
    ({"family": "universal", "step_embedding": "sinus"}, "'none' or 'learned'"),
    ({"family": "universal", "exit_probability": 1.1}, "less than or equal to 1"),
    ({"family": "universal", "input_injection": "perhaps"}, "boolean"),
    ({"family": "hrm_lm", "n_cycles": 2, "fast_steps": 2, "gradient_window": 5}, "5.*4"),
    ({"family": "hrm_lm", "gradient_window": 0}, "greater than 0"),
    ({"family": "hrm_lm", "gate": "lstm"}, "'gru', 'update_only' or 'none'"),
    ({"family": "hrm_lm", "readout": "both"}, "'sum', 'slow' or 'fast'"),
    ({"family": "hrm_lm", "readout": "fast", "gradient_window": 2}, "gradient window above 2"),
    ({"family": "hrm_lm", "n_cycles": 1, "exit_probability": 0.1}, "at least 2 cycles"),
    ({"family": "hrm_lm", "n_passes": 0}, "greater than 0"),
    ({"family": "hrm_lm", "prototype_std": -1}, "greater than 0"),
    ({"family": "hrm_lm", "prototype_std": math.inf}, "finite"),
    ({"family": "hrm_lm", "n_cycles": True}, "integer"),
    ({"family": "hrm_lm", "n_cycles": "3"}, "integer"),
    ({"family": "hrm_lm", "n_layers": 2}, "unknown key"),
    ({"family": "universal", "n_steps": 1, "exit_probability": 0.1}, "at least 2 steps"),
    ({"family": ["hrm_lm"]}, "unknown family"),
    ({"family": "cosmicfish", "epsilon": 0}, "epsilon"),
    ({"family": "cosmicfish", "epsilon": 1.0}, "epsilon"),
    ({"family": "cosmicfish", "step_cost": -0.1}, "step_cost"),
    ({"family": "cosmicfish", "exploration": 1.5}, "exploration"),
    ({"family": "cosmicfish", "halting": "none"}, "halting"),
    ({"family": "cosmicfish", "target_depth": 17}, "target_depth 17 exceeds the model's 16 steps"),
    ({"family": "cosmicfish", "target_depth": 3, "step_cost": 0}, "no effect with step_cost 0"),
    ({"family": "universal", "halting": "token", "target_depth": 13}, "target_depth 13 exceeds the model's 12 steps"),
    ({"family": "universal", "halting": "token", "gradient_window": 4}, "before the window opens"),
    ({"family": "universal", "halting": "token", "exit_probability": 0.1}, "exploration varies it"),
    ({"family": "memory_hrm", "segment": 0}, "greater than 0"),
    ({"family": "memory_hrm", "slots": [4, 0]}, "greater than 0"),
    ({"family": "memory_hrm", "slots": [0]}, r"^[^;]*greater than 0 \(got 0\)$"),
    ({"family": "memory_hrm", "slots": []}, "list should have at least 1 item"),
    ({"family": "memory_hrm", "slots": 4}, "should be a list"),
    ({"family": "memory_hrm", "iterations": 0}, "greater than 0"),
    ({"family": "memory_hrm", "memory_bptt": 1}, "greater than or equal to 2"),
    ({"family": "memory_hrm", "gate_bias": [-1.0]}, "1 values for the 3 levels"),
    ({"family": "memory_hrm", "gate_bias": [-1.0, -2.0, math.nan]}, "finite"),
    ({"family": "memory_hrm", "memory_dim": 10, "memory_heads": 4}, "10.*4"),
    ({"family": "memory_hrm", "curriculum_start": 9}, "9 exceeds the 8 iterations"),
    ({"family": "memory_hrm", "curriculum_start": 4, "halting": "token"}, "set curriculum_start to null"),
    ({"family": "memory_hrm", "lora_rank": 4, "step_conditioning": "film"}, "lora_rank without effect"),
    ({"family": "memory_hrm", "curriculum_fraction": 0.3}, "curriculum_fraction without effect"),
    ({"family": "memory_hrm", "step_conditioning": "hyper"}, "'none', 'film' or 'lora'"),
    ({"family": "memory_hrm", "target_depth": 3}, "target_depth without effect"),
    ({"family": "memory_hrm", "write_dropout": 1.0}, "less than 1"),
    ({"family": "universal", "step_cost": 0.5, "epsilon": 0.1}, "epsilon, step_cost without effect"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_values_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        model_config(settings)
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_named_together() -> None:
    with pytest.raises(UserError, match=r"model\.d_model.*model\.n_cycle: unknown key, did you mean 'n_cycles'"):
        model_config({"family": "hrm_lm", "d_model": 0, "n_cycle": 3})


@pytest.mark.parametrize("name", FAMILIES)
def test_impossible_requests_are_refused(name: str) -> None:
    model = build_model(FAMILIES[name])
    with pytest.raises(UserError, match="depth 0"):
        model(random_tokens(model, 1, 3), depth=0)
    with pytest.raises(UserError, match="depth -1"):
        model.schedule(-1)
    for bad in (64, -1):
        with pytest.raises(UserError, match=f"token id {bad} is outside the model's vocabulary of 64"):
            model(torch.tensor([[3, bad]]))
    with pytest.raises(UserError, match="at least one token"):
        model(random_tokens(model, 1, 3)[:, :0])
    with pytest.raises(UserError, match="vocab_size"):
        build_model({**FAMILIES[name], "vocab_size": None})


@pytest.mark.parametrize("name", [name for name in FAMILIES if build_model(FAMILIES[name]).sequence_limit == 64])
def test_more_than_the_context_is_refused(name: str) -> None:
    model = build_model(FAMILIES[name])
    with pytest.raises(UserError, match=r"65 tokens.*context of 64"):
        model(random_tokens(model, 1, 65))
    cache = model.new_cache(1, 64)
    model(random_tokens(model, 1, 60), cache=cache)
    with pytest.raises(UserError, match=r"65 tokens.*context of 64"):
        model(random_tokens(model, 1, 5), cache=cache)
    with pytest.raises(UserError, match="room for 4 positions and 5"):
        model(random_tokens(model, 1, 5), cache=model.new_cache(1, 4))


def test_depth_beyond_what_exists_is_refused() -> None:
    with pytest.raises(UserError, match="3 is not possible; the model has 2 layers"):
        build_model(FAMILIES["transformer"]).schedule(3)
    with pytest.raises(UserError, match="5 is not possible"):
        build_model(FAMILIES["universal-options"]).schedule(5)
