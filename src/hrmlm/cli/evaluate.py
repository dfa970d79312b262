"""`hrmlm evaluate`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from hrmlm.cli.common import Exit, HaltThreshold, Json, evaluator, print_json, warn_of_depth


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run directory.")],
    data: Annotated[Path, typer.Option(help="Prepared directory, or a UTF-8 text file.")],
    split: Annotated[str, typer.Option(help="Split of prepared data.")] = "valid",
    window: Annotated[int | None, typer.Option(help="Tokens the model sees at once (default: its context).")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens scored per window (default: the window).")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Score the first so many tokens only.")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass; no influence on the result.")] = 8,
    depth: Annotated[int | None, typer.Option(help="Cycles, steps or layers to run (default: as trained).")] = None,
    halt_threshold: HaltThreshold = None,
    exit: Exit = None,
    as_json: Json = False,
) -> None:
    """Score text: nats per token, perplexity and bits per byte, all from one total.

    Example: hrmlm evaluate runs/demo/hrm-lm --data data/book --stride 64
    """
    from hrmlm.checkpoint import load_model
    from hrmlm.evaluation.loss import show
    from hrmlm.steps import depth_keywords
    from hrmlm.training.run import resolve_checkpoint

    source = resolve_checkpoint(checkpoint)
    model = load_model(source)
    warn_of_depth(model, depth_keywords(model, depth, halt_threshold, exit)["depth"])
    report = evaluator(model, source, data, split)(
        window=window,
        stride=stride,
        batch_size=batch_size,
        first_tokens=tokens,
        depth=depth,
        halt_threshold=halt_threshold,
        exit=exit,
        progress=sys.stderr.isatty(),
    )
    if as_json:
        return print_json(report.to_dict())
    from rich.console import Console

    show(report, Console())
