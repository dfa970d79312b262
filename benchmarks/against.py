"""Training speed of this version beside an older one, on one process each, in the same run.

Both versions get the same recipe and the same random tokens and train with their own Trainer, each in a process of its
own, which takes turns with the other: while one trains, the other waits for its turn and does nothing.

    git worktree add ../older COMMIT
    PYTHONPATH=src python benchmarks/against.py ../older/src --threads 2

Prints a card for people; the last line is JSON for programs.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common import parser_of, told_in_one_line

MODELS: dict[str, dict[str, Any]] = {
    "hrm_lm": {"n_cycles": 2, "fast_steps": 2},
    "transformer": {"n_layers": 4},
    "universal": {"n_steps": 7},
}
"""Families and settings that all versions know."""


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; with `--serve` be one of its two processes."""
    options = parse(arguments)
    if options.serve:
        return serve()
    from hrmlm.errors import UserError

    with told_in_one_line():
        if not 0 < options.warmup < options.rounds:
            raise UserError(f"{options.rounds} rounds with a warm-up of {options.warmup} leave nothing to measure")
        if not (options.older / "hrmlm" / "__init__.py").is_file():
            raise UserError(f"{options.older} holds no hrmlm; give the directory src of an older checkout")
        report(options, {model: compare(options, model) for model in options.models})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options from the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("older", type=Path, nargs="?", default=Path("../older/src"), help="directory src of the older version")
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--d-model", type=int, default=256)
    add("--length", type=int, default=256)
    add("--batch-size", type=int, default=4)
    add("--vocab-size", type=int, default=4096)
    add("--threads", type=int, default=2)
    add("--steps", type=int, default=3, help="steps per turn")
    add("--rounds", type=int, default=20, help="turns of each version, the warm-up included")
    add("--warmup", type=int, default=3, help="first rounds, not counted")
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def serve() -> None:
    """Read a job, then numbers of steps; after each print the seconds they took."""
    import torch

    from hrmlm.data.batch import Batch
    from hrmlm.models import build_model
    from hrmlm.training.recipe import Recipe
    from hrmlm.training.trainer import Trainer

    job = json.loads(sys.stdin.readline())
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    recipe = Recipe.parse(job["recipe"], "recipe")
    shape = (recipe.training.batch_size, recipe.model["context"] + 1)

    def batches(start: int, stop: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(start)
        for _ in range(start, stop):
            ids_BL = torch.randint(recipe.model["vocab_size"], shape, generator=generator)
            yield Batch(ids_BL[:, :-1].contiguous(), ids_BL[:, 1:].contiguous())

    steps = Trainer(recipe, build_model(recipe.model), batches).steps()
    for line in sys.stdin:
        started = time.perf_counter()
        for _ in range(int(line)):
            result = next(steps)
        print(json.dumps({"seconds": time.perf_counter() - started, "loss": result.loss}), flush=True)


@contextmanager
def server(source: Path, job: dict[str, Any]) -> Iterator["subprocess.Popen[str]"]:
    """A process that trains with the version in `source`."""
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        print(json.dumps(job), file=process.stdin)
        try:
            yield process
        finally:
            process.kill()


def turn(process: "subprocess.Popen[str]", steps: int) -> dict[str, float]:
    """Let a process train for some steps. Raises: UserError if it has ended instead."""
    from hrmlm.errors import UserError

    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        print(steps, file=process.stdin)
    answer = process.stdout.readline()
    if not answer:
        raise UserError("a version cannot train this: see its message above")
    return json.loads(answer)


def compare(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Figures of one model in both versions."""
    from hrmlm.evaluation.timing import Timing

    settings = {"family": model, "vocab_size": options.vocab_size, "context": options.length, **MODELS[model]}
    recipe = {
        "model": {**settings, "d_model": options.d_model},
        "training": {"batch_size": options.batch_size, "steps": 1 + options.rounds * options.steps},
    }
    job = {"recipe": recipe, "threads": options.threads}
    seconds: dict[str, list[float]] = {"this": [], "older": []}
    losses = {}
    with server(Path(__file__).parents[1] / "src", job) as this, server(options.older, job) as older:
        processes = {"this": this, "older": older}
        for number in range(options.rounds):
            for name in sorted(processes, reverse=number % 2 == 0):  # none is always first
                answer = turn(processes[name], options.steps)
                losses[name] = answer["loss"]
                if number >= options.warmup:
                    seconds[name].append(answer["seconds"])
    timings = {name: Timing(tuple(values)) for name, values in seconds.items()}
    tokens = options.steps * options.batch_size * options.length
    ratios = sorted(b / a for a, b in zip(seconds["this"], seconds["older"], strict=True))
    return {
        "tokens_per_second": {name: tokens / timing.median for name, timing in timings.items()},
        "spread": {name: timing.spread for name, timing in timings.items()},
        "this_over_older": timings["older"].ratio(timings["this"]),
        "middle_half": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "last_loss": losses,
    }


def report(options: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> None:
    """Print the card and the line of JSON."""
    import torch
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Tokens per second in training", title_justify="left")
    for column in ("model", "this version", "older version", "this / older", "middle half", "spreads"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for model, row in rows.items():
        rate, spread, (low, high) = row["tokens_per_second"], row["spread"], row["middle_half"]
        table.add_row(
            model,
            f"{rate['this']:,.0f}",
            f"{rate['older']:,.0f}",
            f"{row['this_over_older']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{spread['this']:.0%}, {spread['older']:.0%}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"D {options.d_model}, {options.batch_size} x {options.length} tokens, none of them padding, {options.threads} "
        f"threads, torch {torch.__version__}, float32; whole steps of each version's own trainer; this / older: median "
        f"over {options.rounds - options.warmup} pairs of turns of {options.steps} steps, after {options.warmup} to "
        "warm up; spread = (slowest - fastest) / median."
    )
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    print(json.dumps({"options": settings, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
