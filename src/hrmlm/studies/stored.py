"""What must be in the files of a study directory, so that a damaged one is told by its name and not by a traceback.

Only what reports rely on; whatever else is in a file stays.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from hrmlm.errors import UserError

Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Scored(BaseModel):
    checkpoint: str
    data: str
    data_path: str
    split: str
    tokenizer: str
    tokens: int
    window: int
    stride: int
    batch_size: int
    first_tokens: int | None
    precision: str
    device: str
    rule: str


class _Steps(BaseModel):
    batch_size: int
    accumulation: int
    precision: str


class _Rate(BaseModel):
    lr: Finite


class _Model(BaseModel):
    d_model: int
    vocab_size: int


class _Settings(BaseModel):
    model: _Model
    training: _Steps
    optimizer: _Rate
    schedule: dict[str, Any]


class _Cost(BaseModel):
    parameters: int
    training_flops_per_token: Finite


class _Facts(BaseModel):
    """Of every run that is over."""

    id: str
    condition: str
    seed: int
    steps: int
    hrmlm: str
    code: str
    torch: str
    python: str
    threads: int
    measures: dict[str, dict[str, Any] | None]


class _Result(_Facts):
    """Of a run that was trained to its end."""

    loss: Finite | None
    bits_per_byte: Finite | None
    tokens: int
    training_seconds: Finite
    peak_process_bytes: int
    cost: _Cost
    evaluation: _Scored
    recipe: _Settings


class _Condition(BaseModel):
    condition: str
    parameters: int
    forward_flops_per_token: Finite
    steps: int
    matched: str | None = None
    lr: Finite | None = None


class _Run(BaseModel):
    id: str
    condition: str
    seed: int


class _Source(BaseModel):
    source: str
    split: str | None


class _Corpus(BaseModel):
    path: str
    tokenizer: str
    vocab_size: int
    tokens: dict[str, int]
    sources: list[_Source]


class _Plan(BaseModel):
    conditions: list[_Condition]
    runs: list[_Run]
    jobs: int = 1
    complete: bool = False
    corpus: _Corpus | None = None


def check_result(value: Any, file: Path) -> None:
    """Raises: UserError if it is no result of a run."""
    kind = _Facts if isinstance(value, Mapping) and "pruned" in value else _Result
    _check(kind, value, file, "remove it and run the study again: the run is evaluated anew")


def check_plan(value: Any, file: Path) -> None:
    """Raises: UserError if it is no plan of a study."""
    _check(_Plan, value, file, "give `hrmlm study run` again, it is written anew")


def _check(kind: type[BaseModel], value: Any, file: Path, advice: str) -> None:
    try:
        kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{file} is damaged ({where or 'all of it'}: {first['msg'].lower()}); {advice}") from None
