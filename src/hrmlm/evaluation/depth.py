"""Quality against compute: loss and outer steps truly executed, for halting thresholds and for fixed depths."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrmlm.errors import UserError
from hrmlm.evaluation.agreement import Agreement, show_agreements
from hrmlm.evaluation.report import LossReport
from hrmlm.files import write_json
from hrmlm.models.base import LanguageModel
from hrmlm.steps import check_depth

if TYPE_CHECKING:
    from rich.console import Console

THRESHOLDS = (0.5, 0.7, 0.9, 0.99)
_COMMON = (
    *("checkpoint", "data", "data_path", "split", "first_tokens", "tokenizer", "window", "stride", "batch_size"),
    *("tokens", "bytes", "precision", "device", "rule", "hrmlm_version", "torch_version"),
)


@dataclass(frozen=True)
class DepthPoint:
    """One setting. report: its loss; mean_steps: outer steps executed per token; applications: block calls per token;
    agreement: of a fixed depth with the model as trained, where it was asked for.

    Steps and calls are counted, not nominal: what decoding with a cache executes for these tokens. A forward pass over
    many positions at once computes all of them up to the last one that stops.
    """

    report: LossReport
    depth: int | None
    halt_threshold: float | None
    mean_steps: float
    applications: float
    agreement: Agreement | None = None

    @property
    def name(self) -> str:
        """For people: "as trained", "threshold 0.5" or "depth 2"."""
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
            "nats_per_token": r.nats_per_token,
            "bits_per_byte": r.bits_per_byte,
            "total_nats": r.total_nats,
            "mean_steps": self.mean_steps,
            "applications_per_token": self.applications,
            "steps": None if r.steps is None else r.steps.to_dict(),
            "agreement": None if self.agreement is None else self.agreement.to_dict(),
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
    depths: Sequence[int] | None = None,
    compare: Callable[[Sequence[int]], Mapping[int, Agreement]] | None = None,
) -> DepthProbe:
    """Evaluate a model as trained, at halting thresholds, and at fixed depths.

    evaluate: gives the report for keywords `depth` and `halt_threshold`. thresholds: default THRESHOLDS for a model
    that learns its depth, none for others. depths: default 1 to the trained depth for a model that learns it, to twice
    the trained depth for others, as far as they can. compare: gives the agreement of fixed depths with the model as
    trained (`agreements`; None: not measured).

    Raises: UserError for a setting that the model cannot run, before anything is evaluated.
    """
    if thresholds is None:
        thresholds = THRESHOLDS if model.learns_depth else ()
    if depths is None:
        depths = default_depths(model)
    settings: list[tuple[int | None, float | None]] = [(None, None)]
    settings += [(None, threshold) for threshold in thresholds] + [(depth, None) for depth in depths]
    for depth, threshold in settings:
        check_depth(model, depth, threshold)
    points = [_point(model, evaluate, *setting) for setting in settings]
    if compare is not None:
        found = compare(depths)
        points = [p if p.depth is None else replace(p, agreement=found.get(p.depth)) for p in points]
    return DepthProbe(points, model.trained_depth)


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


def _point(
    model: LanguageModel, evaluate: Callable[..., LossReport], depth: int | None, threshold: float | None
) -> DepthPoint:
    report = evaluate(depth=depth, halt_threshold=threshold)
    executed = _executed(model, report)
    total = sum(executed.values())
    if not total:
        raise UserError("there is no text to score: loss and steps are undefined")
    steps = sum(number * count for number, count in executed.items()) / total
    calls = sum(len(model.schedule(number)) * count for number, count in executed.items()) / total
    return DepthPoint(report, depth, threshold, steps, calls)


def _executed(model: LanguageModel, report: LossReport) -> dict[int, int]:
    """Number of tokens by outer steps executed."""
    most = report.depth or model.trained_depth
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
    table.add_column("setting")
    for column in ("nats/token", "bits/byte", "steps/token", "block calls/token"):
        table.add_column(column, justify="right")
    for point in probe.points:
        bits = point.report.bits_per_byte
        table.add_row(
            point.name,
            f"{point.report.nats_per_token:.4f}",
            "undefined" if bits is None else f"{bits:.4f}",
            f"{point.mean_steps:.2f}",
            f"{point.applications:.1f}",
        )
    console.print(table)
    console.print(
        f"{first.tokens:,} tokens, window {first.window}, stride {first.stride}; trained depth {probe.trained_depth}; "
        "steps and block calls are those that cached decoding executes, counted token by token."
    )
    found = {point.depth: point.agreement for point in probe.points if point.depth and point.agreement}
    if found:
        show_agreements(found, console)


def write(probe: DepthProbe, directory: Path) -> Path:
    """Write depth.json and the picture depth.png into a directory; return the picture. Raises: UserError."""
    plots = pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "depth.json", probe.to_dict())
    figure, axes = plots.subplots(figsize=(7, 4.2), layout="constrained")
    _line(axes, [p for p in probe.points if p.depth is not None], "fixed depth", "C1", "s", lambda p: str(p.depth))
    thresholds = [p for p in probe.points if p.halt_threshold is not None]
    _line(axes, thresholds, "halting threshold", "C0", "o", lambda p: f"{p.halt_threshold:g}")
    first = probe.points[0]
    axes.plot([first.mean_steps], [first.report.nats_per_token], "*", ms=13, color="C3", label="as trained")
    axes.set(xlabel="steps executed per token", ylabel="nats per token", title="Quality and compute")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(directory / "depth.png", dpi=150)
    plots.close(figure)
    return directory / "depth.png"


def _line(axes: Any, points: list[DepthPoint], label: str, colour: str, marker: str, text: Callable[..., str]) -> None:
    if not points:
        return
    points = sorted(points, key=lambda point: point.mean_steps)
    x, y = [point.mean_steps for point in points], [point.report.nats_per_token for point in points]
    axes.plot(x, y, marker=marker, ms=4, lw=1, color=colour, label=label)
    for point in points:
        where = (point.mean_steps, point.report.nats_per_token)
        axes.annotate(text(point), where, textcoords="offset points", xytext=(4, 4), fontsize=8, color=colour)


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files. Raises: UserError naming the extra where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("the picture needs matplotlib: pip install 'hrmlm[demo]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
