"""What a study has found so far: results by condition and seed, their intervals, and the words for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrmlm.files import read_json
from hrmlm.studies import words
from hrmlm.studies.directory import StudyDirectory
from hrmlm.studies.expand import Run, space_of
from hrmlm.studies.spec import Study
from hrmlm.studies.statistics import Summary, paired, summarize
from hrmlm.studies.stored import check_result
from hrmlm.training.metrics import read_metrics

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """One validation during training."""

    step: int
    tokens: float
    flops: float
    seconds: float
    loss: float


@dataclass
class ConditionResults:
    """The finished runs of one condition, by seed. planned: what the plan says about it; points: of each run."""

    label: str
    planned: Mapping[str, Any]
    results: dict[int, Result]
    points: dict[int, list[Point]]
    failed: dict[int, str]
    open: list[int]

    def numbers(self, of: Callable[[Result], float | None]) -> dict[int, float]:
        """One number of each run, by seed."""
        found = {seed: of(result) for seed, result in self.results.items()}
        return {seed: number for seed, number in found.items() if number is not None}

    def summary(self, of: Callable[[Result], float | None]) -> Summary | None:
        """Mean and interval of one number of the runs."""
        return summarize(list(self.numbers(of).values()))

    @property
    def loss(self) -> Summary | None:
        """Nats per token at the end of training."""
        return self.summary(loss_of)

    @property
    def pruned(self) -> int:
        """Runs that a search gave up before their end; they have no loss."""
        return sum("pruned" in result for result in self.results.values())

    @property
    def arm(self) -> str:
        """The arm it belongs to."""
        return self.label.split(", ")[0]


def loss_of(result: Result) -> float | None:
    """Nats per token of the final weights."""
    return result.get("loss")


@dataclass
class Findings:
    """Everything a report tells. other_runs: runs in the directory that are not part of the study as it is now;
    not_begun: trials of a search that have no run yet."""

    path: Path
    study: Study
    plan: Mapping[str, Any]
    conditions: list[ConditionResults]
    other_runs: int
    not_begun: int = 0

    @property
    def compared(self) -> list[ConditionResults]:
        """What is compared: all conditions, of a search the best one of each arm."""
        return self.conditions if self.study.search is None else list(self.best_by_arm().values())

    @property
    def baseline_arm(self) -> str | None:
        """The arm whose conditions stand against those of the others that have the same factors of a grid.

        None where all are compared with one condition. Without a name it is the first arm of a grid of several.
        """
        name, arms = self.study.baseline, list(self.study.arms)
        if self.study.search is not None or len(arms) < 2 or any(c.label == name for c in self.conditions):
            return None
        if name is None:
            return arms[0] if self.study.grid else None
        return name if name in arms else None

    @property
    def baseline(self) -> str:
        """What the others are compared with, in words."""
        if (arm := self.baseline_arm) is not None:
            return f"{arm} with the same settings"
        base = self._base_of(self.compared[0])
        return "nothing" if base is None else base.label

    def _base_of(self, condition: ConditionResults) -> ConditionResults | None:
        """The condition to which this one is compared: the one that was named, else the first."""
        if (arm := self.baseline_arm) is not None:
            label = arm + condition.label.removeprefix(condition.arm)
            return next((c for c in self.conditions if c.label == label), None)
        name, compared = self.study.baseline, self.compared
        named = [c for c in compared if c.label == name] or [c for c in compared if c.arm == name] or compared
        return named[0] if named else None

    def differences(self) -> dict[str, Summary]:
        """Loss of each other condition minus that of what it is compared with, paired by seed."""
        found = {}
        for condition in self.compared:
            base = self._base_of(condition)
            if base is not None and condition is not base:
                summary = paired(condition.numbers(loss_of), base.numbers(loss_of))
                if summary is not None:
                    found[condition.label] = summary
        return found

    def every_result(self) -> list[Result]:
        """All runs that were trained to their end."""
        results = [result for condition in self.conditions for result in condition.results.values()]
        return [result for result in results if "pruned" not in result]

    def best_by_arm(self) -> dict[str, ConditionResults]:
        """The condition with the lowest mean of each arm: of a search what is compared."""
        best: dict[str, ConditionResults] = {}
        for condition in self.conditions:
            loss = condition.loss
            before = best.get(condition.arm)
            if loss is not None and (before is None or before.loss is None or loss.mean < before.loss.mean):
                best[condition.arm] = condition
        return best

    def summary(self) -> list[str]:
        """Sentences made from the numbers."""
        return words.summary(self)

    def to_dict(self) -> dict[str, Any]:
        """The figures, as values for JSON."""
        return {
            "study": self.study.to_dict(),
            "conditions": [
                {
                    "condition": c.label,
                    "loss": None if c.loss is None else vars(c.loss),
                    "loss_by_seed": c.numbers(loss_of),
                    "failed": c.failed,
                    "open": c.open,
                }
                for c in self.conditions
            ],
            "differences": {label: vars(summary) for label, summary in self.differences().items()},
            "summary": self.summary(),
        }


def collect(directory: str | Path) -> Findings:
    """Read a study directory; the data are not needed. Raises: UserError if it is none, or damaged."""
    place = StudyDirectory(directory)
    study, plan = place.study(), place.plan()
    runs, not_begun = [dict(run) for run in plan["runs"]], 0
    if study.search is not None and study.search.engine != "grid":
        runs = _trials(place, study)
        not_begun = 0 if plan.get("complete") else max(0, study.search.trials * len(study.arms) - len(runs))
    planned = {condition["condition"]: condition for condition in plan["conditions"]}
    conditions: dict[str, ConditionResults] = {}
    for run in runs:
        label = run["condition"]
        arm = planned.get(label) or planned.get(label.split(", trial")[0]) or {}
        condition = conditions.setdefault(label, ConditionResults(label, arm, {}, {}, {}, []))
        _add(place, study, condition, run)
    folders = {path.name for path in place.runs.glob("*") if path.is_dir()}
    others = len(folders - {run["id"] for run in runs})
    return Findings(place.path, study, plan, list(conditions.values()), others, not_begun)


def _trials(place: StudyDirectory, study: Study) -> list[dict[str, Any]]:
    """The runs of a search, each with the values it tried in its label."""
    assert study.search is not None
    found, arms = [], list(study.arms)
    runs = [Run.of(read_json(file)) for file in place.runs.glob("*/run.json")]
    for run in sorted(runs, key=lambda run: (arms.index(run.arm) if run.arm in arms else len(arms), run.trial or 0)):
        if run.trial is not None:
            settings, tried = run.recipe.to_dict(), []
            for key in space_of(study.search.space):
                section, _, name = key.partition(".")
                value = settings[section][name]
                tried.append(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}")
            label = f"{run.condition}, trial {run.trial}: {', '.join(tried)}"
            found.append({"id": run.id, "condition": label, "seed": run.seed})
    return found


def _add(place: StudyDirectory, study: Study, condition: ConditionResults, run: Mapping[str, Any]) -> None:
    folder, seed = place.folder(run["id"]), run["seed"]
    if (folder / "result.json").is_file():
        result = read_json(folder / "result.json")
        check_result(result, folder / "result.json")
        condition.results[seed] = result
        condition.points[seed] = _points(folder / "train" / "metrics.jsonl", result)
    elif (error := place.error(run["id"])) is not None:
        condition.failed[seed] = str(error.get("message"))
    else:
        condition.open.append(seed)


def _points(path: Path, result: Result) -> list[Point]:
    """Validations of a run, with what had been spent by then; a damaged line of the record is passed over."""
    if not path.is_file():
        return []
    flops = result.get("cost", {}).get("training_flops_per_token", 0.0)
    spent: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    tokens = seconds = 0.0
    points = []
    for line in read_metrics(path):
        event, loss = line.get("event"), line.get("loss")
        if event == "step" and isinstance(line.get("tokens"), int):
            rate = line.get("tokens_per_second")
            seconds += (line["tokens"] - tokens) / rate if isinstance(rate, int | float) and rate > 0 else 0.0
            tokens = line["tokens"]
            spent[line["step"]] = (tokens, seconds)
        elif event == "eval" and isinstance(loss, int | float) and line["step"] in spent:
            then, after = spent[line["step"]]
            points.append(Point(line["step"], then, then * flops, after, loss))
    return points
