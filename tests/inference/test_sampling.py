"""The sampler at its edges (R37), its frequencies, and independence of rows and of global random state."""

from typing import Any

import pytest
import torch

from hrmlm.errors import UserError
from hrmlm.inference.sampling import Sampler, SamplingOptions

V = 50
LOGITS_V = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 2


def _draws(n: int, logits_V: torch.Tensor = LOGITS_V, **options: Any) -> list[int]:
    sampler = Sampler([SamplingOptions(**options)])
    return [int(sampler(logits_V[None])) for _ in range(n)]


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
    assert _draws(5, torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0]), **options) == [1] * 5


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
    logits_BV = LOGITS_V.expand(200, V)
    counts_V = torch.cat([sampler(logits_BV) for _ in range(n // 200)]).bincount(minlength=V)
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
    logits_SBV = torch.randn(20, len(rows), V, generator=torch.Generator().manual_seed(2))
    together = Sampler(rows)
    batch = torch.stack([together(logits_BV) for logits_BV in logits_SBV])
    for row, options in enumerate(rows):
        alone = Sampler([options])
        assert [int(alone(logits_BV[row : row + 1])) for logits_BV in logits_SBV] == batch[:, row].tolist()


def test_selected_rows_keep_their_random_numbers() -> None:
    rows = [SamplingOptions(temperature=1 + row / 4, seed=row, top_k=row + 2) for row in range(4)]
    logits_BV = LOGITS_V.expand(4, V)
    whole, reduced = Sampler(rows), Sampler(rows)
    for _ in range(3):
        assert torch.equal(whole(logits_BV), reduced(logits_BV))
    kept = torch.tensor([3, 1])
    reduced.select(kept)
    for _ in range(10):
        assert torch.equal(whole(logits_BV)[kept], reduced(logits_BV[:2]))


def test_the_global_generator_stands_still() -> None:
    before = torch.get_rng_state()
    _draws(10)
    _draws(10, top_k=4, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_are_new_for_every_call_and_can_be_used_again() -> None:
    first, second = Sampler([SamplingOptions()] * 2), Sampler([SamplingOptions()])
    assert len({*first.seeds, *second.seeds}) == 3
    again = Sampler([SamplingOptions(seed=first.seeds[0])])
    logits_BV = LOGITS_V[None]
    assert [int(again(logits_BV)) for _ in range(20)] == [int(first(logits_BV.expand(2, V))[0]) for _ in range(20)]
