"""From a study to its runs: every condition resolved to a recipe, every mistake found before the first run starts."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hrmlm.config import StrictConfig, nearest
from hrmlm.data.tokens import PreparedData, TokenWindows
from hrmlm.errors import UserError
from hrmlm.evaluation.cost import CostReport, cost_of
from hrmlm.models import build_model
from hrmlm.studies.matching import quantity_of, solve
from hrmlm.studies.spec import Arm, Study, flat, merged
from hrmlm.training.recipe import DataConfig, OptimizerConfig, Recipe, ScheduleConfig, TrainingConfig
from hrmlm.training.train import model_config_for

SECTIONS = {"model", "optimizer", "schedule", "training", "data"}
FAIR = ("model", "optimizer", "schedule")
"""What arms and variants may change: the data, their order and the evaluation are the same for all."""
FACTORS: Mapping[str, type[StrictConfig]] = {
    "data": DataConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
}
RESERVED = {"training.steps": "budget", "training.seed": "seeds", "data.path": "base.data.path"}


class StudyMistakes(UserError):
    """All that keeps a study from being run."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = list(dict.fromkeys(mistakes))
        many = f"{len(self.mistakes)} mistakes, nothing was started: " if len(self.mistakes) > 1 else ""
        super().__init__(many + "; ".join(f"({i}) {m}" if many else m for i, m in enumerate(self.mistakes, 1)))


class _Circle(UserError):
    """Arms that are matched to each other."""


class _Told(UserError):
    """A mistake that another condition tells."""


NOT_DECISIVE = {
    "data": ("path", "workers", "verify"),
    "training": ("keep", "trackers", "peak_flops"),
    "parallel": ("strategy", "timeout"),
}
"""Settings that decide where and how a run is done, not what comes out."""


