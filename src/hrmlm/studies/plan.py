"""What a study will cost: runs, parameters, FLOPs, and a time estimate from measured steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hrmlm.data.tokens import TokenWindows, loader
from hrmlm.errors import UserError
from hrmlm.evaluation.timing import Timing, interleaved
from hrmlm.models import build_model
from hrmlm.studies.expand import Condition, Expansion, device_mistakes
from hrmlm.training.trainer import Trainer

if TYPE_CHECKING:
    from rich.console import Console

ITERATIONS, WARMUP = 5, 2
START_SECONDS = 5
"""About what a process takes to start and to open its data."""
TOGETHER = 3
"""Models in memory at once while their steps are measured."""


@dataclass(frozen=True)
class PlannedRun:
    """One line of a plan. seconds: estimated time of one run, evaluations included; None where it was not measured."""

    condition: Condition
    seeds: int
    steps: int
    step_seconds: Timing | None
    seconds: float | None

    @property
    def training_flops(self) -> float:
        """Of one run, by the rule of `hrmlm info`."""
        return self.steps * self.condition.tokens_per_step * self.condition.cost.training_flops_per_token

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        condition, timing = self.condition, self.step_seconds
        return {
            "condition": condition.label,
            "seeds": self.seeds,
            "steps": self.steps,
            "tokens": self.steps * condition.tokens_per_step,
            "parameters": condition.cost.parameters,
            "d_model": condition.recipe.model_config_of().d_model,
            "lr": condition.recipe.optimizer.lr,
            "matched": condition.matched,
            "forward_flops_per_token": condition.cost.forward_flops_per_token,
            "training_flops_per_token": condition.cost.training_flops_per_token,
            "training_flops": self.training_flops,
            "step_seconds": None if timing is None else timing.median,
            "step_seconds_spread": None if timing is None else timing.spread,
            "seconds_per_run": self.seconds,
        }


def measure_steps(conditions: Sequence[Condition], expansion: Expansion) -> dict[str, Timing]:
    """Time of one optimizer step of each condition: interleaved rounds, the first ones not counted.

    Tokens are those the model reads: windows are full, there is no padding. Raises: UserError for a missing device.
    """
    if mistakes := device_mistakes(expansion):
        raise UserError("; ".join(mistakes))
    timings: dict[str, Timing] = {}
    for first in range(0, len(conditions), TOGETHER):
        group = conditions[first : first + TOGETHER]
        calls = {condition.label: partial(next, _steps(condition, expansion)) for condition in group}
        device = group[0].recipe.training.device
        timings |= interleaved(calls, iterations=ITERATIONS, warmup=WARMUP, device=device)
    return timings


def _steps(condition: Condition, expansion: Expansion) -> Any:
    recipe = condition.recipe.changed([f"training.steps={ITERATIONS}"])
    windows = TokenWindows(expansion.data.split("train"), recipe.window, recipe.training.batch_size)
    torch.manual_seed(0)
    return Trainer(recipe, build_model(recipe.model), partial(loader, windows)).steps()


def plan(expansion: Expansion, timings: Mapping[str, Timing], steps: Mapping[str, int]) -> list[PlannedRun]:
    """One line per condition. timings: by label, for those that were measured; steps: by label."""
    return [
        PlannedRun(
            condition,
            len(expansion.study.seed_list),
            steps[condition.label],
            timings.get(condition.label),
            _seconds(condition, expansion, steps[condition.label], timings.get(condition.label)),
        )
        for condition in expansion.conditions
    ]


def _seconds(condition: Condition, expansion: Expansion, steps: int, timing: Timing | None) -> float | None:
    """Of one run: training, and evaluations at the cost of their forward passes."""
    if timing is None:
        return None
    training = condition.recipe.training
    data, evaluation = expansion.data, expansion.study.evaluation
    valid = min(training.eval_tokens or len(data.split("valid")), len(data.split("valid")))
    evaluations = max(1, -(-steps // training.eval_every)) if training.eval_every else 1
    final = min(evaluation.tokens or len(data.split(evaluation.split)), len(data.split(evaluation.split)))
    tokens = evaluations * valid * (steps > 0) + final
    share = condition.cost.forward_flops_per_token / condition.cost.training_flops_per_token
    return timing.median * (steps + share * tokens / condition.tokens_per_step)


def show(planned: Sequence[PlannedRun], expansion: Expansion, jobs: int, done: int, console: "Console") -> None:
    """Print the plan for people."""
    from rich.markup import escape
    from rich.table import Table

    study = expansion.study
    scale = f" (scale {study.scale})" if study.scale != "small" else ""
    table = Table(title=escape(study.title + scale), title_justify="left", box=None, padding=(0, 1))
    table.add_column("condition")
    for column in ("parameters", "width", "steps", "FLOPs/run", "s/step", "time/run"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in planned:
        table.add_row(
            escape(line.condition.label),
            f"{line.condition.cost.parameters:,}",
            str(line.condition.recipe.model_config_of().d_model),
            f"{line.steps:,}",
            f"{line.training_flops:.2e}",
            "–" if line.step_seconds is None else f"{line.step_seconds.median:.3f}",
            "–" if line.seconds is None else duration(line.seconds),
        )
    console.print(table)
    search = study.search if study.search is not None and study.search.engine != "grid" else None
    each = len(study.seed_list) if search is None else search.trials
    runs = each * len(planned)
    flops = sum(each * line.training_flops for line in planned)
    what = "seeds" if search is None else f"trials, each with seed {study.seed_list[0]}"
    finished = "" if search is not None else f", {done} of them finished"
    console.print(f"{runs} runs ({len(planned)} conditions × {each} {what}){finished}.")
    console.print(f"Training FLOPs of all runs: {flops:.2e}. Budget of each: {study.budget.told}.")
    if all(line.seconds is not None for line in planned):
        total = sum(each * ((line.seconds or 0.0) + START_SECONDS) for line in planned)
        shared = f"; {jobs} at a time divide it only as far as the machine has cores for them" if jobs > 1 else ""
        console.print(
            f"Time of all runs: about {duration(total)} of one process{shared}. From measured steps (median of "
            f"{ITERATIONS - WARMUP}), the forward passes of evaluations, and {START_SECONDS} s per run to start."
        )
    else:
        console.print("No time estimate: steps were not measured here.")


def duration(seconds: float) -> str:
    """For people: "45 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
