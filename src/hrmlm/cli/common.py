"""What several commands share: options, JSON, and what scores a model."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hrmlm.errors import UserError

if TYPE_CHECKING:
    from hrmlm.checkpoint import Checkpoint
    from hrmlm.evaluation.report import LossReport
    from hrmlm.models import LanguageModel

HaltThreshold = Annotated[
    float | None,
    typer.Option(help="Stop a position when its halting probabilities sum to this (default: as trained)."),
]

Exit = Annotated[
    str | None,
    typer.Option(help="When a position stops: change:X, kl:X, halt:X or cycles:N (default: as trained)."),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]


def print_json(value: Any) -> None:
    """One line of JSON, in characters that standard output has."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a terminal without these characters, or a file name that is not UTF-8
        text = json.dumps(value)
    print(text)


def fail(message: str, code: int) -> None:
    """End with one line on standard error and this exit code."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def warn_of_depth(model: Any, depth: int | None) -> None:
    """Warn on standard error of a depth that the model was not trained for."""
    from hrmlm.steps import depth_warning

    if warning := depth_warning(model, depth):
        print(f"warning: {warning}", file=sys.stderr)


def evaluator(model: "LanguageModel", source: "Checkpoint", data: Path, split: str) -> "Callable[..., LossReport]":
    """What scores the model on prepared data or a text file. Raises: UserError for data of another tokenizer."""
    from hrmlm.checkpoint import load_tokenizer
    from hrmlm.data.tokens import PreparedData
    from hrmlm.evaluation.loss import evaluate_data, evaluate_file

    tokenizer = load_tokenizer(source)
    if not data.is_dir():
        return partial(evaluate_file, model, data, tokenizer, checkpoint=str(source.path))
    prepared = PreparedData.open(data)
    if prepared.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{source.path} was trained with tokenizer {tokenizer.fingerprint} and {data} was prepared with "
            f"{prepared.tokenizer.fingerprint}; prepare the text with --tokenizer {source.path}/tokenizer.json"
        )
    return partial(evaluate_data, model, prepared, split, checkpoint=str(source.path), data_path=str(data))
