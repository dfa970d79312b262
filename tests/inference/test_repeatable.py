"""No hidden state: repeatable calls, untouched global generator and training mode, flat memory (R42, O6)."""

import gc

import pytest
import torch

from hrmlm.inference import Engine, GenerationOptions, generate, stream
from tests.families import FAMILIES
from tests.inference.helpers import ANY, BYTES, each_family, greedy, small_model


@each_family
def test_the_same_call_gives_the_same_result(family: str) -> None:
    model = small_model(family)
    options = GenerationOptions(seed=11, max_new_tokens=6)
    before = torch.get_rng_state()
    first = generate(model, BYTES, ["a", "bcd"], options)
    torch.manual_seed(99)
    assert generate(model, BYTES, ["a", "bcd"], options) == first
    torch.set_rng_state(before)
    generate(model, BYTES, "a", GenerationOptions(max_new_tokens=3))
    assert torch.equal(torch.get_rng_state(), before), "the global generator stands still"


@each_family
def test_a_seed_that_was_chosen_gives_the_same_again(family: str) -> None:
    model = small_model(family)
    options = GenerationOptions(max_new_tokens=8, temperature=2.0)
    first, second = generate(model, BYTES, ["a", "a"], options)
    assert first.ids != second.ids
    again = generate(model, BYTES, "a", options.replace(seed=first.seed))[0]
    assert again.ids == first.ids


@each_family
def test_training_mode_returns_and_dropout_is_off(family: str) -> None:
    model = small_model(family, dropout=0.5).train()
    events = stream(model, BYTES, "abc", greedy(5))
    ids = []
    for event in events:
        assert model.training, "also between two tokens"
        assert torch.is_grad_enabled()
        ids.append(event.id)
    assert ids == generate(model.eval(), BYTES, "abc", greedy(5))[0].ids
    assert not model.training


def _one_of_each_kind() -> list[str]:
    kinds: dict[str, str] = {}
    for name, settings in FAMILIES.items():
        kinds.setdefault(settings["family"], name)
    return list(kinds.values())


def _live_tensors() -> tuple[int, int]:
    gc.collect()
    real = (torch.Tensor, torch.nn.Parameter)  # tests that compile leave other kinds behind, which have no memory
    tensors = [item for item in gc.get_objects() if type(item) in real]
    return len(tensors), sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("family", _one_of_each_kind())
def test_memory_is_flat_over_500_tokens(family: str) -> None:
    model = small_model(family, context=512)
    engine = Engine(model, BYTES, ["abc"], greedy(500))
    logits: list[torch.Tensor] = []
    model.register_forward_hook(lambda module, args, output: logits.__setitem__(slice(None), [output.logits]))
    events = engine.run()
    for _ in range(20):
        next(events)
    before = _live_tensors()
    for _ in range(479):
        next(events)
        assert not logits[0].requires_grad
    count, size = _live_tensors()
    assert count <= before[0], "what earlier tests left behind may go, nothing may come"
    assert size <= before[1]
    assert next(events).finish_reason == "length"
    assert len(engine.completions()[0].ids) == 500
    assert all(parameter.grad is None for parameter in model.parameters())


def test_sampled_text_follows_the_softmax() -> None:
    """500 first tokens of one prompt against the model's own probabilities."""
    model = small_model(ANY)
    rows = [GenerationOptions(seed=seed, max_new_tokens=1) for seed in range(500)]
    counts_V = torch.tensor([row.ids[0] for row in generate(model, BYTES, ["a"] * 500, rows)]).bincount(minlength=257)
    with torch.no_grad():
        expected_V = model(torch.tensor([BYTES.encode("a")])).logits[0, -1].softmax(-1) * 500
    common_V = expected_V >= 5
    observed = torch.cat([counts_V[common_V], counts_V[~common_V].sum()[None]])
    expected = torch.cat([expected_V[common_V], expected_V[~common_V].sum()[None]])
    chi_square, freedom = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    assert freedom > 5
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
