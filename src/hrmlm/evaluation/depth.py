"""Quality against compute: loss, steps truly executed and speed, for fixed depths and for rules that stop earlier."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrmlm.errors import UserError
from hrmlm.evaluation.agreement import Agreement, show_agreements
from hrmlm.evaluation.picture import pyplot
from hrmlm.evaluation.report import LossReport
from hrmlm.evaluation.speed import Run, Speed, note
from hrmlm.files import write_json
from hrmlm.models.base import LanguageModel
from hrmlm.steps import depth_keywords

if TYPE_CHECKING:
    from rich.console import Console

THRESHOLDS = (0.5, 0.7, 0.9, 0.99)
EXITS = ("change:0.5", "change:0.2", "change:0.1", "change:0.05", "kl:0.3", "kl:0.1", "kl:0.03", "kl:0.01")
COLOURS = ("C0", "C1", "C2", "C4", "C5", "C6")
_COMMON = (
    *("checkpoint", "data", "data_path", "split", "first_tokens", "tokenizer", "window", "stride", "batch_size"),
    *("tokens", "bytes", "precision", "device", "rule", "hrmlm_version", "torch_version"),
)


@dataclass(frozen=True)
class DepthPoint:
    """One setting. report: its loss; mean_steps: outer steps executed per token, over all supervision passes;
    applications: block calls per token; agreement: of a fixed depth with the model as trained, where it was asked for;
    speed: of decoding one row (None: not measured).

    Steps and calls are counted, not nominal: what decoding with a cache executes for these tokens. A forward pass over
    many positions at once computes all of them up to the last one that stops.
    """

    report: LossReport
    depth: int | None
    halt_threshold: float | None
    exit: str | None
    mean_steps: float
    applications: float
    agreement: Agreement | None = None
    speed: Speed | None = None

    @property
    def name(self) -> str:
        """For people: "as trained", "threshold 0.5", "change:0.1" or "depth 2"."""
        if self.exit is not None:
            return self.exit
        if self.halt_threshold is not None:
            return f"threshold {self.halt_threshold:g}"
        return "as trained" if self.depth is None else f"depth {self.depth}"

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON; what is the same for all points stands beside them."""
        r = self.report
        return {
            "name": self.name,
            "depth": self.depth,
            "halt_threshold": self.halt_threshold,
            "exit": self.exit,
            "nats_per_token": r.nats_per_token,
            "bits_per_byte": r.bits_per_byte,
            "total_nats": r.total_nats,
            "mean_steps": self.mean_steps,
            "applications_per_token": self.applications,
            "steps": None if r.steps is None else r.steps.to_dict(),
            "agreement": None if self.agreement is None else self.agreement.to_dict(),
            "speed": None if self.speed is None else self.speed.to_dict(),
        }


@dataclass(frozen=True)
class DepthProbe:
    """The result: points in the order asked for, the model as trained first."""

    points: list[DepthPoint]
    trained_depth: int

    def to_dict(self) -> dict[str, Any]:
        """Everything, as values for JSON; enough to repeat it."""
        common = self.points[0].report.to_dict()
        points = [point.to_dict() for point in self.points]
        return {**{key: common[key] for key in _COMMON}, "trained_depth": self.trained_depth, "points": points}


def probe_depth(
    model: LanguageModel,
    evaluate: Callable[..., LossReport],
    *,
    thresholds: Sequence[float] | None = None,
    exits: Sequence[str] | None = None,
    depths: Sequence[int] | None = None,
    compare: Callable[[Sequence[int]], Mapping[int, Agreement]] | None = None,
    speeds: Callable[[Sequence[Run]], Sequence[Speed | None]] | None = None,
) -> DepthProbe:
    """Evaluate a model as trained, at halting thresholds, with exit policies, and at fixed depths.

    evaluate: gives the report for keywords `depth`, `halt_threshold` and `exit`. exits: policies such as "change:0.1";
    default those of EXITS that the model can follow, none if it learns its depth. thresholds: default THRESHOLDS for a
    model that learns its depth, none for others. depths: default 1 to the trained depth for a model that learns it, to
    twice the trained depth for others, as far as they can. compare: gives the agreement of fixed depths with the model
    as trained (`agreements`; None: not measured). speeds: measures decoding (None: not measured).

    Raises: UserError for a setting that the model cannot run, before anything is evaluated.
    """
    if thresholds is None:
        thresholds = THRESHOLDS if model.learns_depth else ()
    if depths is None:
        depths = default_depths(model)
    if exits is None:
        exits = default_exits(model)
    runs = [Run(), *(Run(halt_threshold=threshold) for threshold in thresholds)]
    runs += [*(Run(exit=exit) for exit in exits), *(Run(depth=depth) for depth in depths)]
    for run in runs:
        depth_keywords(model, run.depth, run.halt_threshold, run.exit)
    points = [_point(model, evaluate, run) for run in runs]
    if compare is not None:
        found = compare(depths)
        points = [p if p.depth is None else replace(p, agreement=found.get(p.depth)) for p in points]
    if speeds is not None:
        points = [replace(point, speed=speed) for point, speed in zip(points, speeds(runs), strict=True)]
    return DepthProbe(points, model.trained_depth)


def default_exits(model: LanguageModel) -> list[str]:
    """Of EXITS those that the model can follow; none if it decides its depth itself."""

    def can(exit: str) -> bool:
        try:
            depth_keywords(model, exit=exit)
        except UserError:
            return False
        return True

    return [] if model.learns_depth or model.total_cycles() == 1 else [e for e in EXITS if can(e)]


