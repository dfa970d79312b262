"""What a training run is: one validated recipe, read from YAML, changed by dotted overrides."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from hrmlm.config import Number, Positive, StrictConfig, nearest
from hrmlm.errors import UserError
from hrmlm.models import ModelConfig, model_config

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

NotNegative = Annotated[int, Field(ge=0, strict=True)]
PerStep = Annotated[int, Field(gt=0, le=1 << 20, strict=True)]  # more would be a slip: a step that never ends
Fraction = Annotated[Number, Field(ge=0, le=1)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
PositiveFloat = Annotated[Number, Field(gt=0, allow_inf_nan=False)]


class CorpusConfig(StrictConfig):
    """One corpus of a mixture. path: directory written by `hrmlm prepare`; weight: its share of the tokens, on any
    scale."""

    path: str
    weight: PositiveFloat = 1.0


class DataConfig(StrictConfig):
    """path: directory written by `hrmlm prepare`; mix: several of them instead; window: tokens the model reads at once
    in training (None: the model's context); workers: processes that read batches ahead (0: none; reading is seldom
    slow); verify: when the files are compared with their recorded SHA-256 (see `hrmlm.data.verify`)."""

    path: str | None = None
    mix: tuple[CorpusConfig, ...] = ()
    window: Positive | None = None
    workers: Annotated[int, Field(ge=0, le=256, strict=True)] = 0
    verify: Literal["auto", "always", "never"] = "auto"

    @model_validator(mode="after")
    def _check_sources(self) -> "DataConfig":
        if self.path is not None and self.mix:
            raise ValueError("path and mix exclude each other; take one away: data.path=null or data.mix=[]")
        return self

    @property
    def corpora(self) -> tuple[CorpusConfig, ...]:
        """The corpora of either kind; empty where none is given."""
        return self.mix or (() if self.path is None else (CorpusConfig(path=self.path),))


class OptimizerConfig(StrictConfig):
    """kind: "adamw" (Loshchilov & Hutter 2019), or "muon" (Jordan et al. 2024) for the matrices inside the blocks and
    AdamW for all else. lr: peak learning rate; betas, eps: of AdamW; weight_decay: on matrices, not on gains, biases
    and vectors; clip: base of the largest gradient norm let through, which the trainer multiplies by the model's K/M;
    muon_lr: peak learning rate of the matrices under Muon (None: lr); muon_momentum: of their gradients; muon_adjust:
    what a rate means for matrices of different shapes: "match_rms_adamw" gives updates as large as AdamW's (Liu et al.
    2025), "original" makes them orthogonal."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: PositiveFloat = 3e-4
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[Number, Field(ge=0, allow_inf_nan=False)] = 0.1
    clip: PositiveFloat = 1.0
    muon_lr: PositiveFloat | None = None
    muon_momentum: Beta = 0.95
    muon_adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"

    @model_validator(mode="after")
    def _check_muon(self) -> "OptimizerConfig":
        fields = type(self).model_fields
        changed = [n for n in fields if n.startswith("muon_") and getattr(self, n) != fields[n].default]
        if changed and self.kind != "muon":
            raise ValueError(f"{', '.join(changed)} without effect: kind is {self.kind}")
        return self


class ScheduleConfig(StrictConfig):
    """Learning rate over the run. kind: "cosine" (warm-up, then half a cosine down to min_ratio) or "wsd" (warm-up,
    stable, then linear decay to min_ratio over the last decay_fraction); warmup: steps (None: what the family asks for,
    or warmup_fraction of a run too short for that)."""

    kind: Literal["cosine", "wsd"] = "cosine"
    warmup: NotNegative | None = None
    warmup_fraction: Fraction = 0.2
    min_ratio: Fraction = 0.1
    decay_fraction: Fraction = 0.2


