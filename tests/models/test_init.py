"""The intended start values are there after construction, and survive saving and loading."""

import pytest
import torch

from hrmlm.models import LanguageModel, build_model
from tests.families import FAMILIES
from tests.models.helpers import build, lively_model, observe, random_tokens

WIDE = {"d_model": 64, "n_heads": 2, "n_kv_heads": None, "vocab_size": 512}


def _repeated(model: LanguageModel) -> set[int]:
    return {id(parameter) for module in model.repeated_modules() for parameter in module.parameters()}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("scaled", [True, False])
def test_spread_of_every_matrix(name: str, scaled: bool) -> None:
    changes = {"scaled_init": scaled} if "scaled_init" in type(build(name).config).model_fields else {}
    model = build(name, **WIDE, **changes)
    repeated = _repeated(model)
    gate_biases = getattr(model.config, "gate_biases", ())
    own = {f"memory.gate_biases.{level}": value for level, value in enumerate(gate_biases)}
    own["memory.read_bias"] = 0.0
    for parameter_name, trained in model.named_parameters():
        parameter = trained.detach()
        if "halting" in parameter_name and parameter.ndim < 2:
            assert parameter.tolist() == [model.config.initial_bias, 0]
            continue
        if parameter_name in own:
            assert bool((parameter == own[parameter_name]).all()), parameter_name
            continue
        if parameter.ndim < 2 and not parameter_name.endswith("_init"):  # the rest of the vectors are start states
            expected = 0.0 if parameter_name.endswith("bias") else 1.0
            assert bool((parameter == expected).all()), parameter_name
            continue
        shrink = model.config.total_steps**-0.5 if id(trained) in repeated and scaled else 1.0
        if parameter_name == "memory.read_out.weight":
            shrink = 1 / model.config.iterations
        elif parameter_name.startswith("memory.") and parameter_name != "memory.start":
            shrink = 50 * parameter.shape[1] ** -0.5
        tolerance = 5 / (2 * parameter.numel()) ** 0.5  # five standard errors of a standard deviation
        assert float(parameter.std()) == pytest.approx(0.02 * shrink, rel=tolerance), parameter_name
        assert abs(float(parameter.mean())) < 5 * 0.02 * shrink / parameter.numel() ** 0.5, parameter_name


@pytest.mark.parametrize("name", FAMILIES)
def test_what_counts_as_repeated(name: str) -> None:
    """Exactly what is called more than once in a pass starts smaller, in families that start it smaller."""
    model = build(name)
    if "scaled_init" not in type(model.config).model_fields:
        assert not _repeated(model)
        return
    calls: dict[str, int] = {}
    for application in model.schedule():
        calls[application.module] = calls.get(application.module, 0) + 1
    again = [model.get_submodule(module) for module, count in calls.items() if count > 1]
    in_loop = {id(parameter) for module in again for parameter in module.parameters()}
    assert in_loop <= _repeated(model)
    assert id(model.embedding.weight) not in _repeated(model)
    assert id(model.norm.weight) not in _repeated(model)


@pytest.mark.parametrize("gate", ["gru", "update_only"])
def test_gate_is_half_open_at_the_start(gate: str) -> None:
    model = build("hrm_lm", gate=gate)
    for cell in (model.fast, model.slow):
        assert bool((torch.sigmoid(cell.gate(torch.zeros(1, 2 * model.config.d_model))) == 0.5).all())
    seen = observe(model, random_tokens(model, 2, 8))
    gates = [value for key, value in seen.items() if key.endswith("gate_BL")]
    assert len(gates) == len(model.schedule()) - 1
    assert all(bool(((gate_BL - 0.5).abs() < 0.05).all()) for gate_BL in gates)


def test_prototypes_are_saved_but_not_trained() -> None:
    model = build("hrm_lm", d_model=512, n_heads=4, prototype_std=0.5)
    buffers, parameters = dict(model.named_buffers()), dict(model.named_parameters())
    for name in ("fast_prototype", "slow_prototype"):
        assert name in buffers
        assert name not in parameters
        assert name in model.state_dict()
        assert float(buffers[name].std()) == pytest.approx(0.5, rel=0.15)
    assert not torch.equal(model.fast_prototype, model.slow_prototype)
    assert set(buffers) == {"fast_prototype", "slow_prototype"}, "nothing else is stored beside the weights"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_loaded_model_is_the_same_model(name: str) -> None:
    model, other = lively_model(name), build(name, seed=9)
    tokens_BL = random_tokens(model, 2, 8)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(observe(model, tokens_BL)["logits"], observe(other, tokens_BL)["logits"])
    with torch.device("meta"):
        empty = build_model(model.config)
    empty.load_state_dict(model.state_dict(), strict=True, assign=True)
    assert torch.equal(observe(model, tokens_BL)["logits"], observe(empty.eval(), tokens_BL)["logits"])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_seed_decides_the_weights(name: str) -> None:
    first, same, other = build(name, seed=3), build(name, seed=3), build(name, seed=4)
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[key])
        assert "norm" in key or "bias" in key or not torch.equal(tensor, other.state_dict()[key])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_is_the_embedding(name: str) -> None:
    model = build(name)
    with torch.no_grad():
        model.embedding.weight[5] = 0
        logits = model(random_tokens(model, 1, 6)).logits
    assert bool((logits[..., 5] == 0).all())