def default_depths(model: LanguageModel) -> list[int]:
    """1 to the trained depth where depth is learned, else to twice that, as far as the model can run."""
    most = model.trained_depth if model.learns_depth else 2 * model.trained_depth
    depths = []
    for depth in range(1, most + 1):
        try:
            model.schedule(depth)
        except UserError:
            break
        depths.append(depth)
    return depths


def _point(model: LanguageModel, evaluate: Callable[..., LossReport], run: Run) -> DepthPoint:
    report = evaluate(depth=run.depth, halt_threshold=run.halt_threshold, exit=run.exit)
    executed = _executed(model, report)
    total = sum(executed.values())
    if not total:
        raise UserError("there is no text to score: loss and steps are undefined")
    steps = sum(number * count for number, count in executed.items()) / total
    calls = sum(_applications(model, report.depth, number) * count for number, count in executed.items()) / total
    return DepthPoint(report, run.depth, run.halt_threshold, run.exit, steps, calls)


def _applications(model: LanguageModel, depth: int | None, cycles: int) -> int:
    """Block calls of a token that ran so many cycles, over all passes; depth: None where positions may stop earlier."""
    schedule = model.schedule(depth)
    if depth is not None or model.cycle_slots is None:
        return len(schedule)
    first, stride = model.cycle_slots
    return sum(application.slot < first + cycles * stride for application in schedule)


def _executed(model: LanguageModel, report: LossReport) -> dict[int, int]:
    """Number of tokens by outer steps executed."""
    most = model.total_cycles(report.depth)
    if report.steps is None:
        return {most: report.tokens}
    if report.halting != "sequence" or most == 1:
        return report.steps.histogram
    executed: dict[int, int] = {}
    for number, count in report.steps.histogram.items():  # this rule counts the steps before the one that stopped
        executed[min(number + 1, most)] = executed.get(min(number + 1, most), 0) + count
    return executed


def show(probe: DepthProbe, console: "Console") -> None:
    """Print the table for people."""
    from rich.markup import escape
    from rich.table import Table

    first = probe.points[0].report
    split = f" ({first.split})" if first.split else ""
    table = Table(title=escape(f"Loss and depth on {first.data_path or first.data}{split}"), title_justify="left")
    table.add_column("setting", no_wrap=True)
    for column in ("nats/token", "bits/byte", "steps/token", "block calls/token", "tokens/s"):
        table.add_column(column, justify="right")
    for point in probe.points:
        bits = point.report.bits_per_byte
        table.add_row(
            point.name,
            f"{point.report.nats_per_token:.4f}",
            "undefined" if bits is None else f"{bits:.4f}",
            f"{point.mean_steps:.2f}",
            f"{point.applications:.1f}",
            "-" if point.speed is None else str(point.speed),
        )
    console.print(table)
    console.print(
        f"{first.tokens:,} tokens, window {first.window}, stride {first.stride}; trained depth {probe.trained_depth}; "
        "steps and block calls are those that cached decoding executes, counted token by token."
        + note([point.speed for point in probe.points])
    )
    found = {point.depth: point.agreement for point in probe.points if point.depth and point.agreement}
    if found:
        show_agreements(found, console)


def write(probe: DepthProbe, directory: Path) -> Path:
    """Write depth.json and the picture depth.png into a directory; return the picture. Raises: UserError."""
    plots = pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "depth.json", probe.to_dict())
    timed = all(point.speed is not None for point in probe.points)
    width = 12 if timed else 7
    figure, both = plots.subplots(1, 1 + timed, figsize=(width, 4.2), layout="constrained", sharey=True, squeeze=False)
    _curves(both[0, 0], probe, "steps executed per token", lambda point: point.mean_steps)
    if timed:
        _curves(both[0, 1], probe, "tokens per second, one row", lambda p: p.speed.tokens_per_second if p.speed else 0)
    figure.suptitle("Quality and compute")
    both[0, 0].set(ylabel="nats per token")
    both[0, 0].legend(frameon=False)
    figure.savefig(directory / "depth.png", dpi=150)
    plots.close(figure)
    return directory / "depth.png"


def _curves(axes: Any, probe: DepthProbe, label: str, x: Callable[[DepthPoint], float]) -> None:
    """One curve per kind of setting: nats per token against x."""
    kinds: dict[str, list[tuple[DepthPoint, str]]] = {}
    for point in probe.points[1:]:
        if point.depth is not None:
            kinds.setdefault("fixed depth", []).append((point, str(point.depth)))
        elif point.halt_threshold is not None:
            kinds.setdefault("halting threshold", []).append((point, f"{point.halt_threshold:g}"))
        elif point.exit is not None:
            name, _, number = point.exit.partition(":")
            kinds.setdefault(name, []).append((point, number))
    for colour, (kind, points) in zip(COLOURS, kinds.items(), strict=False):
        points.sort(key=lambda pair: pair[0].mean_steps)
        places = [(x(point), point.report.nats_per_token) for point, _ in points]
        axes.plot(*zip(*places, strict=True), marker="o", ms=4, lw=1, color=colour, label=kind)
        for (_, text), place in zip(points, places, strict=True):
            axes.annotate(text, place, textcoords="offset points", xytext=(4, 4), fontsize=8, color=colour)
    first = probe.points[0]
    axes.plot([x(first)], [first.report.nats_per_token], "*", ms=13, color="C3", label="as trained")
    axes.set(xlabel=label)
    axes.grid(alpha=0.25)
