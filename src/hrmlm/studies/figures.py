"""Curves as SVG that takes its colours from the page it stands in, light or dark."""

import io
import re
from collections.abc import Sequence
from typing import Any

from hrmlm.evaluation.picture import pyplot
from hrmlm.studies.collect import ConditionResults, Findings

LIGHT = ("#0b62a4", "#c2570c", "#0a7d55", "#a8327e", "#6b5bd2", "#8a6d00", "#b3261e", "#4a5a68")
DARK = ("#6cb6ff", "#ff9d57", "#4fd1a1", "#f08cc8", "#b3a6ff", "#e3c341", "#ff8a80", "#a9b8c6")
_INK = "#010203"
_SERIES = [f"#0a0b{i:02x}" for i in range(len(LIGHT))]
DASHES = ("-", "--", ":", "-.")
AXES = {
    "step": "optimizer step",
    "tokens": "tokens read in training",
    "flops": "training FLOPs",
    "seconds": "seconds of training",
}


def colours(values: Sequence[str]) -> str:
    """CSS that gives the series their colours."""
    return "".join(f"--s{i}:{colour};" for i, colour in enumerate(values))


def curves(findings: Findings, axis: str) -> str | None:
    """Validation loss against steps, tokens, FLOPs or seconds: mean over seeds, and their range as a band.

    None without any points. Raises: UserError if matplotlib is missing.
    """
    shown = [c for c in findings.conditions if any(c.points.values())]
    if findings.study.search is not None:
        shown = [c for c in findings.best_by_arm().values() if any(c.points.values())]
    if not shown:
        return None
    figure, axes = _axes()
    for index, condition in enumerate(shown):
        x, mean, low, high = _band(condition, axis)
        style = {"color": _SERIES[index % len(_SERIES)]}
        dash = DASHES[index // len(_SERIES) % len(DASHES)]
        axes.plot(x, mean, dash, marker="o", ms=3, lw=1.4, label=condition.label, **style)
        axes.fill_between(x, low, high, alpha=0.18, lw=0, **style)
    axes.set(xlabel=AXES[axis], ylabel="validation loss, nats per token")
    _legend(figure, axes, len(shown))
    return _svg(figure, f"loss-{axis}", f"Validation loss against {AXES[axis]}, one line per condition")


def against(
    findings: Findings, name: str, values: Sequence[tuple[str, Sequence[tuple[str, float, float]]]], y: str
) -> str:
    """Points over parameters. values: series name and its (label, parameters, number) triples; y: label of the axis."""
    figure, axes = _axes()
    for index, (series, points) in enumerate(values):
        ordered = sorted(points, key=lambda point: point[1])
        colour = _SERIES[index % len(_SERIES)]
        axes.plot([p[1] for p in ordered], [p[2] for p in ordered], "o", ms=5, label=series, color=colour)
        for label, parameters, number in ordered:
            axes.annotate(
                label, (parameters, number), textcoords="offset points", xytext=(4, 4), fontsize=8, color=_INK
            )
    axes.set(xlabel="parameters", ylabel=y, ylim=(0, None))
    _legend(figure, axes, len(values))
    return _svg(figure, name, f"{y} against parameters")


def _band(condition: ConditionResults, axis: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Of the steps that all runs were evaluated at: place, mean, lowest and highest loss."""
    runs = [{point.step: point for point in points} for points in condition.points.values() if points]
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    columns = [[run[step] for run in runs] for step in steps]
    x = [sum(getattr(p, axis) for p in column) / len(column) for column in columns]
    losses = [[p.loss for p in column] for column in columns]
    return x, [sum(c) / len(c) for c in losses], [min(c) for c in losses], [max(c) for c in losses]


def _axes() -> tuple[Any, Any]:
    plots = pyplot()
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "hrmlm",
        "font.family": "sans-serif",
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    }
    with plots.rc_context(style):
        figure, axes = plots.subplots(figsize=(4.9, 3.4), layout="constrained")
        axes.grid(alpha=0.2, color=_INK)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Any, axes: Any, entries: int) -> None:
    legend = figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(entries, 2), frameon=False, fontsize=9
    )
    for text in legend.get_texts():
        text.set_color(_INK)


def _svg(figure: Any, name: str, title: str) -> str:
    """The figure as an <svg> element without fixed colours, size or ids that another one on the page may have."""
    plots, file = pyplot(), io.StringIO()
    with plots.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    plots.close(figure)
    svg = file.getvalue()
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace(_INK, "currentColor")
    for index, colour in enumerate(_SERIES):
        svg = svg.replace(colour, f"var(--s{index})")
    svg = re.sub(r' (width|height)="[0-9.]+pt"', "", svg, count=2)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def standalone(svg: str) -> str:
    """The same as a file of its own, dark on white."""
    return svg.replace("<svg ", f'<svg style="color:#222;background:#fff;{colours(LIGHT)}" ', 1)
