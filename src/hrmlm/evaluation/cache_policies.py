"""Memory against quality: what a cache policy saves, and what it costs, decoded with that very cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrmlm.errors import UserError
from hrmlm.evaluation.picture import pyplot
from hrmlm.evaluation.report import LossReport
from hrmlm.evaluation.speed import Run, Speed, note
from hrmlm.files import write_json
from hrmlm.models.base import LanguageModel
from hrmlm.models.cache_policy import FULL, CachePolicy, parse_cache_policy

if TYPE_CHECKING:
    from rich.console import Console

_COMMON = (
    *("checkpoint", "data", "data_path", "split", "first_tokens", "tokenizer", "window", "stride", "batch_size"),
    *("tokens", "bytes", "depth", "precision", "device", "rule", "hrmlm_version", "torch_version"),
)


@dataclass(frozen=True)
class CachePoint:
    """One policy. report: loss of a text that was read through this cache; bytes_per_token: allocated for one token of
    one row, measured from the tensors; speed: of decoding one row (None: not measured)."""

    policy: CachePolicy
    report: LossReport
    bytes_per_token: float
    speed: Speed | None = None


@dataclass(frozen=True)
class CacheProbe:
    """The result: points in the order asked for, the exact policy `full` first."""

    points: list[CachePoint]

    def nats_more(self, point: CachePoint) -> float:
        """Nats per token above those of `full`."""
        return (point.report.total_nats - self.points[0].report.total_nats) / point.report.tokens

    def bits_more(self, point: CachePoint) -> float | None:
        """Bits per byte above those of `full`; None without bytes."""
        mine, full = point.report.bits_per_byte, self.points[0].report.bits_per_byte
        return None if mine is None or full is None else mine - full

    def to_dict(self) -> dict[str, Any]:
        """Everything, as values for JSON; enough to repeat it."""
        common = self.points[0].report.to_dict()
        points = [
            {
                "policy": point.policy.name,
                "exact": point.policy.is_exact,
                "bytes_per_token": point.bytes_per_token,
                "total_nats": point.report.total_nats,
                "nats_per_token": point.report.nats_per_token,
                "bits_per_byte": point.report.bits_per_byte,
                "nats_per_token_more": self.nats_more(point),
                "bits_per_byte_more": self.bits_more(point),
                "speed": None if point.speed is None else point.speed.to_dict(),
            }
            for point in self.points
        ]
        return {**{key: common[key] for key in _COMMON}, "points": points}


def probe_cache(
    model: LanguageModel,
    evaluate: Callable[..., LossReport],
    policies: Sequence[str] | None = None,
    *,
    depth: int | None = None,
    speeds: Callable[[Sequence[Run]], Sequence[Speed | None]] | None = None,
) -> CacheProbe:
    """Evaluate a model through a cache of each policy, `full` always first.

    evaluate: gives the report for keywords `cache_policy` and `depth`. policies: default all that this model's depth
    tells apart. speeds: measures decoding (None: not measured).

    Raises: UserError for a policy that the model cannot follow, before anything is evaluated; for a text without
    anything to score; for a model that keeps a state of constant size instead of keys and values.
    """
    if model.carries_state:
        raise UserError("this model keeps a state of constant size, no cache to save bytes of; use hrmlm probe memory")
    chosen = default_policies(model, depth) if policies is None else [parse_cache_policy(name) for name in policies]
    chosen = [FULL, *(policy for policy in dict.fromkeys(chosen) if not policy.is_exact)]
    caches = [model.new_cache(1, 1, depth=depth, policy=policy) for policy in chosen]
    reports = [evaluate(cache_policy=policy.name, depth=depth) for policy in chosen]
    if not reports[0].tokens:
        raise UserError("there is no text to score: the loss is undefined")
    measured = [None] * len(chosen) if speeds is None else speeds([Run(depth=depth, policy=p) for p in chosen])
    rows = zip(chosen, reports, caches, measured, strict=True)
    return CacheProbe([CachePoint(policy, report, cache.bytes, speed) for policy, report, cache, speed in rows])


def default_policies(model: LanguageModel, depth: int | None = None) -> list[CachePolicy]:
    """`full`; with cycles that share their weights and run to the same depth also `every:K`, `first` and `last`."""
    try:
        model.check_cache_policy(parse_cache_policy("first"), depth)
    except UserError:
        return [FULL]
    cycles = model.total_cycles(depth)
    if cycles == 1:
        return [FULL]
    names = [f"every:{k}" for k in (2, 4, 8) if k < cycles]
    return [FULL, *map(parse_cache_policy, [*names, "first", "last"])]


def show(probe: CacheProbe, console: "Console") -> None:
    """Print the table for people."""
    from rich.markup import escape
    from rich.table import Table

    first = probe.points[0].report
    split = f" ({first.split})" if first.split else ""
    table = Table(title=escape(f"Cache policies on {first.data_path or first.data}{split}"), title_justify="left")
    table.add_column("policy", no_wrap=True)
    for column in ("bytes", "nats", "+nats", "bits/byte", "+bits", "tokens/s"):
        table.add_column(column, justify="right")
    for point in probe.points:
        table.add_row(
            f"{point.policy.name} (exact)" if point.policy.is_exact else point.policy.name,
            f"{point.bytes_per_token:,.0f}",
            f"{point.report.nats_per_token:.4f}",
            f"{probe.nats_more(point):+.4f}",
            *(
                "undefined" if value is None else f"{value:{form}}"
                for value, form in ((point.report.bits_per_byte, ".4f"), (probe.bits_more(point), "+.4f"))
            ),
            "-" if point.speed is None else str(point.speed),
        )
    console.print(table)
    console.print(
        f"{first.tokens:,} tokens read through each cache, window {first.window}, stride {first.stride}; bytes: "
        "allocated for keys and values of one token; nats per token; +: more than with the full cache."
        + note([point.speed for point in probe.points])
    )


def write(probe: CacheProbe, directory: Path) -> Path:
    """Write cache.json and the picture cache.png into a directory; return the picture. Raises: UserError."""
    plots = pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "cache.json", probe.to_dict())
    figure, axes = plots.subplots(figsize=(7, 4.2), layout="constrained")
    for point in probe.points:
        where = (point.bytes_per_token, point.report.nats_per_token)
        axes.plot(*where, "o", color="C3" if point.policy.is_exact else "C0")
        axes.annotate(point.policy.name, where, textcoords="offset points", xytext=(5, 5), fontsize=9)
    axes.set(xlabel="bytes per token of the cache", ylabel="nats per token", title="Cache policies")
    axes.set_xlim(0, 1.15 * probe.points[0].bytes_per_token)
    axes.margins(y=0.15)
    axes.grid(alpha=0.25)
    figure.savefig(directory / "cache.png", dpi=150)
    plots.close(figure)
    return directory / "cache.png"
