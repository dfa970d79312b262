"""The sampler at its edges (R37), its frequencies, and independence of rows and of global random state."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hrmlm.errors import UserError
from hrmlm.inference.sampling import Sampler, SamplingOptions, exponential_noise

V = 50
LOGITS_V = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 2


def _draws(n: int, logits_V: torch.Tensor = LOGITS_V, **options: Any) -> list[int]:
    sampler = Sampler([SamplingOptions(**options)])
    return sampler(logits_V.expand(1, n, V), [0])[0].tolist()


@pytest.mark.parametrize("top_p", [0, 1e-9, 1])
@pytest.mark.parametrize("top_k", [None, 0, 1, V, V + 1, 10**6, 2**70])
@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-320, 1, 100, 1e308])
def test_edges(temperature: float, top_k: int | None, top_p: float) -> None:
    drawn = _draws(12, temperature=temperature, top_k=top_k, top_p=top_p, seed=3)
    assert all(0 <= token < V for token in drawn)
    if temperature <= 1e-8 or top_k == 1 or top_p < 1:
        assert set(drawn) == {int(LOGITS_V.argmax())}
    else:
        assert drawn == _draws(12, temperature=temperature, seed=3)
        assert len(set(drawn)) > 3


def test_no_limit_is_the_same_written_in_any_way() -> None:
    ways: list[dict[str, Any]] = [{}, {"top_p": 1.0}, *({"top_k": k} for k in (0, None, V, V + 1, 10**6))]
    assert len({tuple(_draws(50, seed=5, **way)) for way in ways}) == 1


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "seed"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "much"])
def test_impossible_values_name_the_option(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"sampling\.{name}: "):
        SamplingOptions.parse({name: value}, "sampling")


def test_top_p_above_one_is_refused() -> None:
    with pytest.raises(UserError, match="top_p"):
        SamplingOptions.parse({"top_p": 1.01}, "sampling")


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}])
def test_ties_go_to_the_lowest_id(options: dict[str, Any]) -> None:
    logits_V = torch.cat([torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0]), torch.full((V - 5,), -3.0)])
    assert _draws(5, logits_V, **options) == [1] * 5


def _expected_frequencies(logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Straight from the definitions, with a loop."""
    probability = (logits_V.double() / temperature).softmax(-1)
    order = sorted(range(len(logits_V)), key=lambda token: -float(logits_V[token]))[:top_k]
    total, reached, kept = float(probability[order].sum()), 0.0, []
    for token in order:
        if reached >= top_p:
            break
        kept.append(token)
        reached += float(probability[token]) / total
    frequencies = torch.zeros_like(probability)
    frequencies[kept] = probability[kept] / probability[kept].sum()
    return frequencies


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 50, 1.0), (0.7, 8, 1.0), (1.5, 50, 0.8), (1.3, 12, 0.6)]
)
def test_frequencies_agree_with_the_softmax(temperature: float, top_k: int, top_p: float) -> None:
    n = 20_000
    rows = [SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed) for seed in range(200)]
    sampler = Sampler(rows)
    counts_V = sampler(LOGITS_V.expand(200, n // 200, V), [0] * 200).flatten().bincount(minlength=V)
    expected_V = _expected_frequencies(LOGITS_V, temperature, top_k, top_p) * n
    assert counts_V[expected_V == 0].sum() == 0
    common_V = expected_V >= 5
    observed = torch.cat([counts_V[common_V], counts_V[~common_V].sum()[None]])
    expected = torch.cat([expected_V[common_V], expected_V[~common_V].sum()[None]])
    chi_square = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = int((expected > 0).sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5, f"{chi_square=} for {freedom} degrees of freedom"


def test_impossible_tokens_are_never_drawn() -> None:
    logits_V = torch.full((V,), -torch.inf)
    logits_V[[3, V - 2]] = torch.tensor([0.0, 1.0])
    assert set(_draws(300, logits_V, seed=0)) == {3, V - 2}
    assert set(_draws(300, logits_V, seed=0, top_k=10)) == {3, V - 2}


def test_a_row_of_a_mixed_batch_draws_what_it_draws_alone() -> None:
    rows = [
        SamplingOptions(temperature=0),
        SamplingOptions(temperature=1.0, seed=1),
        SamplingOptions(temperature=2.0, seed=1, top_k=5),
        SamplingOptions(temperature=0.5, seed=2, top_p=0.7),
        SamplingOptions(temperature=1e-8, seed=2),
    ]
    logits_BLV = torch.randn(len(rows), 20, V, generator=torch.Generator().manual_seed(2))
    batch_BL = Sampler(rows)(logits_BLV, range(len(rows)))
    for row, options in enumerate(rows):
        assert torch.equal(Sampler([options])(logits_BLV[row : row + 1], [row])[0], batch_BL[row])


@given(first=st.integers(0, 2**40), cut=st.integers(1, 9))
def test_a_token_does_not_depend_on_when_it_is_drawn(first: int, cut: int) -> None:
    """Drawn at once or in parts, in any order and any number of times: its number decides."""
    sampler, logits_1LV = Sampler([SamplingOptions(seed=4)]), LOGITS_V.expand(1, 10, V)
    whole = sampler(logits_1LV, [first])
    later = sampler(logits_1LV[:, cut:], [first + cut])
    assert torch.equal(whole, torch.cat([sampler(logits_1LV[:, :cut], [first]), later], dim=1))


def test_noise_is_exponential_and_independent() -> None:
    """Textbook values: mean and standard deviation 1, share above 1 is 1/e; streams do not repeat."""
    numbers = torch.cat([exponential_noise(seed, number, 500) for seed in (0, 2**63 - 1) for number in range(100)])
    assert len(numbers.unique()) == len(numbers)
    assert float(numbers.min()) > 0
    assert abs(float(numbers.mean()) - 1) < 0.015
    assert abs(float(numbers.std()) - 1) < 0.02
    assert abs(float((numbers > 1).double().mean()) - math.exp(-1)) < 0.006


def test_near_distributions_draw_the_same_token_nearly_always() -> None:
    """The bound that drafting lives on: equal in at least (1 - d) / (1 + d) of the draws at total variation d."""
    n, sampler = 4000, Sampler([SamplingOptions(seed=2)])
    for spread in (0.05, 0.2, 0.5):
        near_V = LOGITS_V + spread * torch.randn(V, generator=torch.Generator().manual_seed(3))
        d = float((LOGITS_V.softmax(-1) - near_V.softmax(-1)).abs().sum() / 2)
        same = sampler(LOGITS_V.expand(1, n, V), [0]) == sampler(near_V.expand(1, n, V), [0])
        share = float(same.double().mean())
        assert share > (1 - d) / (1 + d) - 4 * (0.25 / n) ** 0.5
        assert share < 1 - d + 4 * (0.25 / n) ** 0.5, "no coupling can do better than 1 - d"


def test_selected_rows_keep_their_random_numbers() -> None:
    rows = [SamplingOptions(temperature=1 + row / 4, seed=row, top_k=row + 2) for row in range(4)]
    logits_BLV = LOGITS_V.expand(4, 10, V)
    whole, reduced = Sampler(rows), Sampler(rows)
    assert torch.equal(whole(logits_BLV, [0] * 4), reduced(logits_BLV, [0] * 4))
    kept = torch.tensor([3, 1])
    reduced.select(kept)
    assert torch.equal(whole(logits_BLV, [10] * 4)[kept], reduced(logits_BLV[:2], [10] * 2))


def test_the_global_generator_stands_still() -> None:
    before = torch.get_rng_state()
    _draws(10)
    _draws(10, top_k=4, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_are_new_for_every_call_and_can_be_used_again() -> None:
    first, second = Sampler([SamplingOptions()] * 2), Sampler([SamplingOptions()])
    assert len({*first.seeds, *second.seeds}) == 3
    again = Sampler([SamplingOptions(seed=first.seeds[0])])
    logits_BLV = LOGITS_V.expand(2, 20, V)
    assert torch.equal(again(logits_BLV[:1], [0])[0], first(logits_BLV, [0, 0])[0])
