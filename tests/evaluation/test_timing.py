"""Timing: known delays come out, first calls and too few rounds do not spoil it (R60)."""

import time

import pytest

from hrmlm.errors import UserError
from hrmlm.evaluation.timing import Timing, interleaved


def test_a_known_delay_is_measured_and_a_slow_first_call_does_not_move_the_median() -> None:
    calls: list[str] = []

    def delay() -> None:
        time.sleep(0.05 if "delay" in calls else 0.5)
        calls.append("delay")

    timings = interleaved({"delay": delay, "none": lambda: calls.append("none")}, iterations=10, warmup=1)
    assert timings["delay"].median == pytest.approx(0.05, rel=0.1)
    assert len(timings["delay"].seconds) == len(timings["none"].seconds) == 9
    assert calls.count("delay") == calls.count("none") == 10


@pytest.mark.parametrize(("iterations", "warmup"), [(3, 3), (2, 3), (0, 0), (5, -1)])
def test_nothing_to_measure_is_refused(iterations: int, warmup: int) -> None:
    with pytest.raises(UserError, match="leave nothing to measure"):
        interleaved({"call": lambda: None}, iterations=iterations, warmup=warmup)


def test_ratios_compare_within_rounds() -> None:
    slow_moment = Timing((1.0, 10.0, 1.0)), Timing((2.0, 20.0, 2.0))
    assert slow_moment[1].ratio(slow_moment[0]) == 2.0