class TrainingConfig(StrictConfig):
    """steps: optimizer steps; batch_size: windows per forward pass, of all processes together; accumulation: forward
    passes per step, weighted by token; seed: of weights, data order, dropout and exit sampling; precision: see
    training/precision.py; compile: see training/compiling.py; loss_chunk: positions whose logits exist at once (None:
    all); checkpoint_activations: compute the applications again in the backward pass instead of keeping what is inside
    them; peak_flops: FLOP/s of one device, for the MFU (None: known of some GPUs); eval_every, save_every: in steps
    (0: only at the end); eval_tokens: validation tokens looked at during training (None: all); keep: checkpoints kept
    beside the best one; trackers: further records besides metrics.jsonl; init_from: checkpoint whose weights a new run
    starts from."""

    steps: Positive = 1000
    batch_size: PerStep = 16
    accumulation: PerStep = 1
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    device: str = "cpu"
    precision: Literal["float32", "bfloat16", "bfloat16_weights"] = "float32"
    compile: Literal["none", "block", "application"] = "none"
    peak_flops: Annotated[Number, Field(ge=1e6, le=1e18)] | None = None
    loss_chunk: Positive | None = None
    checkpoint_activations: bool = False
    eval_every: NotNegative = 250
    eval_tokens: Positive | None = 65_536
    save_every: NotNegative = 250
    keep: Positive = 2
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    init_from: str | None = None

    @field_validator("trackers")
    @classmethod
    def _check_trackers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("the same tracker stands twice; name each once")
        return value

    @field_validator("compile", mode="before")
    @classmethod
    def _compile_by_name(cls, value: Any) -> Any:
        """True and false, as in older recipes."""
        return {True: "block", False: "none"}[value] if isinstance(value, bool) else value


class DistillationConfig(StrictConfig):
    """Learning from a teacher besides the text (Hinton et al. 2015). teacher: checkpoint or run of any family, trained
    with the tokenizer of the data; temperature: of both distributions that are compared; weight: share of the
    teacher in the objective, the rest is the text's."""

    teacher: str
    temperature: PositiveFloat = 2.0
    weight: Fraction = 0.5


class ParallelConfig(StrictConfig):
    """How several processes share the work; without torchrun there is one. strategy: "ddp" (each holds the whole
    model) or "fsdp" (each holds its share of weights, gradients and optimizer state); timeout: seconds after which a
    process that does not answer ends the run."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    timeout: Annotated[Number, Field(gt=0, le=1e9)] = 600.0


class Recipe(StrictConfig):
    """A training run: `model` (settings of a family), `data`, `training`, `optimizer`, `schedule`, `parallel`, and
    `distillation` where there is a teacher."""

    model: dict[str, Any]
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    distillation: DistillationConfig | None = None

    @model_validator(mode="after")
    def _check_model(self) -> "Recipe":
        config = self.model_config_of()
        if self.data.window and self.data.window > config.context:
            raise ValueError(f"data.window {self.data.window} is longer than model.context {config.context}")
        return self

    def model_config_of(self) -> ModelConfig:
        """The validated configuration of the model."""
        return model_config(self.model)

    @property
    def window(self) -> int:
        """Tokens the model reads at once in training."""
        return self.data.window or self.model_config_of().context

    def changed(self, overrides: Sequence[str]) -> "Recipe":
        """The recipe with dotted overrides such as "model.d_model=256" applied. Raises: UserError."""
        settings = self.to_dict()
        for override in overrides:
            _apply(settings, override)
        return Recipe.parse(settings, "recipe")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for YAML and JSON; settings of the model as they were given."""
        return self.model_dump(mode="json")


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package; those of full published size are its presets."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe given by path, or by name where it comes with the package. Raises: UserError."""
    if Path(name).is_file():
        return Path(name)
    shipped = RECIPES / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    if name.endswith((".yaml", ".yml")) or "/" in name:
        shipped = RECIPES / Path(name).name
        if shipped.is_file() and Path(name).parent.name == "recipes":
            return shipped
        raise UserError(f"recipe {name} does not exist; shipped recipes: {', '.join(recipe_names())}")
    raise UserError(f"unknown recipe or preset {name!r}, {nearest(name, recipe_names())}")


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """The value in a YAML file. Raises: UserError for what is not YAML, and for a key that stands twice."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:  # ValueError: as of the date 2024-13-45
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe. name: path or name of a shipped recipe; overrides: "section.key=value".

    Raises: UserError in one line: missing file, bad YAML, unknown key (with the nearest valid one), bad value.
    """
    path = find_recipe(name)
    settings = read_yaml(path)
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
        raise UserError(f"{path} is not a recipe: it needs a section `model:` with at least `family:`")
    for override in overrides:
        _apply(settings, override)
    return Recipe.parse(settings, "recipe")


