"""Rules 2 and 3: a row does not depend on its company, and the cached pass equals the full one (R33, R35, R36, R42)."""

import itertools

import pytest
import torch

from tests.families import FAMILIES
from tests.models.helpers import assert_same, depths, lively_model, observe, random_tokens

TOLERANCE, RELATIVE = 1e-5, 5e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_the_same_alone_and_in_any_batch(name: str) -> None:
    model = lively_model(name)
    tokens_BL = random_tokens(model, 4, 12)
    for depth in depths(model):
        together = observe(model, tokens_BL, depth)
        order = [2, 0, 3, 1]
        shuffled = observe(model, tokens_BL[order], depth)
        assert_same({key: value[order] for key, value in together.items()}, shuffled, TOLERANCE, RELATIVE)
        for row in range(4):
            alone = observe(model, tokens_BL[row : row + 1], depth)
            assert_same({key: value[row : row + 1] for key, value in together.items()}, alone, TOLERANCE, RELATIVE)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cached", [False, True])
def test_padding_on_the_right_changes_nothing(name: str, cached: bool) -> None:
    model = lively_model(name)
    tokens_BL, lengths_B = random_tokens(model, 3, 12), torch.tensor([1, 5, 12])
    with torch.no_grad():
        cache = model.new_cache(3, 20) if cached else None
        padded = model(tokens_BL, cache=cache, lengths_B=lengths_B).logits
        for row, length in enumerate(lengths_B.tolist()):
            alone = model(tokens_BL[row : row + 1, :length]).logits
            torch.testing.assert_close(padded[row : row + 1, :length], alone, atol=TOLERANCE, rtol=0)
        read = model(tokens_BL, lengths_B=lengths_B, read_B=lengths_B - 1).logits
        last = padded[torch.arange(3), lengths_B - 1][:, None]
        torch.testing.assert_close(read, last, atol=TOLERANCE, rtol=0)
        if cache is None:
            return
        assert cache.lengths_B.tolist() == [1, 5, 12]
        more_BL = random_tokens(model, 3, 4, seed=7)
        continued = model(more_BL, cache=cache).logits
        for row, length in enumerate(lengths_B.tolist()):
            full_L = torch.cat([tokens_BL[row, :length], more_BL[row]])
            alone = model(full_L[None]).logits[:, length:]
            torch.testing.assert_close(continued[row : row + 1], alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_equals_uncached_at_once_one_by_one_and_in_pieces(name: str) -> None:
    """In float64, since lively recurrences enlarge rounding; tests/inference sees to float32."""
    model = lively_model(name).double()
    tokens_BL = random_tokens(model, 2, 10)
    for depth in depths(model):
        full = observe(model, tokens_BL, depth)
        for chunks in ([10], [4, 1, 5], *([[1] * 10] if depth == model.trained_depth else [])):
            assert_same(full, observe(model, tokens_BL, depth, chunks), TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_rewound_and_reordered_cache_equals_a_fresh_run(name: str) -> None:
    model = lively_model(name)
    tokens_BL, other_BL = random_tokens(model, 3, 10), random_tokens(model, 3, 4, seed=5)
    cache = model.new_cache(3, 16)
    model(tokens_BL, cache=cache)
    cache.crop(torch.tensor([7, 10, 5]))
    assert cache.lengths_B.tolist() == [7, 10, 5]
    cache.select([2, 0])
    continued = model(other_BL[[2, 0]], cache=cache).logits
    for row, length, logits in ((2, 5, continued[:1]), (0, 7, continued[1:])):
        full_L = torch.cat([tokens_BL[row, :length], other_BL[row]])
        torch.testing.assert_close(logits, model(full_L[None]).logits[:, length:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_slot_per_application_and_depth_counts(name: str) -> None:
    """As many slots as applications, and a depth changes how many calls are really made (R41)."""
    model = lively_model(name)
    for depth in depths(model):
        schedule = model.schedule(depth)
        assert sorted(application.slot for application in schedule) == list(range(len(schedule)))
        cache = model.new_cache(1, 4, depth=depth)
        assert cache.n_slots == len(schedule)
        seen = observe(model, random_tokens(model, 1, 4), depth)
        assert len([key for key in seen if key.endswith("rms_BL")]) == len(schedule)
        assert not any(bool(keys.any()) for keys in cache.keys)
        with torch.no_grad():
            model(random_tokens(model, 1, 4), cache=cache, depth=depth)
        assert all(bool(keys.any()) for keys in cache.keys), "every slot was written"
        assert cache.lengths_B.tolist() == [4]
    by_depth = [observe(model, random_tokens(model, 1, 4), depth)["logits"] for depth in depths(model)]
    assert not any(torch.equal(shallow, deep) for shallow, deep in itertools.pairwise(by_depth))


@pytest.mark.parametrize("name", FAMILIES)
def test_same_input_same_output_and_the_global_generator_is_left_alone(name: str) -> None:
    model = lively_model(name, dropout=0.3)
    tokens_BL = random_tokens(model, 2, 8)
    state = torch.get_rng_state()
    first, second = observe(model, tokens_BL), observe(model, tokens_BL)
    assert torch.equal(state, torch.get_rng_state())
    assert_same(first, second, 0.0)
    model.train()
    assert not torch.equal(observe(model, tokens_BL)["logits"], first["logits"]), "dropout works in training"


@pytest.mark.parametrize("name", FAMILIES)
def test_no_graph_under_no_grad_and_one_otherwise(name: str) -> None:
    model = lively_model(name)
    tokens_BL = random_tokens(model, 1, 4)
    for training in (False, True):
        model.train(training)
        with torch.no_grad():
            out = model(tokens_BL, stats=True)
        assert not out.logits.requires_grad
        with torch.inference_mode():
            assert not model(tokens_BL).logits.requires_grad
        out = model(tokens_BL, stats=True)
        assert out.logits.requires_grad
        assert out.logits.dtype == torch.float32
        assert not any(record.rms_BL.requires_grad or record.change_BL.requires_grad for record in out.stats)
        assert torch.is_grad_enabled()
