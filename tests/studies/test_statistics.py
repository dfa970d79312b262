"""Intervals against textbook values and an independent computation of Student's t."""

import math
import statistics

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hrmlm.studies.statistics import coverage, paired, summarize, t_quantile

# Fisher & Yates, Statistical Tables: two-sided 5 % (and 1 %) points of Student's t.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045, 30: 2.042, 120: 1.980}
TABLE_99 = {1: 63.657, 2: 9.925, 5: 4.032, 10: 3.169, 30: 2.750}


@pytest.mark.parametrize(("degrees", "value"), TABLE.items())
def test_quantiles_are_those_of_the_table(degrees: int, value: float) -> None:
    assert t_quantile(degrees) == pytest.approx(value, abs=6e-4)


@pytest.mark.parametrize(("degrees", "value"), TABLE_99.items())
def test_other_levels(degrees: int, value: float) -> None:
    assert t_quantile(degrees, 0.99) == pytest.approx(value, abs=6e-4)


@given(st.floats(0, 200), st.integers(1, 300))
def test_coverage_is_the_incomplete_beta_function(t: float, degrees: int) -> None:
    with mpmath.workdps(30):
        share = mpmath.mpf(t) ** 2 / (degrees + mpmath.mpf(t) ** 2)
        expected = mpmath.betainc(0.5, mpmath.mpf(degrees) / 2, 0, share, regularized=True)
    assert coverage(t, degrees) == pytest.approx(float(expected), abs=1e-9)


@given(st.integers(1, 200), st.floats(0.01, 0.999))
def test_quantile_inverts_coverage(degrees: int, level: float) -> None:
    assert coverage(t_quantile(degrees, level), degrees) == pytest.approx(level, abs=1e-9)


@pytest.mark.parametrize(("degrees", "level"), [(0, 0.95), (-1, 0.95), (3, 0.0), (3, 1.0)])
def test_nonsense_is_refused(degrees: int, level: float) -> None:
    with pytest.raises(ValueError, match="degrees of freedom"):
        t_quantile(degrees, level)


def test_interval_of_a_textbook_sample() -> None:
    """Student's own data of 1908: additional hours of sleep with the second drug; 95 %: 0.90 to 3.76."""
    sample = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = summarize(sample)
    assert found is not None
    assert found.mean == pytest.approx(2.33)
    assert found.deviation == pytest.approx(2.002, abs=1e-3)
    assert (found.low, found.high) == (pytest.approx(0.898, abs=1e-3), pytest.approx(3.762, abs=1e-3))
    assert found.excludes_zero


def test_paired_differences_of_the_same_textbook() -> None:
    """The difference between the two drugs: mean 1.58, t = 4.06, 95 %: 0.70 to 2.46."""
    first = dict(enumerate([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]))
    second = dict(enumerate([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]))
    found = paired(second, first)
    assert found is not None
    assert found.deviation is not None
    assert found.mean / (found.deviation / math.sqrt(found.n)) == pytest.approx(4.062, abs=1e-3)
    assert (found.low, found.high) == (pytest.approx(0.700, abs=1e-3), pytest.approx(2.460, abs=1e-3))


def test_pairs_are_the_seeds_that_both_have() -> None:
    found = paired({0: 1.0, 1: 2.0, 5: 9.0}, {1: 1.5, 0: 0.0, 7: 3.0})
    assert found is not None
    assert (found.n, found.mean) == (2, 0.75)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_number_has_no_interval_and_none_no_mean() -> None:
    one = summarize([3.0])
    assert one is not None
    assert (one.mean, one.half_width, one.low, one.high, one.excludes_zero) == (3.0, None, None, None, False)
    assert summarize([]) is None


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20))
def test_interval_is_centred_and_scales_with_the_deviation(numbers: list[float]) -> None:
    found = summarize(numbers)
    assert found is not None
    assert found.half_width is not None
    error = statistics.stdev(numbers) / math.sqrt(len(numbers))
    assert found.half_width == pytest.approx(t_quantile(len(numbers) - 1) * error)
