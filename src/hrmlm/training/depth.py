"""Monitors of learned depth: names in the record, and a warning when every position stops at the same step."""

from collections.abc import Mapping
from typing import Any

from hrmlm.models import LanguageModel
from hrmlm.steps import CONSTANT, StepCounts

KIND = "constant_depth"


def per_target(extra: Mapping[str, float], targets: int) -> dict[str, Any]:
    """Sums of a training step as means per target token, ready for the record.

    "group/key" becomes a nested object, and "steps" is called what its mean is: {"step_cost": 0.01, "mean_steps": 2.0,
    "steps_share": {"1": 0.2, …}}.
    """
    values: dict[str, Any] = {}
    for name, total in extra.items():
        group, _, key = name.partition("/")
        if key:
            values.setdefault(group, {})[key] = total / max(1, targets)
        else:
            values[{"steps": "mean_steps"}.get(name, name)] = total / max(1, targets)
    return values


def of_evaluation(steps: StepCounts | None) -> dict[str, Any]:
    """The same names for an evaluation; nothing for models of fixed depth."""
    return {} if steps is None else {"mean_steps": steps.mean, "steps_share": steps.shares}


def constant_depth(model: LanguageModel, steps: StepCounts | None) -> str | None:
    """A warning if a model that could learn its depth has learned a constant."""
    if steps is None or not model.learns_depth or model.trained_depth == 1 or steps.constant is None:
        return None
    if steps.constant == 1:
        advice = "lower model.step_cost, set model.target_depth, or raise model.exploration"
    else:
        advice = "raise model.step_cost, or set model.target_depth"
    return (
        f"more than {100 * CONSTANT:g} % of positions stop at the same step, {steps.constant} of at most "
        f"{model.trained_depth}: depth is learned as a constant; {advice}"
    )
