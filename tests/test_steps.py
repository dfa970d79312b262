"""Counts of outer steps, and settings that override learned depth (R13, R41)."""

import json

import numpy as np
import pytest

from hrmlm.errors import UserError
from hrmlm.models import build_model
from hrmlm.steps import StepCounts, check_depth, depth_warning, halting_rule
from tests.families import FAMILIES


def test_counts_by_number_and_by_position() -> None:
    counts = StepCounts.of(np.array([1, 3, 3, 2, 1]), np.array([0, 1, 3, 0, 1]))
    assert counts.histogram == {1: 2, 2: 1, 3: 2}
    assert (counts.total, counts.mean) == (5, 2.0)
    assert counts.shares == {"1": 0.4, "2": 0.2, "3": 0.4}
    assert counts.by_position == (1.5, 2.0, None, 3.0)
    assert json.loads(json.dumps(counts.to_dict()))["histogram"] == {"1": 2, "2": 1, "3": 2}


def test_nothing_counted() -> None:
    counts = StepCounts.of(np.array([], dtype=int), np.array([], dtype=int))
    assert (counts.total, counts.mean, counts.shares, counts.constant) == (0, None, {}, None)


@pytest.mark.parametrize(("others", "constant"), [(0, 2), (9, 2), (10, None), (500, None)])
def test_constant_means_more_than_99_percent(others: int, constant: int | None) -> None:
    assert StepCounts({1: others, 2: 1000 - others}).constant == constant


def test_settings_that_cannot_be_run_are_refused() -> None:
    fish, plain = build_model(FAMILIES["cosmicfish"]), build_model(FAMILIES["hrm_lm"])
    for depth in (0, -1):
        for model in (fish, plain):
            with pytest.raises(UserError, match=f"depth {depth} is not possible"):
                check_depth(model, depth, None)
    for threshold in (0.0, -0.5, 1.01, float("nan")):
        with pytest.raises(UserError, match="above 0 and at most 1"):
            check_depth(fish, None, threshold)
    with pytest.raises(UserError, match="exclude each other"):
        check_depth(fish, 2, 0.5)
    with pytest.raises(UserError, match=r"halt_threshold 0\.5: this model does not learn"):
        check_depth(plain, None, 0.5)
    for threshold in (None, 0.001, 1.0):
        check_depth(fish, None, threshold)


def test_more_than_trained_is_warned_of() -> None:
    model = build_model(FAMILIES["cosmicfish"])
    assert depth_warning(model, None) is depth_warning(model, 4) is None
    assert depth_warning(model, 5) == "depth 5 is beyond the 4 the model was trained at"


def test_the_rule_is_named_for_the_record() -> None:
    fish = build_model(FAMILIES["cosmicfish"])
    assert halting_rule(fish, None, None) == ("token", 0.99)
    assert halting_rule(fish, None, 0.5) == ("token", 0.5)
    assert halting_rule(fish, 3, None) == ("fixed", None)
    assert halting_rule(build_model({**FAMILIES["cosmicfish"], "halting": "sequence"}), None, None)[0] == "sequence"
    for family in ("hrm_lm", "universal", "transformer"):
        assert halting_rule(build_model(FAMILIES[family]), None, None) == (None, None)
