"""`hrmlm probe`: commands that study a trained model."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hrmlm.cli.common import Json, evaluator, print_json, warn_of_depth
from hrmlm.errors import UserError

if TYPE_CHECKING:
    from hrmlm.checkpoint import Checkpoint
    from hrmlm.evaluation.speed import Run, Speed
    from hrmlm.models import LanguageModel

probe = typer.Typer(help="Study a trained model.", no_args_is_help=True)

MOST_NUMBERS = 1000
"""A list of settings is not longer: each is evaluated."""

Seconds = Annotated[float, typer.Option(min=0, help="About how long to measure the speed of decoding (0: not at all).")]


def _deliver(study: Any, result: Any, out: Path | None, as_json: bool) -> None:
    """Write the result of a probe where it was asked for, and print it: by the `write` and `show` of its module."""
    picture = study.write(result, out) if out is not None else None
    if as_json:
        return print_json(result.to_dict())
    from rich.console import Console

    study.show(result, Console())
    if picture is not None:
        print(f"Picture: {picture}")


@probe.command()
def depth(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run directory.")],
    data: Annotated[Path, typer.Option(help="Prepared directory, or a UTF-8 text file.")],
    split: Annotated[str, typer.Option(help="Split of prepared data.")] = "valid",
    thresholds: Annotated[
        str | None, typer.Option(help="Halting thresholds, such as 0.5,0.9 (default: 0.5,0.7,0.9,0.99).")
    ] = None,
    exits: Annotated[
        str | None,
        typer.Option("--exits", "--exit", help="Exit policies, such as change:0.1,kl:0.01 (default: several of both)."),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="Fixed depths, such as 1..8 or 1,2,4 (default: as far as makes sense).")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Look at so many tokens only.")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens the model sees at once (default: its context).")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens scored per window (default: the window).")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass; no influence on the result.")] = 8,
    seconds: Seconds = 30.0,
    out: Annotated[Path | None, typer.Option(help="Directory for depth.json and the picture depth.png.")] = None,
    as_json: Json = False,
) -> None:
    """Loss, steps truly executed and speed, at fixed depths and with rules that stop earlier.

    Example: hrmlm probe depth runs/tinystories-cosmicfish --data runs/data/tinystories --out curves
    """
    from hrmlm.checkpoint import load_model
    from hrmlm.evaluation import depth as study
    from hrmlm.evaluation.agreement import agreements
    from hrmlm.evaluation.picture import check_out
    from hrmlm.training.run import resolve_checkpoint

    if out is not None:
        check_out(out)
    source = resolve_checkpoint(checkpoint)
    model = load_model(source)
    settings: dict[str, Any] = {"window": window, "stride": stride, "batch_size": batch_size}
    chosen = _numbers(depths, int, "--depths")
    if chosen:
        warn_of_depth(model, max(chosen))
    settings["progress"] = sys.stderr.isatty()
    result = study.probe_depth(
        model,
        partial(evaluator(model, source, data, split), first_tokens=tokens, **settings),
        thresholds=_numbers(thresholds, float, "--thresholds"),
        exits=None if exits is None else [part for part in exits.split(",") if part],
        depths=chosen,
        compare=lambda asked: agreements(model, _stream(source, data, split, tokens), asked, **settings),
        speeds=_speeds(model, source, data, split, seconds),
    )
    _deliver(study, result, out, as_json)


@probe.command()
def cache(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run directory.")],
    data: Annotated[Path, typer.Option(help="Prepared directory, or a UTF-8 text file.")],
    split: Annotated[str, typer.Option(help="Split of prepared data.")] = "valid",
    policies: Annotated[
        str | None, typer.Option(help="Cache policies, such as first,last,every:2 (default: all that differ).")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Cycles, steps or layers to run (default: as trained).")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Look at so many tokens only.")] = 4096,
    window: Annotated[int | None, typer.Option(help="Tokens the model sees at once (default: its context).")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens scored per window (default: the window).")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass; no influence on the result.")] = 8,
    seconds: Seconds = 30.0,
    out: Annotated[Path | None, typer.Option(help="Directory for cache.json and the picture cache.png.")] = None,
    as_json: Json = False,
) -> None:
    """Bytes, loss and speed of every cache policy: what is saved by keeping fewer cycles' keys, and what it costs.

    Example: hrmlm probe cache runs/demo/hrm-lm --data data/book --out curves
    """
    from hrmlm.checkpoint import load_model
    from hrmlm.evaluation import cache_policies as study
    from hrmlm.evaluation.picture import check_out
    from hrmlm.training.run import resolve_checkpoint

    if out is not None:
        check_out(out)
    source = resolve_checkpoint(checkpoint)
    model = load_model(source)
    settings = {"window": window, "stride": stride, "batch_size": batch_size, "first_tokens": tokens}
    result = study.probe_cache(
        model,
        partial(evaluator(model, source, data, split), progress=sys.stderr.isatty(), **settings),
        None if policies is None else [part for part in policies.split(",") if part],
        depth=depth,
        speeds=_speeds(model, source, data, split, seconds),
    )
    _deliver(study, result, out, as_json)


@probe.command()
def memory(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run directory of a model with a memory.")],
    data: Annotated[Path, typer.Option(help="Prepared directory, or a UTF-8 text file.")],
    split: Annotated[str, typer.Option(help="Split of prepared data.")] = "valid",
    tokens: Annotated[int, typer.Option(min=1, help="Look at so many tokens at most.")] = 65_536,
    window: Annotated[int | None, typer.Option(help="Training window (default: the model's context).")] = None,
    length: Annotated[int | None, typer.Option(help="Cut documents at so many tokens (default: 16 windows).")] = None,
    batch_size: Annotated[int, typer.Option(help="Documents per forward pass; no influence on the result.")] = 16,
    out: Annotated[Path | None, typer.Option(help="Directory for memory.json and the picture memory.png.")] = None,
    as_json: Json = False,
) -> None:
    """What each level of a memory does, how far back it reaches, and what carrying it on is worth in long documents.

    Example: hrmlm probe memory runs/wikitext2-memory-hrm --data runs/data/articles --split test --out curves
    """
    from hrmlm.checkpoint import load_model, load_tokenizer
    from hrmlm.evaluation import memory as study
    from hrmlm.evaluation.picture import check_out
    from hrmlm.training.run import resolve_checkpoint

    if out is not None:
        check_out(out)
    source = resolve_checkpoint(checkpoint)
    model = load_model(source)
    result = study.probe_memory(
        model,
        study.read_ids(data, split, load_tokenizer(source)),
        load_tokenizer(source).end_of_text,
        window=window,
        length=length,
        tokens=tokens,
        batch_size=batch_size,
        names={"checkpoint": str(source.path), "data": str(data), "split": split if data.is_dir() else None},
    )
    _deliver(study, result, out, as_json)


def _speeds(
    model: "LanguageModel", source: "Checkpoint", data: Path, split: str, seconds: float
) -> "Callable[[Sequence[Run]], list[Speed | None]] | None":
    """What measures decoding on the beginning of the text; None: it is not to be measured."""
    from hrmlm.evaluation.speed import MOST_IDS, check_seconds, decode_speeds

    if not seconds:
        return None
    check_seconds(seconds)
    return lambda runs: decode_speeds(model, _stream(source, data, split, MOST_IDS), runs, seconds=seconds)


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
            low, high = (int(first), int(last)) if dots and kind is int else (0, 0)
            if low > high:
                raise UserError(f"{option} {part}: a range goes from the smaller number to the larger one")
            if len(numbers) + high - low >= MOST_NUMBERS:
                raise UserError(f"{option} {text!r} has more than {MOST_NUMBERS} numbers; ask for fewer")
            numbers += range(low, high + 1) if dots and kind is int else [kind(part)]
    except UserError:
        raise
    except ValueError:
        example = "1,2,4 or 1..8" if kind is int else "0.5,0.9"
        raise UserError(f"{option} {text!r} is not a list of numbers such as {example}") from None
    return numbers