@dataclass(frozen=True)
class Condition:
    """One thing that is compared, to be run with every seed.

    label: its name in tables; arm, variant, factors: where it comes from; recipe: with the vocabulary filled in, for
    seed 0; cost: at the training window; matched: the quantity that was solved for, if any.
    """

    label: str
    arm: str
    variant: str | None
    factors: dict[str, Any]
    recipe: Recipe
    cost: CostReport
    matched: str | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that the model reads in one optimizer step."""
        training = self.recipe.training
        return training.batch_size * training.accumulation * self.recipe.window


@dataclass(frozen=True)
class Run:
    """One training run. id: stable, of what decides the result; steps: 0 for fresh weights."""

    id: str
    condition: str
    arm: str
    seed: int
    steps: int
    recipe: Recipe
    evaluation: dict[str, Any]
    measure: tuple[str, ...]
    trial: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        return {**vars(self), "recipe": self.recipe.to_dict(), "measure": list(self.measure)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Run":
        """The run that `to_dict` told. Raises: UserError if its recipe is none."""
        try:
            recipe = Recipe.parse(values["recipe"], "run: recipe")
            return cls(**{**values, "recipe": recipe, "measure": tuple(values["measure"])})
        except (KeyError, TypeError) as error:
            raise UserError(f"not the description of a run: {error}") from None


@dataclass
class Expansion:
    """A study that can be run: its conditions, and the data they all read."""

    study: Study
    conditions: list[Condition]
    data: PreparedData
    by_label: dict[str, Condition] = field(init=False)

    def __post_init__(self) -> None:
        self.by_label = {condition.label: condition for condition in self.conditions}

    def steps_of(self, condition: Condition, step_seconds: Mapping[str, float] | None = None) -> int:
        """Optimizer steps that the budget pays for. step_seconds: by label; needed where the budget is a time."""
        budget = self.study.budget
        if budget.kind == "steps":
            return int(budget.amount)
        price: float = condition.tokens_per_step
        if budget.kind == "flops":
            price *= condition.cost.training_flops_per_token
        elif budget.kind == "seconds":
            assert step_seconds is not None, "a budget in seconds needs a measurement"
            price = step_seconds[condition.label]
        return math.floor(budget.amount / price * (1 + 1e-9))

    def runs(self, step_seconds: Mapping[str, float] | None = None) -> list[Run]:
        """All runs, seed by seed, so that a study broken off has compared something.

        Raises: StudyMistakes if the budget does not pay for one step.
        """
        steps = {c.label: self.steps_of(c, step_seconds) for c in self.conditions}
        budget = self.study.budget
        short = [label for label, number in steps.items() if number < 1]
        if short and not (budget.kind == "steps" and budget.amount == 0):
            raise StudyMistakes(
                [f"budget.{budget.kind} {budget.amount:g} does not pay for one step of {label!r}" for label in short]
            )
        return [
            self.run(condition, seed, steps[condition.label])
            for seed in self.study.seed_list
            for condition in self.conditions
        ]

    def run(self, condition: Condition, seed: int, steps: int, trial: int | None = None) -> Run:
        """The run of a condition with a seed."""
        settings = condition.recipe.to_dict()
        settings["training"] |= {"seed": seed, "steps": max(1, steps)}
        evaluation = self.study.evaluation.model_dump(mode="json")
        recipe = Recipe.parse(settings, "recipe")
        decisive = json.loads(json.dumps(recipe.to_dict()))
        for section, keys in NOT_DECISIVE.items():
            for key in keys:
                decisive[section].pop(key)
        facts = {"recipe": decisive, "data": self.data.meta.fingerprint, "evaluation": evaluation, "steps": steps}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", condition.label).strip("-").lower()[:60]
        return Run(
            id=f"{slug}-s{seed}-{digest}",
            condition=condition.label,
            arm=condition.arm,
            seed=seed,
            steps=steps,
            recipe=recipe,
            evaluation=evaluation,
            measure=self.study.measure,
            trial=trial,
        )


def expand(study: Study) -> Expansion:
    """Resolve a study. Raises: StudyMistakes with everything that keeps it from being run, all at once."""
    mistakes = [*_base_mistakes(study), *_name_mistakes(study)]
    data = _open_data(study, mistakes)
    labels: set[str] = set()
    conditions, by_mistake = [], dict[str, list[str]]()
    for label, arm, variant, factors, settings in _combinations(study, mistakes):
        if label in labels:
            mistakes.append(f"two conditions are named {label!r}; rename an arm or a variant")
        labels.add(label)
        try:
            recipe, matched = _resolve(study, arm, settings, data)
            conditions.append(Condition(label, arm, variant, factors, recipe, _cost(recipe), matched))
        except _Told:
            continue
        except UserError as error:
            by_mistake.setdefault(str(error).removeprefix("recipe."), []).append(label)
    for mistake, where in by_mistake.items():
        others = len(where) - 1
        more = f" (and {others} more condition{'s' if others > 1 else ''})" if others else ""
        mistakes.append(f"{where[0]}{more}: {mistake}")
    mistakes += _label_mistakes(study, labels)
    if data is not None:
        for condition in conditions:
            mistakes += _run_mistakes(study, condition, data)
    if mistakes:
        raise StudyMistakes(mistakes)
    assert data is not None
    expansion = Expansion(study, conditions, data)
    if study.budget.kind != "seconds":
        expansion.runs()
    return expansion


def _base_mistakes(study: Study) -> Iterator[str]:
    for section in study.base:
        if section == "model":
            yield "base.model: models belong into the arms"
        elif section not in SECTIONS:
            yield f"base.{section}: unknown section, {nearest(section, SECTIONS - {'model'})}"
        elif not isinstance(study.base[section], dict):
            yield f"base.{section}: expected a mapping of keys to values, got {study.base[section]!r}"
    training = study.base.get("training")
    for key, instead in (("steps", "budget"), ("seed", "seeds")):
        if isinstance(training, dict) and key in training:
            yield f"base.training.{key}: the study decides it; use {instead}"


def _name_mistakes(study: Study) -> Iterator[str]:
    """Of factors and variants: keys that no recipe has, and those that would make the comparison unfair."""
    for name, changes in study.variants.items():
        for key in flat(changes):
            if key.split(".")[0] not in FAIR:
                yield f"variants.{name}: {key!r} is not among {', '.join(FAIR)}, which is all that a variant may change"
    for name, arm in study.arms.items():
        if arm.match is not None and isinstance(arm.match.to, str) and arm.match.to not in study.arms:
            yield f"arms.{name}.match.to: unknown arm {arm.match.to!r}, {nearest(arm.match.to, study.arms)}"
    for where, key in _factor_keys(study):
        yield from _factor_mistakes(where, key, study)
    for key, values in flat(study.grid).items():
        if not isinstance(values, list) or not values:
            yield f"grid.{key}: expected a list of values, got {values!r}"
        elif len({factor(key, value) for value in values}) < len(values):
            yield f"grid.{key}: two of the values {values!r} are the same in six digits; they would have one label"
    if study.search is not None:
        for key, values in space_of(study.search.space).items():
            yield from _space_mistakes(key, values, study.search.engine)


def _factor_keys(study: Study) -> list[tuple[str, str]]:
    """Where each factor stands, and its key."""
    space = study.search.space if study.search is not None else {}
    return [("grid", key) for key in flat(study.grid)] + [("search.space", key) for key in space_of(space)]


def _factor_mistakes(where: str, key: str, study: Study) -> Iterator[str]:
    section, _, name = key.partition(".")
    if key in RESERVED:
        yield f"{where}: {key} is decided by {RESERVED[key]}"
    elif section == "model" and name:
        pass  # known only together with the family: the recipe of each arm tells
    elif section not in FACTORS or name not in FACTORS[section].model_fields:
        yield f"{where}: unknown factor {key!r}, {nearest(key, _all_factors(study))}"


def _all_factors(study: Study) -> list[str]:
    keys = [f"{section}.{name}" for section, kind in FACTORS.items() for name in kind.model_fields]
    keys += [f"model.{name}" for arm in study.arms.values() for name in arm.model]
    return sorted(set(keys) - RESERVED.keys())


def space_of(space: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys of a search space, whose leaves are lists or {low, high, log}."""
    result: dict[str, Any] = {}
    for key, value in space.items():
        if isinstance(value, Mapping) and not {"low", "high"} & value.keys():
            result.update({f"{key}.{inner}": leaf for inner, leaf in space_of(value).items()})
        else:
            result[key] = value
    return result


