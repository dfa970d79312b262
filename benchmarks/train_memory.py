"""Peak memory of training the hierarchical model over its depth M and its gradient window K.

Every row is a training step of hrm_lm with M = N x T fast steps of which the last K are inside the graph: predicted
(a step on shapes, see `hrmlm info --memory`) and measured in a new process. Activations are all that is neither
weights, gradients nor optimizer state: they should follow K, not M. "frugal" is activations computed again in the
backward pass and the loss in chunks.

    PYTHONPATH=src python benchmarks/train_memory.py --d-model 128 --length 128 --batch-size 8

Prints a card for people; the last line is JSON for programs.
"""

import json
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import hrmlm
from common import parser_of, told_in_one_line
from hrmlm.errors import UserError
from hrmlm.evaluation.measured_memory import measure
from hrmlm.evaluation.training_memory import PeakMemory, predict
from hrmlm.training.recipe import Recipe


@dataclass(frozen=True)
class Options:
    """Settings of a run. depths: of the model, M; windows: K, of which those are used that are not above M."""

    d_model: int
    length: int
    batch_size: int
    vocab_size: int
    fast_steps: int
    depths: tuple[int, ...]
    windows: tuple[int, ...]
    loss_chunk: int
    device: str
    precision: str


@dataclass(frozen=True)
class Row:
    """One way to train one model. measured: bytes."""

    depth: int
    window: int
    is_frugal: bool
    predicted: PeakMemory
    measured: int

    @property
    def measured_activations(self) -> int:
        """What was measured beyond weights, gradients and optimizer state, whose sizes are known."""
        return self.measured - self.predicted.total + self.predicted.activations


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark. Mistakes end it with one line and exit code 2."""
    options = parse(arguments)
    with told_in_one_line():
        report(options, run(options))


def parse(arguments: list[str] | None) -> Options:
    """Options from the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--d-model", type=int, default=128)
    add("--length", type=int, default=128, help="tokens per sequence")
    add("--batch-size", type=int, default=8, help="sequences per step")
    add("--vocab-size", type=int, default=4096)
    add("--fast-steps", type=int, default=2, help="T, fast steps per cycle")
    add("--depths", type=int, nargs="+", default=[4, 16], help="M, fast steps of the model")
    add("--windows", type=int, nargs="+", default=[4, 16], help="K, last fast steps inside the graph")
    add("--loss-chunk", type=int, default=256, help="positions per chunk of the loss, where it is in chunks")
    add("--device", default="cpu", help="cpu or cuda")
    add("--precision", default="float32", help="as training.precision")
    given = vars(parser.parse_args(arguments))
    return Options(**{**given, "depths": tuple(given["depths"]), "windows": tuple(given["windows"])})


def run(options: Options) -> list[Row]:
    """Predict and measure every row."""
    ways = [
        (depth, window, frugal)
        for frugal in (False, True)
        for window in options.windows
        for depth in options.depths
        if window <= depth
    ]
    console = Console(stderr=True)
    return [
        Row(*way, predict(recipe(options, *way)), measure(recipe(options, *way)))
        for way in track(ways, "measuring", console=console, disable=not console.is_terminal)
    ]


def recipe(options: Options, depth: int, window: int, frugal: bool) -> Recipe:
    """The training of one row."""
    if depth % options.fast_steps:
        raise UserError(f"depth {depth} is no multiple of the {options.fast_steps} fast steps per cycle")
    model = {
        "family": "hrm_lm",
        "vocab_size": options.vocab_size,
        "context": options.length,
        "d_model": options.d_model,
        "n_cycles": depth // options.fast_steps,
        "fast_steps": options.fast_steps,
        "gradient_window": window,
    }
    training = {
        "batch_size": options.batch_size,
        "device": options.device,
        "precision": options.precision,
        "checkpoint_activations": frugal,
        "loss_chunk": options.loss_chunk if frugal else None,
    }
    return Recipe.parse({"model": model, "training": training}, "benchmark")


def report(options: Options, rows: list[Row]) -> None:
    """Print the card and the line of JSON."""
    table = Table(title="Peak memory of a training step, MiB", title_justify="left")
    for column in ("M", "K", "frugal", "activations: predicted", "measured", "total: predicted", "measured", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (row.predicted.activations, row.measured_activations, row.predicted.total, row.measured)
        cells = [f"{number / 2**20:,.1f}" for number in numbers]
        ratio = f"{row.predicted.total / row.measured:.2f}"
        table.add_row(str(row.depth), str(row.window), "yes" if row.is_frugal else "", *cells, ratio)
    console = Console()
    console.print(table)
    console.print(
        f"hrm_lm, D {options.d_model}, T {options.fast_steps}, {options.batch_size} x {options.length} tokens, "
        f"vocabulary {options.vocab_size:,}; {options.precision}, {options.device}, torch {torch.__version__}; frugal: "
        f"applications computed again, loss in chunks of {options.loss_chunk}; ratio: predicted / measured, of totals."
    )
    found: list[dict[str, Any]] = [
        {**asdict(row), "predicted": {**asdict(row.predicted), "total": row.predicted.total}} for row in rows
    ]
    machine = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    print(json.dumps({"options": asdict(options), "machine": {**machine, "hrmlm": hrmlm.__version__}, "rows": found}))


if __name__ == "__main__":
    main()
