"""Cache policies: `full` is exact, the others are what they say, and a byte that is promised is a byte allocated."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hrmlm.errors import UserError
from hrmlm.models import LanguageModel
from hrmlm.models.cache_policy import FULL, parse_cache_policy
from hrmlm.models.exit_policy import StateChange
from tests.families import FAMILIES
from tests.models.cache_policy_reference import reference
from tests.models.helpers import build, lively_model, random_tokens

SHARING = [name for name in FAMILIES if build(name).cycle_slots is not None and not build(name).carries_state]
POLICIES = ["full", "first", "last", "every:2", "every:3"]
each_policy = pytest.mark.parametrize("policy", POLICIES)
each_family = pytest.mark.parametrize("family", SHARING)
LENGTH = 9


def fixed_depth(model: LanguageModel) -> int | None:
    """A depth at which all positions run alike; None where they do anyway."""
    return model.trained_depth if model.learns_depth else None


@torch.no_grad()
def through_cache(model: LanguageModel, tokens_BL: Tensor, policy: str, chunks: list[int]) -> Tensor:
    depth, chosen = fixed_depth(model), parse_cache_policy(policy)
    cache = model.new_cache(*tokens_BL.shape, depth=depth, policy=chosen)
    chunks = [1] * tokens_BL.shape[1] if chosen.is_sequential else chunks
    return torch.cat([model(part, cache=cache, depth=depth).logits for part in tokens_BL.split(chunks, dim=1)], dim=1)


@each_family
@each_policy
def test_a_policy_is_what_it_says_however_the_text_is_fed(family: str, policy: str) -> None:
    model = lively_model(family).double()
    tokens_BL, depth = random_tokens(model, 2, LENGTH), fixed_depth(model)
    expected = reference(model, tokens_BL, policy, depth)
    for chunks in ([LENGTH], [4, 1, 4], [1] * LENGTH):
        seen = through_cache(model, tokens_BL, policy, chunks)
        torch.testing.assert_close(seen, expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        exact = model(tokens_BL, depth=depth).logits
    cycles = model.trained_depth * model.n_passes
    same = policy == "full" or cycles == 1
    assert (float((expected - exact).abs().max()) < 1e-5) == same


@each_family
@each_policy
@torch.no_grad()
def test_rows_of_unequal_length_crop_and_select(family: str, policy: str) -> None:
    """After rows left and texts were cut back, what follows is what a fresh text would give."""
    model, chosen = lively_model(family).double(), parse_cache_policy(policy)
    depth = fixed_depth(model)
    tokens_BL, more_BL = random_tokens(model, 3, LENGTH), random_tokens(model, 3, 4, seed=5)
    cache = model.new_cache(3, 20, depth=depth, policy=chosen)
    lengths_B = torch.tensor([9, 5, 2])
    step = 1 if chosen.is_sequential else 4
    for start in range(0, LENGTH, step):
        part_BL = tokens_BL[:, start : start + step]
        model(part_BL, cache=cache, lengths_B=(lengths_B - start).clamp(0, part_BL.shape[1]), depth=depth)
    cache.crop(torch.tensor([6, 9, 1]))
    assert cache.lengths_B.tolist() == [6, 5, 1]
    cache.select([2, 0])
    seen = torch.cat(
        [model(part_BL, cache=cache, depth=depth).logits for part_BL in more_BL[[2, 0]].split(step, dim=1)], dim=1
    )
    for row, length, logits_LV in ((2, 1, seen[0]), (0, 6, seen[1])):
        text_L = torch.cat([tokens_BL[row, :length], more_BL[row]])
        expected = reference(model, text_L[None], policy, depth)[0, length:]
        torch.testing.assert_close(logits_LV, expected, atol=1e-5, rtol=0)


@each_family
@each_policy
def test_bytes_are_those_of_the_sets_that_are_kept(family: str, policy: str) -> None:
    model = build(family)
    depth = fixed_depth(model)
    caches = {name: model.new_cache(3, 7, depth=depth, policy=parse_cache_policy(name)) for name in ("full", policy)}
    first, stride = model.cycle_slots
    n_slots = len(model.schedule(depth))
    k = {"full": 1, "first": n_slots, "last": n_slots}.get(policy) or int(policy.partition(":")[2])
    expected = sum(slot < first or (slot - first) // stride % k == 0 for slot in range(n_slots))
    tensors = caches[policy].keys + caches[policy].values
    assert caches[policy].n_slots == n_slots
    assert len(tensors) == len({tensor.data_ptr() for tensor in tensors}) == 2 * expected
    assert caches[policy].bytes == sum(tensor.nbytes for tensor in tensors)
    assert caches[policy].bytes * n_slots == caches["full"].bytes * expected


@given(st.integers(1, 9), st.integers(0, 3), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_every_slot_reads_what_has_been_written_in_the_same_call(n: int, first: int, stride: int, k: int) -> None:
    n_slots = first + n * stride
    for name in ("full", "first", "last", f"every:{k}"):
        layout = parse_cache_policy(name).layout(n_slots, (first, stride))
        written: set[int] = set()
        for stored, writes in zip(layout.storage, layout.writes, strict=True):
            written |= {stored} if writes else set()
            assert stored in written
        assert written == set(range(layout.n_stored)), "no tensor without use"
    assert FULL.layout(n_slots, (first, stride)).storage == tuple(range(n_slots))


@pytest.mark.parametrize("policy", ["first", "last", "every:2"])
def test_what_a_model_cannot_is_refused(policy: str) -> None:
    chosen, tokens_BL = parse_cache_policy(policy), torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(UserError, match=f"cache policy {policy} needs cycles that share"):
        build("transformer").new_cache(1, 4, policy=chosen)
    for name in ("universal-halting", "cosmicfish"):
        with pytest.raises(UserError, match="all positions at the same depth"):
            build(name).new_cache(1, 4, policy=chosen)
        model = build(name)
        cache = model.new_cache(1, 4, depth=2, policy=chosen)
        with pytest.raises(UserError, match="all positions at the same depth"):
            model(tokens_BL, cache=cache, halt_threshold=0.5)
    model = build("hrm_lm")
    with pytest.raises(UserError, match="all positions at the same depth"):
        model(tokens_BL, cache=model.new_cache(1, 4, policy=chosen), exit=StateChange(0.1))


def test_last_refuses_several_tokens_at_once() -> None:
    model = build("hrm_lm")
    cache = model.new_cache(1, 4, policy=parse_cache_policy("last"))
    with pytest.raises(UserError, match="one at a time and 2 came"):
        model(torch.zeros(1, 2, dtype=torch.long), cache=cache)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("firs", "did you mean 'first'"),
        ("every", "did you mean 'every:K'"),
        ("every:0", "from 1 on"),
        ("every:x", "from 1 on"),
        ("every:-1", "from 1 on"),
        ("every:99999999999999", "from 1 on"),
        ("every:²", "from 1 on"),
        ("", "valid: "),
    ],
)
def test_mistakes_are_told(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_cache_policy(text)


def test_every_1_is_full_in_all_but_name() -> None:
    layout = parse_cache_policy("every:1").layout(7, (1, 3))
    assert layout == FULL.layout(7, (1, 3))
