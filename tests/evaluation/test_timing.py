"""Timing: known delays come out, first calls and too few rounds do not spoil it (R60)."""

import statistics
import time

import pytest

from hrmlm.errors import UserError
from hrmlm.evaluation.timing import Timing, interleaved


def test_a_known_delay_is_measured_and_a_slow_first_call_does_not_move_the_median() -> None:
    """Known: what a busy machine really made of a pause of 50 ms, not 50 ms."""
    pauses: list[float] = []
    nothing: list[None] = []

    def delay() -> None:
        start = time.perf_counter()
        time.sleep(0.05 if pauses else 0.5)
        pauses.append(time.perf_counter() - start)

    timings = interleaved({"delay": delay, "none": lambda: nothing.append(None)}, iterations=10, warmup=1)
    assert timings["delay"].median == pytest.approx(statistics.median(pauses[1:]), rel=0.1)
    assert len(timings["delay"].seconds) == len(timings["none"].seconds) == 9
    assert len(pauses) == len(nothing) == 10


@pytest.mark.parametrize(("iterations", "warmup"), [(3, 3), (2, 3), (0, 0), (5, -1)])
def test_nothing_to_measure_is_refused(iterations: int, warmup: int) -> None:
    with pytest.raises(UserError, match="leave nothing to measure"):
        interleaved({"call": lambda: None}, iterations=iterations, warmup=warmup)


def test_ratios_compare_within_rounds() -> None:
    slow_moment = Timing((1.0, 10.0, 1.0)), Timing((2.0, 20.0, 2.0))
    assert slow_moment[1].ratio(slow_moment[0]) == 2.0