def _space_mistakes(key: str, values: Any, engine: str) -> Iterator[str]:
    if isinstance(values, list) and values:
        if any(isinstance(value, float) and not math.isfinite(value) for value in values):
            yield f"search.space.{key}: values must be finite, got {values!r}"
        return
    is_range = isinstance(values, Mapping) and {"low", "high"} <= values.keys() <= {"low", "high", "log"}
    if engine == "grid":
        yield f"search.space.{key}: the engine grid needs a list of values, got {values!r}"
    elif not is_range:
        yield f"search.space.{key}: expected a list of values or {{low, high, log}}, got {values!r}"
    elif not (all(_is_finite(values[k]) for k in ("low", "high")) and values["low"] < values["high"]):
        yield f"search.space.{key}: low must be a number below high, got {values!r}"
    elif not isinstance(values.get("log", False), bool):
        yield f"search.space.{key}: log must be true or false, got {values!r}"
    elif values.get("log") and values["low"] <= 0:
        yield f"search.space.{key}: low must be above 0 where log is true, got {values!r}"


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _open_data(study: Study, mistakes: list[str]) -> PreparedData | None:
    section = study.base.get("data")
    path = section.get("path") if isinstance(section, dict) else None
    if not isinstance(path, str):
        mistakes.append("base.data.path is not set; give the directory that `hrmlm prepare` wrote: base.data.path=DIR")
        return None
    try:
        data = PreparedData.open(path)
        data.split("train")
        data.split("valid")
        data.split(study.evaluation.split)
    except UserError as error:
        how = f" (for this study: {study.prepare})" if study.prepare else ""
        mistakes.append(f"base.data.path: {error}{how}")
        return None
    return data


def factors_of(study: Study) -> list[dict[str, Any]]:
    """All combinations of the grid, or of the space of a grid search; one without factors where there is neither."""
    factors = flat(study.grid)
    if study.search is not None and study.search.engine == "grid":
        factors = space_of(study.search.space)
    told = {key for where, key in _factor_keys(study) if any(_factor_mistakes(where, key, study))}
    factors = {k: v for k, v in factors.items() if k not in told and isinstance(v, list) and v}  # told elsewhere
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def _combinations(
    study: Study, mistakes: list[str]
) -> Iterator[tuple[str, str, str | None, dict[str, Any], dict[str, Any]]]:
    """Label, arm, variant, factors and recipe settings of each condition."""
    for name, arm in study.arms.items():
        fair = {k: v for k, v in study.variants.items() if all(key.split(".")[0] in FAIR for key in flat(v))}
        for variant, changes in [(None, {}), *fair.items()]:
            for factors in factors_of(study):
                settings = _settings(study, arm)
                try:
                    settings = merged(settings, nested(changes))
                    settings = merged(settings, nested(factors))
                except UserError as error:
                    mistakes.append(str(error))
                    continue
                yield _label(name, variant, factors), name, variant, factors, settings


