"""Widths that make one model as large, or as costly, as another."""

from collections.abc import Callable, Mapping
from typing import Any

from hrmlm.errors import UserError
from hrmlm.evaluation.cost import CostReport, cost_of
from hrmlm.studies.spec import Match

STEP = 8
"""Widths are multiples of this: odd ones are slow everywhere."""
LARGEST = 1 << 16
HEAD = 64


def quantity_of(report: CostReport, quantity: str) -> float:
    """The number of a cost report that a match is about."""
    if quantity == "parameters":
        return report.parameters
    return report.forward_flops_per_token if quantity == "forward_flops" else report.training_flops_per_token


def solve(settings: Mapping[str, Any], match: Match, target: float, length: int) -> dict[str, Any]:
    """The settings with the width at which the quantity comes closest to the target.

    vary "d_model": the width first (with heads of about 64 channels, unless their number is given), then, where its
    steps are too coarse, the width of the feed-forward layer; vary "hidden": that alone. length: tokens per sequence.
    Raises: UserError if no width comes within the tolerance, naming the closest.
    """
    if match.vary == "hidden":
        candidates = [_best_hidden(settings, match, target, length)]
    else:
        widths = _around(lambda d: _value(_with_width(settings, d), match, length), target)
        candidates = [_with_width(settings, width) for width in widths]
        if "hidden" not in settings and not any(_is_close(c, match, target, length) for c in candidates):
            candidates += [_best_hidden(c, match, target, length) for c in candidates]
    best = min(candidates, key=lambda c: abs(_value(c, match, length) - target))
    error = _value(best, match, length) / target - 1
    if abs(error) > match.tolerance:
        found = ", ".join(f"{key} {best[key]}" for key in ("d_model", "hidden") if key in best)
        raise UserError(
            f"no {match.vary} gives {match.quantity} {target:,.0f} within {match.tolerance:.2%}; the closest is "
            f"{_value(best, match, length):,.0f} ({error:+.1%}) with {found}"
        )
    return best


def _value(settings: Mapping[str, Any], match: Match, length: int) -> float:
    return quantity_of(cost_of(settings, length), match.quantity)


def _is_close(settings: Mapping[str, Any], match: Match, target: float, length: int) -> bool:
    return abs(_value(settings, match, length) / target - 1) <= match.tolerance


def _with_width(settings: Mapping[str, Any], width: int) -> dict[str, Any]:
    heads = settings.get("n_heads")
    step = 2 * heads if heads else STEP
    width = max(step, width // step * step)
    return {**settings, "d_model": width, "n_heads": heads or _heads(width, settings.get("n_kv_heads") or 1)}


def _heads(width: int, kv_heads: int) -> int:
    """The number of heads, a multiple of kv_heads, whose size is even and closest to 64 channels."""
    fitting = [h for h in range(kv_heads, width // 2 + 1, kv_heads) if width % (2 * h) == 0]
    if not fitting:
        raise UserError(f"d_model {width} cannot be divided among heads for n_kv_heads {kv_heads}")
    return min(fitting, key=lambda h: abs(width / h - HEAD))


def _best_hidden(settings: Mapping[str, Any], match: Match, target: float, length: int) -> dict[str, Any]:
    sizes = _around(lambda size: _value({**settings, "hidden": size}, match, length), target)
    candidates = [{**settings, "hidden": size} for size in sizes]
    return min(candidates, key=lambda c: abs(_value(c, match, length) - target))


def _around(value: Callable[[int], float], target: float) -> list[int]:
    """The multiples of STEP just below and above the target of a rising function."""
    low, high = 1, LARGEST // STEP
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle * STEP) < target else (low, middle)
    return [low * STEP, high * STEP]
