"""Depth of recurrent models: settings that override it, and counts of the outer steps that positions really took."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hrmlm.errors import UserError
from hrmlm.models.base import LanguageModel
from hrmlm.models.exit_policy import parse_exit

CONSTANT = 0.99
"""Depth counts as constant when a larger share of the positions than this stops at the same step."""


@dataclass(frozen=True)
class StepCounts:
    """Outer steps of the positions that were read, of models that decide their depth themselves.

    histogram: number of positions by steps. by_position: mean steps by position in the window, from 0 on (None: no
    token was scored there).
    """

    histogram: dict[int, int]
    by_position: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, steps: NDArray[np.integer], positions: NDArray[np.integer] | None = None) -> "StepCounts":
        """Count steps (N,), and their means at positions (N,) of the window."""
        numbers, counts = np.unique(steps, return_counts=True)
        histogram = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        if positions is None or not len(positions):
            return cls(histogram)
        totals, places = np.bincount(positions, weights=steps), np.bincount(positions)
        means = tuple(t / n if n else None for t, n in zip(totals.tolist(), places.tolist(), strict=True))
        return cls(histogram, means)

    @property
    def total(self) -> int:
        """Number of positions."""
        return sum(self.histogram.values())

    @property
    def mean(self) -> float | None:
        """Mean steps per position; None without positions."""
        return sum(n * count for n, count in self.histogram.items()) / self.total if self.total else None

    @property
    def shares(self) -> dict[str, float]:
        """Share of the positions by steps, with keys for JSON; they sum to 1."""
        return {str(n): count / self.total for n, count in self.histogram.items()}

    @property
    def constant(self) -> int | None:
        """The step at which more than 99 % of the positions stop, if there is one."""
        return next((n for n, count in self.histogram.items() if count > CONSTANT * self.total), None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as values for JSON."""
        histogram = {str(n): count for n, count in self.histogram.items()}
        return {"mean": self.mean, "histogram": histogram, "by_position": list(self.by_position)}


def check_depth(model: LanguageModel, depth: int | None, halt_threshold: float | None) -> None:
    """Raises: UserError for a depth or halting threshold that this model cannot run with."""
    model.schedule(depth)
    if halt_threshold is not None:
        model.check_threshold(halt_threshold, depth)


def depth_keywords(
    model: LanguageModel, depth: int | None = None, halt_threshold: float | None = None, exit: str | None = None
) -> dict[str, Any]:
    """The keywords `depth`, `halt_threshold` and `exit` of the model's forward pass for these settings.

    exit: a policy such as "change:0.1" (see hrmlm.models.exit_policy).
    Raises: UserError for settings that this model cannot run with.
    """
    if exit is None:
        check_depth(model, depth, halt_threshold)
        return {"depth": depth, "halt_threshold": halt_threshold, "exit": None}
    if depth is not None or halt_threshold is not None:
        raise UserError(f"exit {exit}, depth and halt_threshold exclude each other; give one of them")
    return parse_exit(exit).keywords(model)


def depth_warning(model: LanguageModel, depth: int | None) -> str | None:
    """What to tell someone who asks for more depth than the model was trained at."""
    if depth is None or depth <= model.trained_depth:
        return None
    return f"depth {depth} is beyond the {model.trained_depth} the model was trained at"


def halting_rule(
    model: LanguageModel, depth: int | None, halt_threshold: float | None, exit: Any = None
) -> tuple[str | None, float | None]:
    """Name of the rule that decides the depth, and its threshold. (None, None) of models whose depth is fixed anyway.

    "fixed": a depth that was asked for; "token": each position stops when its halting probabilities sum to the
    threshold; "change", "kl": an exit policy, and its number; other names are those of the family's configuration.
    """
    if exit is not None:
        return exit.name, exit.limit
    rule = getattr(model.config, "halting", None)
    if rule in (None, "none"):
        return None, None
    if depth is not None:
        return "fixed", None
    if rule != "token":
        return rule, None
    return rule, 1 - model.config.epsilon if halt_threshold is None else halt_threshold
