"""What a run tells and writes down. Of several processes only the first keeps a record; the others are silent."""

from pathlib import Path
from typing import Any

from hrmlm.models import LanguageModel
from hrmlm.training import depth
from hrmlm.training.metrics import Metrics, read_metrics
from hrmlm.training.recipe import Recipe
from hrmlm.training.reporter import Reporter
from hrmlm.training.run import warn
from hrmlm.training.trackers import open_trackers
from hrmlm.training.trainer import Progress, StepResult


class Record:
    """metrics.jsonl with its trackers, and a reporter. Nothing is written before `open`."""

    def __init__(self, path: Path, reporter: Reporter, silent: bool = False) -> None:
        self.path = path
        self.silent = silent
        self.reporter = Reporter() if silent else reporter
        self._metrics: Metrics | None = None

    def open(self, recipe: Recipe, directory: Path) -> None:
        """Begin to write."""
        if not self.silent:
            self._metrics = Metrics(self.path, open_trackers(recipe, directory))

    def log(self, event: str, step: int, **values: Any) -> None:
        """Write one line."""
        if self._metrics is not None:
            self._metrics.write(event, step, **values)

    def step(self, result: StepResult, progress: Progress, tokens_per_second: float) -> None:
        """Write and tell what a step did."""
        self.log(
            "step",
            result.step,
            loss=result.loss if result.updated else None,
            lr=result.lr,
            gradient_norm=result.norm,
            tokens=progress.tokens,
            targets=result.targets,
            depth=result.depth,
            batches_without_targets=progress.batches_without_targets,
            tokens_per_second=round(tokens_per_second, 1),
            **({} if result.mfu is None else {"mfu": round(result.mfu, 4)}),
            **depth.per_target(result.extra, result.targets),
            **result.monitors,
        )
        self.reporter.step(result, tokens_per_second)

    def warn_once(self, step: int, kind: str, message: str | None) -> None:
        """Tell a warning on standard error and in the record, unless the record has one of its kind already."""
        if self.silent or not message:
            return
        if not any(line.get("kind") == kind for line in read_metrics(self.path)):
            warn(message)
            self.log("warning", step, kind=kind, message=message)

    def complaints(self, model: LanguageModel, warmup: int) -> dict[str, str]:
        """What the family has to say about its monitors: now, against the first step after the warm-up."""
        if self.silent:
            return {}
        lines = [line for line in read_metrics(self.path) if line["event"] == "step"]
        settled = [line for line in lines if line["step"] > warmup]
        return model.complaints(lines[-1], settled[0]) if settled else {}

    def close(self) -> None:
        """Close the file and the trackers."""
        if self._metrics is not None:
            self._metrics.close()