def scale_warning_for(name: str, changed: Recipe) -> str | None:
    """`scale_warning` against the recipe as it stands in its file; None where that is valid only with the overrides."""
    try:
        return scale_warning(load_recipe(name), changed)
    except UserError:
        return None


def scale_warning(base: Recipe, changed: Recipe) -> str | None:
    """A warning where overrides change the tokens per step by more than 4 times and leave the learning rate alone."""

    def tokens(recipe: Recipe) -> int:
        return recipe.training.batch_size * recipe.training.accumulation * recipe.window

    ratio = tokens(changed) / tokens(base)
    if 0.25 <= ratio <= 4 or changed.optimizer.lr != base.optimizer.lr:
        return None
    return (
        f"{tokens(changed):,} tokens per step where the recipe has {tokens(base):,} ({ratio:.2g} times): its learning "
        f"rate (optimizer.lr={base.optimizer.lr:g}) and schedule ({base.schedule.kind}, {base.training.steps} steps) "
        "were chosen for that; set optimizer.lr and training.steps too"
    )


def _apply(settings: dict[str, Any], override: str) -> None:
    """Set one dotted key in nested settings; the value is read as YAML."""
    parts, value = parse_override(override)
    if len(parts) == 1 and parts[0] not in Recipe.model_fields:
        raise UserError(f"override {override!r}: unknown key, {_where(parts[0], settings.get('model'))}")
    set_at(settings, parts, value, f"override {override!r}")


def parse_override(override: str) -> tuple[list[str], Any]:
    """Parts of the dotted key, and the value read as YAML, of "section.key=value". Raises: UserError."""
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise UserError(f"override {override!r} is not of the form section.key=value, such as training.steps=100")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f"override {override!r}: the value is not valid YAML") from None
    return parts, _number(value) if isinstance(value, str) else value


def set_at(settings: dict[str, Any], parts: Sequence[str], value: Any, where: str) -> None:
    """Set the value at a path of nested settings, making sections on the way. Raises: UserError, beginning `where`."""
    for part in parts[:-1]:
        if settings.get(part) is None:
            settings[part] = {}
        if not isinstance(settings[part], dict):
            raise UserError(f"{where}: {part} is a value, not a section")
        settings = settings[part]
    settings[parts[-1]] = value


def _number(text: str) -> float | str:
    """YAML 1.1 reads 3e-4 as a text; people mean a number."""
    try:
        return float(text)
    except ValueError:
        return text


def _where(key: str, model: Any) -> str:
    """Hint for a key without its section. model: the section of the recipe, whose family decides its keys."""
    sections: Mapping[str, type[StrictConfig]] = {
        "data": DataConfig,
        "training": TrainingConfig,
        "optimizer": OptimizerConfig,
        "schedule": ScheduleConfig,
        "parallel": ParallelConfig,
        "distillation": DistillationConfig,
        "model": type(model_config(model)),
    }
    homes = {field: f"{name}.{field}" for name, section in sections.items() for field in section.model_fields}
    close = difflib.get_close_matches(key, homes, n=1, cutoff=0.6)
    return f"did you mean {homes[close[0]]!r}?" if close else nearest(key, Recipe.model_fields)
