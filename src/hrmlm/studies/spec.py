"""What a study is: a YAML file of arms × variants × grid × seeds under one budget, strict, changed by overrides."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from hrmlm.config import Positive, StrictConfig, nearest
from hrmlm.errors import UserError
from hrmlm.training.recipe import RECIPES, NotNegative, PositiveFloat, parse_override, read_yaml, set_at

STUDIES = RECIPES / "studies"
Name = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9 .×=+_-]*$")]
Seed = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]


class Budget(StrictConfig):
    """What every run may spend; exactly one of them. steps: optimizer steps (0: no training, the fresh weights are
    measured); tokens: read in training; flops: training FLOPs by the rule of `hrmlm info`; seconds: of training, turned
    into steps once, by a measurement on the machine that starts the study."""

    steps: NotNegative | None = None
    tokens: PositiveFloat | None = None
    flops: PositiveFloat | None = None
    seconds: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "Budget":
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"one of steps, tokens, flops, seconds is needed, got {', '.join(given) or 'none'}")
        return self

    @property
    def kind(self) -> str:
        """steps, tokens, flops or seconds."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def told(self) -> str:
        """For people: "400 steps"."""
        amount = f"{self.amount:,.0f}" if self.amount < 1e9 else f"{self.amount:.3g}"
        return f"{amount} {'FLOPs' if self.kind == 'flops' else self.kind}"

    @property
    def amount(self) -> float:
        """How much of it."""
        return getattr(self, self.kind)


class Match(StrictConfig):
    """A width to be solved for. quantity: what must be equal (FLOPs per token, at the training window); to: a number,
    or the arm whose quantity it is; vary: the width that is solved; tolerance: largest relative difference."""

    quantity: Literal["parameters", "forward_flops", "training_flops"] = "parameters"
    to: float | str
    vary: Literal["d_model", "hidden"] = "d_model"
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.01

    @field_validator("to", mode="before")
    @classmethod
    def _check_target(cls, value: Any) -> Any:
        """One message in place of one per kind."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, str) and not (is_number and 0 < value < math.inf):
            raise ValueError("expected a number above 0, or the name of an arm")
        return value


class Arm(StrictConfig):
    """One side of the comparison. model: settings of a family; optimizer, schedule: what differs from the base."""

    model: dict[str, Any]
    optimizer: dict[str, Any] = Field(default_factory=dict)
    schedule: dict[str, Any] = Field(default_factory=dict)
    match: Match | None = None


class Evaluation(StrictConfig):
    """How the weights at the end of every run are scored. window: None is the training window; stride: None is the
    window; tokens: of the split (None: all)."""

    split: str = "valid"
    window: Positive | None = None
    stride: Positive | None = None
    tokens: Positive | None = None
    batch_size: Positive = 16


class Published(StrictConfig):
    """A published figure to stand beside ours. condition: the label of ours; setting: how it was obtained."""

    condition: str
    value: float
    what: str
    setting: str
    source: str


class Search(StrictConfig):
    """Hyper-parameters tuned for every arm by itself, with the same number of trials. engine: "grid" (all combinations
    of lists of values; needs no package) or "tpe" (Optuna); space: dotted key → list of values, or {low, high, log} for
    "tpe". The rest is for "tpe" only. trials: per arm; prune: stop trials early that do worse than the median of the
    others; seed: of the sampler."""

    engine: Literal["grid", "tpe"] = "grid"
    trials: Positive = 8
    space: dict[str, Any]
    prune: bool = True
    seed: Seed = 0


class Study(StrictConfig):
    """A study. base: the recipe that all runs share, without its model; arms: what is compared; variants: changes of
    every arm, one at a time, beside the arm as it is; grid: dotted key → values, all combinations; seeds: a number of
    them or a list; baseline: the condition to which differences are formed; measure: further measurements after
    training; scale: which of the file's sizes this is (`scales` in the file: changes of the study, by name); prepare:
    the command that makes its data, told where they are missing, and in the report."""

    name: Name
    title: str
    question: str = ""
    base: dict[str, Any]
    arms: Annotated[dict[Name, Arm], Field(min_length=1)]
    variants: dict[Name, dict[str, Any]] = Field(default_factory=dict)
    grid: dict[str, Any] = Field(default_factory=dict)
    seeds: list[Seed] | Annotated[int, Field(ge=1, le=1000, strict=True)] = 3
    budget: Budget
    evaluation: Evaluation = Evaluation()
    baseline: str | None = None
    measure: tuple[Literal["roles", "latency"], ...] = ()
    search: Search | None = None
    published: tuple[Published, ...] = ()
    scale: str = "small"
    prepare: str = ""

    @property
    def seed_list(self) -> list[int]:
        """The seeds."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @field_validator("seeds", mode="before")
    @classmethod
    def _check_kind(cls, value: Any) -> Any:
        """One message in place of one per kind."""
        if isinstance(value, bool) or not (isinstance(value, list) or (isinstance(value, int) and 1 <= value <= 1000)):
            raise ValueError("expected how many (1 to 1000), or a list of them such as [0, 1, 2]")
        return value

    @model_validator(mode="after")
    def _check_seeds(self) -> "Study":
        if not self.seed_list or len(set(self.seed_list)) != len(self.seed_list):
            raise ValueError(f"seeds {self.seeds}: at least one, and none twice")
        if self.search is not None and self.grid:
            raise ValueError("search and grid exclude each other: put the values into search.space")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for YAML and JSON."""
        return self.model_dump(mode="json")


def study_names() -> list[str]:
    """Names of the studies that come with the package."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def find_study(name: str) -> Path:
    """The file of a study given by path, or by name where it comes with the package. Raises: UserError."""
    if Path(name).is_file():
        return Path(name)
    shipped = STUDIES / f"{name}.yaml"
    if "/" not in name and shipped.is_file():
        return shipped
    if name.endswith((".yaml", ".yml")) or "/" in name:
        shipped = STUDIES / Path(name).name
        if shipped.is_file() and Path(name).parent.name == "studies":
            return shipped
        raise UserError(f"study {name} does not exist; shipped studies: {', '.join(study_names())}")
    raise UserError(f"unknown study {name!r}, {nearest(name, study_names())}")


