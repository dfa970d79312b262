"""Which window comes from which corpus: exact shares, nothing twice, and a function of the number alone."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrmlm.data.mixture import LONGEST_PERIOD, MixedWindows, quotas, shares
from hrmlm.data.tokens import TokenWindows, loader
from hrmlm.errors import UserError

WEIGHTS = st.lists(st.integers(1, 60), min_size=2, max_size=5)


def mixed(weights: list[float], windows_each: int = 7, batch_size: int = 3, seed: int = 0) -> MixedWindows:
    """Corpus n holds ids 1000 n, 1000 n + 1, …, in windows of 4."""
    parts = [
        TokenWindows(np.arange(4 * windows_each + 1 + n) + 1000 * n, 4, batch_size, n) for n in range(len(weights))
    ]
    return MixedWindows(parts, shares(weights), seed)


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=6))
def test_quotas_are_the_shares_to_one_window(weights):
    exact = shares(weights)
    assert sum(exact) == 1
    if min(exact) * LONGEST_PERIOD < 1:
        return
    found = quotas(exact)
    assert sum(found) <= LONGEST_PERIOD
    assert all(abs(quota - share * sum(found)) < 1 for quota, share in zip(found, exact, strict=True))


def test_round_weights_have_short_exact_periods():
    assert quotas(shares([0.7, 0.3])) == [7, 3]
    assert quotas(shares([1, 1, 1])) == [1, 1, 1]
    assert quotas(shares([3, 1])) == [3, 1]
    assert shares([0.1, 0.3]) == [Fraction(1, 4), Fraction(3, 4)]
    assert sum(quotas(shares([1, 2**0.5, 3**0.5]))) == LONGEST_PERIOD
    with pytest.raises(UserError, match=r"share 1e-06 .* too small: at least 1 in 10,000"):
        quotas(shares([1e-6, 1]))


@given(WEIGHTS, st.integers(0, 2**40), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_every_period_has_its_quotas_and_no_window_of_a_corpus_is_left_out(weights, start, seed):
    data = mixed(weights, seed=seed)
    first = start // data.period * data.period
    sources, places = data._sources(np.arange(first, first + 2 * data.period))
    for part in np.split(sources, 2):
        assert np.bincount(part, minlength=len(weights)).tolist() == data.quotas
    for number, quota in enumerate(data.quotas):  # consecutive numbers, each once
        mine = np.sort(places[sources == number])
        assert mine.tolist() == list(range(first // data.period * quota, first // data.period * quota + 2 * quota))


@given(WEIGHTS, st.integers(0, 700), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_counts_are_what_was_read(weights, total, seed):
    data = mixed(weights, seed=seed)
    read = Counter(int(row[0]) // 1000 for row in data.read(np.arange(total)))
    assert data.counts(total) == [read[number] for number in range(len(weights))]


def test_a_corpus_goes_through_its_own_epochs():
    data = mixed([0.7, 0.3], windows_each=7)
    rows = data.read(np.arange(20 * data.period))
    for number in range(2):
        starts = [int(row[0]) for row in rows if row[0] // 1000 == number]
        assert len(starts) == 20 * data.quotas[number]
        counted = Counter((start - 1000 * number) // 4 for start in starts)
        assert max(counted.values()) - min(counted.values()) <= 1 or number == 1  # its first window may be shifted
        for row in rows[:50]:
            assert np.array_equal(row, np.arange(row[0], row[0] + 5))


def test_within_a_period_the_order_is_shuffled():
    data = mixed([0.5, 0.5])
    assert data.period == 2
    firsts = data._sources(np.arange(0, 400, 2))[0]
    assert 60 < firsts.sum() < 140
    long = mixed([37, 63])
    sources = long._sources(np.arange(1000))[0].reshape(10, -1)
    assert len({tuple(row) for row in sources}) == 10
    assert len({tuple(row) for row in mixed([37, 63], seed=1)._sources(np.arange(1000))[0].reshape(10, -1)}) == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_mixture_goes_on_as_if_nothing_had_happened(workers):
    data = mixed([5, 2, 1])
    expected = [data[index] for index in range(30)]
    resumed = loader(mixed([5, 2, 1]), 13, 30, workers)
    assert all(torch.equal(a.inputs_BL, b.inputs_BL) for a, b in zip(expected[13:], resumed, strict=True))


@given(st.integers(0, 10**12), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_rows_are_those_of_the_batch(index, start, more):
    data = mixed([2, 1, 1], batch_size=6)
    batch, rows = data[index], data.rows(index, start, start + more)
    assert torch.equal(rows.inputs_BL, batch.inputs_BL[start : start + more])
    assert torch.equal(rows.targets_BL, batch.targets_BL[start : start + more])
