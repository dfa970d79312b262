"""Commands that study a trained model, and the import of released weights."""

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

probe = typer.Typer(help="Study a trained model.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]


def print_json(value: Any) -> None:
    """One line of JSON, in characters that standard output has."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a terminal without these characters, or a file name that is not UTF-8
        text = json.dumps(value)
    print(text)


@probe.command()
def depth(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run directory.")],
    data: Annotated[Path, typer.Option(help="Prepared directory, or a UTF-8 text file.")],
    split: Annotated[str, typer.Option(help="Split of prepared data.")] = "valid",
    thresholds: Annotated[
        str | None, typer.Option(help="Halting thresholds, such as 0.5,0.9 (default: 0.5,0.7,0.9,0.99).")
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="Fixed depths, such as 1..8 or 1,2,4 (default: as far as makes sense).")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Look at so many tokens only.")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens the model sees at once (default: its context).")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens scored per window (default: the window).")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass; no influence on the result.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Directory for depth.json and the picture depth.png.")] = None,
    as_json: Json = False,
) -> None:
    """Loss and steps truly executed at halting thresholds and at fixed depths: the curve of quality and compute.

    Example: hrmlm probe depth runs/tinystories-cosmicfish --data runs/data/tinystories --out curves
    """
    from hrmlm.checkpoint import load_model
    from hrmlm.evaluation import depth as study
    from hrmlm.evaluation.agreement import agreements
    from hrmlm.steps import depth_warning
    from hrmlm.training.run import resolve_checkpoint

    if out is not None:
        study.pyplot()  # a missing package is told before the work, not after it
    source = resolve_checkpoint(checkpoint)
    model = load_model(source)
    settings: dict[str, Any] = {"window": window, "stride": stride, "batch_size": batch_size}
    chosen = _numbers(depths, int, "--depths")
    if chosen and (warning := depth_warning(model, max(chosen))):
        print(f"warning: {warning}", file=sys.stderr)
    settings["progress"] = sys.stderr.isatty()
    result = study.probe_depth(
        model,
        partial(evaluator(model, source, data, split), first_tokens=tokens, **settings),
        thresholds=_numbers(thresholds, float, "--thresholds"),
        depths=chosen,
        compare=lambda asked: agreements(model, _stream(source, data, split, tokens), asked, **settings),
    )
    picture = study.write(result, out) if out is not None else None
    if as_json:
        return print_json(result.to_dict())
    from rich.console import Console

    study.show(result, Console())
    if picture is not None:
        print(f"Picture: {picture}")


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


def _stream(source: "Checkpoint", data: Path, split: str, first_tokens: int | None) -> Any:
    """The ids that the evaluator scores, with the end-of-text mark in front."""
    import numpy as np

    from hrmlm.checkpoint import load_tokenizer
    from hrmlm.data.tokens import PreparedData
    from hrmlm.evaluation.loss import file_ids

    tokenizer = load_tokenizer(source)
    ids = PreparedData.open(data).split(split) if data.is_dir() else file_ids(data, tokenizer)
    return np.concatenate([[tokenizer.end_of_text], ids[:first_tokens]]).astype(np.int64)


def _numbers(text: str | None, kind: type, option: str) -> Any:
    """Numbers of a list "1,2,4", where whole ones may be ranges "1..8"; None for None. Raises: UserError."""
    if text is None:
        return None
    numbers: list[Any] = []
    try:
        for part in filter(None, text.split(",")):
            first, dots, last = part.partition("..")
            numbers += range(int(first), int(last) + 1) if dots and kind is int else [kind(part)]
    except ValueError:
        example = "1,2,4 or 1..8" if kind is int else "0.5,0.9"
        raise UserError(f"{option} {text!r} is not a list of numbers such as {example}") from None
    return numbers


def import_command(
    format_name: Annotated[str, typer.Argument(metavar="FORMAT", help="Whose files they are: cosmicfish.")],
    weights: Annotated[Path, typer.Option(help="The released weights, a .safetensors file.")],
    config: Annotated[Path, typer.Option(help="The configuration released with them, a JSON file.")],
    out: Annotated[Path, typer.Option(help="Checkpoint directory to write; it must not exist.")],
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json to store with it.")] = None,
    as_json: Json = False,
) -> None:
    """Turn released weights into a checkpoint of this library.

    Example: hrmlm import cosmicfish --weights model.safetensors --config config.json --out runs/cosmicfish
    """
    from hrmlm.importing import import_weights

    model = import_weights(format_name, weights, config, out, tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if as_json:
        facts = {"out": str(out), "parameters": parameters, "model": model.config.model_dump(mode="json")}
        return print_json(facts)
    print(f"{out}: {parameters:,} parameters, {model.config.family}")
    if tokenizer is None:
        print("It holds no tokenizer: generate and evaluate need one, import again with --tokenizer.", file=sys.stderr)