def _settings(study: Study, arm: Arm) -> dict[str, Any]:
    base = {section: value for section, value in study.base.items() if isinstance(value, dict) and section in SECTIONS}
    return merged(base, {"model": arm.model, "optimizer": arm.optimizer, "schedule": arm.schedule})


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections; sections stay."""
    result: dict[str, Any] = {}
    for key, value in changes.items():
        parts = key.split(".")
        inner: Any = nested(value) if isinstance(value, Mapping) else value
        for part in reversed(parts):
            inner = {part: inner}
        result = merged(result, inner)
    return result


def _label(arm: str, variant: str | None, factors: Mapping[str, Any]) -> str:
    parts = [arm, *([variant] if variant else [])]
    return ", ".join(parts + [factor(key, value) for key, value in factors.items()])


def factor(key: str, value: Any) -> str:
    """A factor with its value, as it stands in the label of a condition."""
    return f"{key.rpartition('.')[2]}={f'{value:g}' if isinstance(value, float) else value}"


def _resolve(
    study: Study, arm: str, settings: dict[str, Any], data: PreparedData | None, above: tuple[str, ...] = ()
) -> tuple[Recipe, str | None]:
    """The recipe of a condition with its width solved for and its vocabulary filled in."""
    settings = {**settings, "training": {**settings.get("training", {}), "steps": 1}}
    recipe = Recipe.parse(settings, "recipe")
    if data is not None:
        recipe = _with_model(recipe, model_config_for(recipe, data.meta.vocab_size).model_dump(mode="json"))
    match = study.arms[arm].match
    if match is None or recipe.model_config_of().vocab_size is None:
        return recipe, None
    target = match.to
    if isinstance(target, str):
        target = _target(study, arm, target, data, above, match.quantity)
    model = {k: v for k, v in recipe.model.items() if v is not None}
    model = solve(model, match, target, recipe.window)
    return _with_model(recipe, model), f"{match.quantity} of {match.to if isinstance(match.to, str) else f'{target:g}'}"


def _target(
    study: Study, arm: str, other: str, data: PreparedData | None, above: tuple[str, ...], quantity: str
) -> float:
    """The quantity of the arm that another one is to match."""
    if other not in study.arms:
        raise _Told(other)
    if other in (*above, arm):
        raise _Circle(f"match.to: {other!r} is matched to {arm!r} in a circle; one of them needs a width of its own")
    try:
        recipe, _ = _resolve(study, other, _settings(study, study.arms[other]), data, (*above, arm))
    except _Circle:
        raise
    except UserError as error:
        raise _Told(str(error)) from None
    return quantity_of(_cost(recipe), quantity)


def _with_model(recipe: Recipe, model: dict[str, Any]) -> Recipe:
    return Recipe.parse({**recipe.to_dict(), "model": model}, "recipe")


def _cost(recipe: Recipe) -> CostReport:
    """Costs at the training window. Without data the vocabulary may be unknown: then something is wrong already."""
    model = recipe.model_config_of()
    return cost_of(model if model.vocab_size else model.replace(vocab_size=257), recipe.window)


def _label_mistakes(study: Study, labels: set[str]) -> Iterator[str]:
    if study.baseline is not None and study.baseline not in labels | set(study.arms):
        yield f"baseline: unknown condition {study.baseline!r}, {nearest(study.baseline, labels | set(study.arms))}"
    known = labels | set(study.arms)
    for item in study.published:
        if item.condition not in known:
            yield f"published: unknown condition {item.condition!r}, {nearest(item.condition, known)}"


def _run_mistakes(study: Study, condition: Condition, data: PreparedData) -> Iterator[str]:
    """What would stop a run of the condition at its start."""
    training = condition.recipe.training
    try:
        TokenWindows(data.split("train"), condition.recipe.window, training.batch_size)
    except UserError as error:
        yield f"{condition.label}: {error}"
    window = study.evaluation.window or condition.recipe.window
    context = condition.recipe.model_config_of().context
    if window > context:
        yield f"evaluation.window {window} is longer than the context of {condition.label}, {context}"
    if study.evaluation.stride and study.evaluation.stride > window:
        yield f"evaluation.stride {study.evaluation.stride} is larger than the window, {window}"
    if len(data.split(study.evaluation.split)) == 0:
        yield f"evaluation.split {study.evaluation.split}: there is no text in it"
    if training.init_from and not Path(training.init_from).is_dir():
        yield f"{condition.label}: training.init_from {training.init_from} does not exist"
    try:
        with torch.device("meta"):
            build_model(condition.recipe.model_config_of()).check_training(condition.recipe.window)
    except UserError as error:
        yield f"{condition.label}: {error}"


def device_mistakes(expansion: Expansion) -> list[str]:
    """Devices that this machine does not have; only a dry run does without them."""
    mistakes = []
    for device in {condition.recipe.training.device for condition in expansion.conditions}:
        try:
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            mistakes.append(f"training.device {device!r} cannot be used: {reason}")
    return mistakes