def load_study(name: str, overrides: Sequence[str] = ()) -> Study:
    """Read and validate a study. overrides: "key=value" with dotted keys; "scale=NAME" takes another of its sizes.

    Raises: UserError in one line, with all mistakes of its keys; those of its conditions are told by `expand`.
    """
    path = find_study(name)
    settings = read_yaml(path)
    if not isinstance(settings, dict):
        raise UserError(f"{path} is not a study: it needs name, title, base, arms and budget")
    changes = [(override, *parse_override(override)) for override in overrides]
    for _, parts, value in changes:
        if parts == ["scale"]:
            settings["scale"] = value
    settings = _scaled(settings, path, any(parts == ["scale"] for _, parts, _ in changes))
    for override, parts, value in changes:
        if parts[0] not in Study.model_fields:
            raise UserError(f"override {override!r}: unknown key, {nearest(parts[0], Study.model_fields)}")
        if parts[0] == "budget" and len(parts) == 2:  # another kind of budget replaces the one in the file
            settings["budget"] = {}
        set_at(settings, parts, value, f"override {override!r}")
    return Study.parse(settings, "study")


def parse_study(text: str, where: str) -> Study:
    """The study in a text that `dump_study` made. Raises: UserError."""
    try:
        return Study.parse(yaml.safe_load(text), where)
    except yaml.YAMLError as error:
        raise UserError(f"{where} cannot be read as YAML: {' '.join(str(error).split())}") from None


def dump_study(study: Study) -> str:
    """The study as YAML, everything resolved."""
    return yaml.safe_dump(study.to_dict(), sort_keys=False, allow_unicode=True)


def _scaled(settings: dict[str, Any], path: Path, asked: bool) -> dict[str, Any]:
    """The settings with those of the chosen scale merged in, and without the others; "small" is the file as it is.

    asked: the scale was chosen now. A resolved study names a scale that was merged in before, and has none to choose.
    """
    scale, scales = settings.get("scale", "small"), settings.get("scales") or {}
    settings = {key: value for key, value in settings.items() if key != "scales"}
    if (scale == "small" and "small" not in scales) or (not scales and not asked):
        return settings
    if not isinstance(scales, dict) or not isinstance(scales.get(scale), dict):
        raise UserError(f"{path}: unknown scale {scale!r}, {nearest(str(scale), {'small', *map(str, scales)})}")
    return merged(settings, scales[scale])


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with changes; mappings are merged, anything else is replaced. A budget is replaced as a whole."""
    result = dict(settings)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and key not in ("budget", "match"):
            value = merged(old, value)
        result[key] = value
    return result


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; lists and values stay as they are."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            result.update(flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result
