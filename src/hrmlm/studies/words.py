"""Sentences made from the numbers of a study. They claim nothing that the intervals do not show."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hrmlm.studies.expand import factor, space_of
from hrmlm.studies.statistics import ENOUGH, Summary

if TYPE_CHECKING:
    from hrmlm.studies.collect import Findings
    from hrmlm.studies.spec import Search


def number(summary: Summary | None, digits: int = 3) -> str:
    """Mean and half width of the 95 % interval: "4.312 ± 0.021"."""
    if summary is None:
        return "–"
    mean = f"{summary.mean:,.{digits}f}"
    return mean if summary.half_width is None else f"{mean} ± {summary.half_width:,.{digits}f}"


def signed(summary: Summary, digits: int = 3) -> str:
    """The same of a difference, with its sign."""
    half = "" if summary.half_width is None else f" ± {summary.half_width:.{digits}f}"
    return f"{summary.mean:+.{digits}f}{half}"


def summary(findings: "Findings") -> list[str]:
    """The summary of a report, as sentences."""
    sentences = [_progress(findings)]
    if findings.conditions and all(c.loss is None for c in findings.conditions):
        return [*sentences, "There is no result yet."]
    trained = any(result["steps"] for result in findings.every_result())
    if trained:
        sentences += _order(findings)
        sentences += _differences(findings)
        sentences += _search(findings)
    sentences += _sizes(findings)
    sentences += _roles(findings)
    return sentences


def _progress(findings: "Findings") -> str:
    finished = sum(len(c.results) for c in findings.conditions)
    failed = sum(len(c.failed) for c in findings.conditions)
    left = sum(len(c.open) for c in findings.conditions) + findings.not_begun
    pruned = sum(c.pruned for c in findings.conditions)
    text = f"{finished} of {finished + failed + left} runs are finished"
    if pruned:
        text += f", {pruned} of them pruned before their end"
    if failed:
        text += f", {failed} failed"
    if left:
        text += f", {left} are still to be done: what follows is preliminary"
    return text + "."


def _order(findings: "Findings") -> list[str]:
    found = [(c.loss.mean, c) for c in findings.conditions if c.loss is not None]
    found.sort(key=lambda pair: pair[0])
    fewest = min(len(c.results) for _, c in found)
    sentences = []
    interval = "; ± is half of the 95 % interval of the mean over seeds" if fewest > 1 else ""
    if len(found) > 1:
        (_, first), (_, last) = found[0], found[-1]
        sentences.append(
            f"Mean loss goes from {number(first.loss)} nats per token ({first.label}) "
            f"to {number(last.loss)} ({last.label}){interval}."
        )
    else:
        sentences.append(f"{found[0][1].label}: {number(found[0][1].loss)} nats per token.")
    if fewest < ENOUGH:
        sentences.append(
            f"Some conditions have fewer than {ENOUGH} seeds: that is too few to tell differences from chance, "
            "and none is claimed for them."
        )
    return sentences


def _differences(findings: "Findings") -> list[str]:
    differences = findings.differences()
    enough = {label: d for label, d in differences.items() if d.n >= ENOUGH}
    lower = [label for label, d in enough.items() if d.excludes_zero and d.mean < 0]
    higher = [label for label, d in enough.items() if d.excludes_zero and d.mean > 0]
    unclear = [label for label, d in enough.items() if not d.excludes_zero]
    sentences = []
    for labels, how in ((lower, "lower"), (higher, "higher")):
        if labels:
            named = _listed([f"{label} ({signed(enough[label])})" for label in labels])
            sentences.append(f"Compared seed by seed with {findings.baseline}, the loss is {how} with {named}.")
    if unclear:
        sentences.append(
            f"Not to be told apart from {findings.baseline} with these seeds: "
            f"{_listed([f'{label} ({signed(enough[label])})' for label in unclear])}."
        )
    if len(enough) >= ENOUGH:
        sentences.append(
            f"These are {len(enough)} comparisons at 95 %, not corrected for their number: where there is no "
            "difference, one interval in twenty still excludes zero."
        )
    return sentences


def _search(findings: "Findings") -> list[str]:
    if findings.study.search is None:
        return []
    best = findings.best_by_arm()
    tried: dict[str, int] = {}
    for condition in findings.conditions:
        tried[condition.arm] = tried.get(condition.arm, 0) + bool(condition.results)
    told = [f"{c.label} ({number(c.loss)}, best of {tried[arm]})" for arm, c in best.items()]
    sentences = [
        f"Best settings of each arm: {_listed(told)}.",
        "The lowest of several noisy results flatters the setting that has it; a fair figure needs fresh seeds.",
    ]
    if edges := [f"{edge} of {arm}" for arm, c in best.items() for edge in _edges(findings.study.search, c.label)]:
        sentences.append(f"At the edge of what was tried, so that better ones may lie beyond: {_listed(edges)}.")
    return sentences


def _edges(search: "Search", label: str) -> list[str]:
    """Factors in the label of a condition of a grid search that are the lowest or the highest of at least three."""
    found = []
    for key, values in space_of(search.space).items() if search.engine == "grid" else ():
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        ends = [factor(key, end) for end in (min(numbers), max(numbers))] if len(numbers) > 2 else []
        found += [end for end in ends if end in label.split(", ")]
    return found


def _sizes(findings: "Findings") -> list[str]:
    sizes = {c.label: c.planned.get("parameters") for c in findings.conditions if c.planned.get("parameters")}
    flops = {c.label: c.planned.get("forward_flops_per_token") for c in findings.conditions if c.planned}
    sentences = []
    if len(sizes) > 1:
        sentences.append(f"Parameters: {_spread(list(sizes.values()))}.")
        sentences.append(f"FLOPs of the forward pass per token: {_spread(list(flops.values()))}.")
    return sentences


def _spread(numbers: Sequence[Any]) -> str:
    low, high = min(numbers), max(numbers)
    if low == high:
        return f"the same for all ({_amount(low)})"
    if high < 1.02 * low:
        return f"equal within {high / low - 1:.2%} ({_amount(low)})"
    share = f"{high / low - 1:.0%} more" if high < 2 * low else f"{high / low:.1f} times as many"
    return f"from {_amount(low)} to {_amount(high)} ({share})"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value < 1e9 else f"{value:.3g}"


def _roles(findings: "Findings") -> list[str]:
    sentences = []
    for condition in findings.conditions:
        whole = condition.summary(lambda r: (r["measures"].get("roles") or {}).get("loss"))
        if whole is None:
            continue
        names = next(iter(condition.results.values()))["measures"]["roles"]["loss_frozen"]
        told = [
            f"{name} {number(condition.summary(lambda r, name=name: r['measures']['roles']['loss_frozen'][name]))}"  # type: ignore[misc]
            for name in names
        ]
        sentences.append(
            f"{condition.label}: {number(whole)} on the text on which its parts were looked at; with one module "
            f"frozen: {_listed(told)}."
        )
    return sentences


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
