"""Means with 95 % intervals over seeds (Student's t), and differences of runs paired by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95
ENOUGH = 3
"""Fewer seeds than this show no spread worth the name: the report then says so and draws no conclusion."""


def coverage(t: float, degrees: int) -> float:
    """P(|T| ≤ t) of Student's t with `degrees` ≥ 1 degrees of freedom (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    if degrees == 1:
        return 2 * theta / math.pi
    term = total = 1.0
    first = 3 if degrees % 2 else 2
    for k in range(first, degrees - 1, 2):  # factors (k − 1)/k · cos²θ
        term *= (k - 1) / k * cosine * cosine
        total += term
    if degrees % 2:
        return 2 / math.pi * (theta + sine * cosine * total)
    return sine * total


def t_quantile(degrees: int, level: float = LEVEL) -> float:
    """The t with P(|T| ≤ t) = level; 12.706 for one degree of freedom at 95 %."""
    if degrees < 1 or not 0 < level < 1:
        raise ValueError(f"{degrees} degrees of freedom, level {level}: at least 1, and between 0 and 1")
    low, high = 0.0, 1.0
    while coverage(high, degrees) < level:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if coverage(middle, degrees) < level else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Summary:
    """Of n numbers: mean, standard deviation (n − 1), and half the width of the 95 % interval of the mean.

    The last two are None for a single number.
    """

    n: int
    mean: float
    deviation: float | None
    half_width: float | None

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.half_width is None else self.mean + self.half_width

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def summarize(numbers: Sequence[float]) -> Summary | None:
    """Summary of the numbers; None without any."""
    if not numbers:
        return None
    n, mean = len(numbers), statistics.fmean(numbers)
    if n == 1:
        return Summary(1, mean, None, None)
    deviation = statistics.stdev(numbers)
    return Summary(n, mean, deviation, t_quantile(n - 1) * deviation / math.sqrt(n))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Summary | None:
    """Summary of ours − theirs over the seeds that both have."""
    return summarize([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])
