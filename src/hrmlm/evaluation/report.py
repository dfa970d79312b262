"""The result of an evaluation: one total, the ratios made from it, and the settings that reproduce them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hrmlm.steps import StepCounts

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class EndMarks:
    """End-of-text marks (and other ids that stand for no text) among the predicted tokens: number and total nats."""

    count: int
    nats: float


@dataclass(frozen=True)
class LossReport:
    """Task loss of a model on a text. Every ratio comes from `total_nats`; nothing else is added to it.

    total_nats: sum of -ln p over `tokens` predicted tokens of text, which stand for `bytes` bytes of UTF-8 and make up
    `words` whitespace-separated words (None: text not known). end_marks: the marks left out of these.
    The other fields are the settings that reproduce the numbers: `data` and `tokenizer` are fingerprints, `depth` is
    None for the trained schedule, and `schedule` lists the block applications that were run for each window.

    Of models that decide their depth, or are told to by an exit policy: `steps` counts the outer steps of the positions
    that predicted these tokens, `halting` is the rule that decided them and `halt_threshold` its threshold (see
    `hrmlm.steps.halting_rule`), and `schedule` lists what runs at most. exit: the exit policy asked for; cache_policy:
    of the cache through which the text was read (None: without one). first_tokens: how many tokens of the text were
    looked at (None: all).
    """

    total_nats: float
    tokens: int
    bytes: int
    words: int | None
    end_marks: EndMarks
    window: int
    stride: int
    batch_size: int
    depth: int | None
    schedule: tuple[str, ...]
    precision: str
    device: str
    tokenizer: str
    data: str
    data_path: str | None = None
    split: str | None = None
    checkpoint: str | None = None
    rule: str = ""
    halting: str | None = None
    halt_threshold: float | None = None
    exit: str | None = None
    cache_policy: str | None = None
    steps: StepCounts | None = None
    first_tokens: int | None = None
    hrmlm_version: str = ""
    torch_version: str = ""

    @property
    def nats_per_token(self) -> float | None:
        """total_nats / tokens; None without tokens."""
        return _ratio(self.total_nats, self.tokens)

    @property
    def perplexity(self) -> float | None:
        """exp(total_nats / tokens): per token, so comparable only between models of one tokenizer."""
        return _exp(self.nats_per_token)

    @property
    def word_perplexity(self) -> float | None:
        """exp(total_nats / words); None without words, or beyond the range of a float."""
        return _exp(_ratio(self.total_nats, self.words))

    @property
    def bits_per_byte(self) -> float | None:
        """total_nats / (ln 2 * bytes): comparable across tokenizers. None, meaning undefined, without bytes."""
        return _ratio(self.total_nats, self.bytes * math.log(2))

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        notes = []
        if self.bytes == 0:
            skipped = f"; {self.end_marks.count} end-of-text marks were scored apart" if self.end_marks.count else ""
            notes.append(f"no text to score: nats per token, perplexity and bits per byte are undefined{skipped}")
        if self.words and self.word_perplexity is None:
            notes.append("word perplexity is too large for a number: the text has hardly any white space")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Everything, as values for JSON (undefined ratios are None)."""
        return {
            "total_nats": self.total_nats,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "words": self.words,
            "nats_per_token": self.nats_per_token,
            "perplexity": self.perplexity,
            "word_perplexity": self.word_perplexity,
            "bits_per_byte": self.bits_per_byte,
            "end_marks": {"count": self.end_marks.count, "nats": self.end_marks.nats},
            "steps": None if self.steps is None else self.steps.to_dict(),
            "notes": self.notes,
            "checkpoint": self.checkpoint,
            "data": self.data,
            "data_path": self.data_path,
            "split": self.split,
            "tokenizer": self.tokenizer,
            "window": self.window,
            "stride": self.stride,
            "batch_size": self.batch_size,
            "depth": self.depth,
            "schedule": list(self.schedule),
            "halting": self.halting,
            "halt_threshold": self.halt_threshold,
            "exit": self.exit,
            "cache_policy": self.cache_policy,
            "first_tokens": self.first_tokens,
            "precision": self.precision,
            "device": self.device,
            "rule": self.rule,
            "hrmlm_version": self.hrmlm_version,
            "torch_version": self.torch_version,
        }


def show(report: LossReport, console: "Console") -> None:
    """Print the report as a table for people."""
    from rich.markup import escape
    from rich.table import Table

    split = f" ({report.split})" if report.split else ""
    table = Table(title=escape(f"Loss on {report.data_path or report.data}{split}"), title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in _lines(report):
        table.add_row(name, value)
    console.print(table)
    settings = f"window {report.window}, stride {report.stride}, {report.precision} on {report.device}"
    at_most = "at most " if report.halting not in (None, "fixed") else ""
    depth = f"{at_most}{len(report.schedule)} block applications per token{_halting(report)}"
    console.print(f"{settings}; {depth}; rule: {report.rule}.")
    for note in report.notes:
        console.print(f"Note: {note}.")


def _lines(report: LossReport) -> Iterator[tuple[str, str]]:
    """Rows of the table."""
    yield "bits per byte", _number(report.bits_per_byte)
    yield "nats per token", _number(report.nats_per_token)
    yield "perplexity (per token)", _number(report.perplexity)
    if report.words:
        yield "perplexity (per word)", _number(report.word_perplexity)
    yield "total nats", f"{report.total_nats:,.2f}"
    yield "tokens", f"{report.tokens:,}"
    yield "bytes", f"{report.bytes:,}"
    if report.words is not None:
        yield "words", f"{report.words:,}"
    if report.end_marks.count:
        yield "end-of-text marks (apart)", f"{report.end_marks.count:,}: {report.end_marks.nats:,.2f} nats"
    if report.steps is not None and report.steps.total:
        yield "mean outer steps", _number(report.steps.mean)
        for number, share in report.steps.shares.items():
            yield f"  {number} step{'' if number == '1' else 's'}", f"{share:.1%}"


def _halting(report: LossReport) -> str:
    """What decided the depth, for the line of settings."""
    if report.halting is None:
        return ""
    threshold = "" if report.halt_threshold is None else f", threshold {report.halt_threshold:g}"
    return f", halting: {report.halting}{threshold}"


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:,.4f}"


def _ratio(total: float, count: float | None) -> float | None:
    return total / count if count else None


def _exp(value: float | None) -> float | None:
    """e to the value; None if there is none or it is beyond the range of a float."""
    return None if value is None or value > math.log(1e300) else math.exp(value)
