"""Several corpora in one stream of windows, by fixed shares."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hrmlm.data.order import permute
from hrmlm.data.tokens import TokenWindows, Windows
from hrmlm.errors import UserError

LONGEST_PERIOD = 10_000
"""Windows after which a mixture has its exact shares again, at the latest; shares are therefore multiples of 1/10,000
where no shorter period gives them exactly."""


class MixedWindows(Windows):
    """Windows of several corpora in fixed shares.

    The sequence is cut into periods. In each, every corpus has the same number of windows, its quota, and a permutation
    drawn from (seed, period) says which places they take. So corpus and place in it follow from the number of a window
    alone, and after any whole number of periods the shares are exact. Each corpus goes through its own epochs in an
    order of its own.

    parts: the corpora, of one window and batch size. weights: their shares, as `shares` gives them.
    Raises: UserError for a weight so small that a period has no place for it.
    """

    def __init__(self, parts: Sequence[TokenWindows], weights: Sequence[Fraction], seed: int = 0) -> None:
        self.parts, self.seed = list(parts), seed
        self.window, self.batch_size = parts[0].window, parts[0].batch_size
        self.quotas = quotas(weights)
        self.ends = np.cumsum(self.quotas)
        self.period = int(self.ends[-1])

    def _sources(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each window the corpus, and its number among the windows of this corpus."""
        periods, places = np.divmod(numbers, self.period)
        slots = np.empty_like(places)
        for period in np.unique(periods):
            rows = periods == period
            slots[rows] = permute(places[rows], self.period, self.seed, int(period))
        sources = np.searchsorted(self.ends, slots, side="right")
        quotas_N = np.array(self.quotas)[sources]
        return sources, periods * quotas_N + slots - (self.ends[sources] - quotas_N)

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.integer]:
        """See Windows."""
        ids = np.empty((len(numbers), self.window + 1), dtype=np.int64)
        sources, places = self._sources(numbers)
        for number in np.unique(sources):
            rows = sources == number
            ids[rows] = self.parts[number].read(places[rows])
        return ids

    def counts(self, total: int) -> list[int]:
        """How many of the first `total` windows come from each corpus."""
        periods, rest = divmod(total, self.period)
        sources, _ = self._sources(np.arange(periods * self.period, total))
        begun = np.bincount(sources, minlength=len(self.parts)) if rest else np.zeros(len(self.parts), dtype=np.int64)
        return [periods * quota + int(more) for quota, more in zip(self.quotas, begun, strict=True)]


def shares(weights: Sequence[float]) -> list[Fraction]:
    """Weights as exact shares that sum to 1; a weight is the decimal number that it was written as."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def quotas(weights: Sequence[Fraction]) -> list[int]:
    """Windows of each corpus in a period: exact where a period of at most LONGEST_PERIOD allows it, else rounded so
    that they sum to it (largest remainder). Raises: UserError for a weight whose quota would be 0."""
    period = min(math.lcm(*(weight.denominator for weight in weights)), LONGEST_PERIOD)
    found = [math.floor(weight * period) for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda n: found[n] - weights[n] * period)
    for number in by_remainder[: period - sum(found)]:
        found[number] += 1
    if 0 in found:
        weight = float(weights[found.index(0)])
        raise UserError(
            f"the share {weight:.2g} of a corpus is too small: at least 1 in {LONGEST_PERIOD:,} is possible"
        )
    return found
