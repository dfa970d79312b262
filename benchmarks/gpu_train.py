"""Training on a GPU: tokens per second, MFU, peak memory and loss of hrm_lm, a Transformer and a Universal Transformer.

One command that needs this repository, PyTorch and the core dependencies only. The text is the source code of the
running Python, or `--data`. Every model is trained by the project's own trainer at several widths, on the same text:

    PYTHONPATH=src python benchmarks/gpu_train.py
    PYTHONPATH=src python benchmarks/gpu_train.py --device cpu --widths 64 --length 64 --steps 30 --warmup 10

Clocks are read when the device has finished; the first `--warmup` steps, with compiling in them, do not count. A model
that does not fit is tried with half the batch and twice the accumulation. Prints a line per model as it is done, then a
card for people; the last line is JSON for programs. MFU: training FLOPs by the rule of `hrmlm.evaluation.cost`, divided
by the dense peak of the device in the precision that is computed in.
"""

import gc
import json
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hrmlm
from common import parser_of, told_in_one_line
from hrmlm.data.prepare import prepare
from hrmlm.data.tokens import PreparedData, TokenWindows, loader
from hrmlm.errors import UserError
from hrmlm.evaluation.timing import Timing, wait
from hrmlm.models import build_model
from hrmlm.training.recipe import Recipe
from hrmlm.training.trainer import Trainer
from hrmlm.training.utilisation import Utilisation, peak_flops

MODELS: dict[str, dict[str, Any]] = {
    "hrm_lm": {"n_cycles": 2, "fast_steps": 2},  # 61·D² weights, 7 applications
    "transformer": {"n_layers": 4},  # 64·D² weights, 4 applications
    "universal": {"n_steps": 7},  # 16·D² weights, 7 applications
}
SPAN = 10
"""Steps between two looks at the clock: waiting for the device at each step would slow it down."""


@dataclass(frozen=True)
class Options:
    """Settings of a run; see `parse`."""

    widths: list[int]
    models: list[str]
    steps: int
    warmup: int
    length: int
    batch_size: int
    vocab_size: int
    precision: str
    compile: str
    loss_chunk: int | None
    set: list[str]
    device: str
    workers: int
    data: str | None
    peak_flops: float | None
    seed: int


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark. Mistakes end it with one line and exit code 2."""
    options = parse(arguments)
    with told_in_one_line():
        check(options)
        with tempfile.TemporaryDirectory() as scratch:
            report(options, run(options, open_data(options, Path(scratch))))


def parse(arguments: list[str] | None) -> Options:
    """Options from the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=[512, 1024, 2048], help="D, widths of the models")
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--steps", type=int, default=300, help="optimizer steps, the warm-up included")
    add("--warmup", type=int, default=40, help="first steps, not counted in the speed")
    add("--length", type=int, default=1024, help="tokens per window")
    add("--batch-size", type=int, default=32, help="windows per step")
    add("--vocab-size", type=int, default=8192, help="ids of a tokenizer trained on the text; 257: bytes")
    add("--precision", choices=["float32", "bfloat16", "bfloat16_weights"], default="bfloat16")
    add("--compile", choices=["none", "block", "application"], default="application")
    add("--loss-chunk", type=int, help="training.loss_chunk: tokens whose logits exist at once (default: all)")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further changes of the recipe")
    add("--device", default="cuda")
    add("--workers", type=int, default=2, help="processes that read batches ahead")
    add("--data", help="directory that `hrmlm prepare` wrote (default: the sources of the running Python)")
    add("--peak-flops", type=float, help="FLOP/s of the device, where it is not known")
    add("--seed", type=int, default=0)
    return Options(**vars(parser.parse_args(arguments)))


def check(options: Options) -> None:
    """Raises: UserError for settings that measure nothing, and for a device that is not there."""
    if options.warmup < 1 or options.steps - options.warmup < SPAN:
        raise UserError(
            f"{options.steps} steps with a warm-up of {options.warmup} leave fewer than the {SPAN} that are timed "
            "together; ask for more"
        )
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {options.device} is not there; give --device cpu, at toy size")


def open_data(options: Options, scratch: Path) -> PreparedData:
    """The text, as tokens."""
    if options.data is not None:
        return PreparedData.open(options.data)
    print("preparing the sources of the running Python", file=sys.stderr)
    tokenizer = "bytes" if options.vocab_size == 257 else "bpe"
    prepare(["python-stdlib"], scratch / "data", tokenizer=tokenizer, vocab_size=options.vocab_size)
    return PreparedData.open(scratch / "data")


def recipe(options: Options, model: str, width: int, vocab_size: int, split: int = 1) -> Recipe:
    """The recipe of one row. split: parts into which the batch is cut, for memory."""
    settings = {
        "model": {
            "family": model,
            "vocab_size": vocab_size,
            "context": options.length,
            "d_model": width,
            **MODELS[model],
        },
        "training": {
            "steps": options.steps,
            "batch_size": options.batch_size // split,
            "accumulation": split,
            "seed": options.seed,
            "device": options.device,
            "precision": options.precision,
            "compile": options.compile,
            **({} if options.loss_chunk is None else {"loss_chunk": options.loss_chunk}),
        },
        "optimizer": {"lr": 0.5 / width},
        "schedule": {"warmup": max(1, options.steps // 10)},
    }
    return Recipe.parse(settings, "recipe").changed(options.set)


def run(options: Options, data: PreparedData) -> list[dict[str, Any]]:
    """Train every model at every width."""
    rows = []
    for width in options.widths:
        for model in options.models:
            row = {"model": model, "d_model": width, **fitted(options, data, model, width)}
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def fitted(options: Options, data: PreparedData, model: str, width: int) -> dict[str, Any]:
    """The figures of the largest batch that fits; without figures if one window does not."""
    split = 1
    while split <= options.batch_size:
        try:
            return measured(options, data, recipe(options, model, width, data.meta.vocab_size, split))
        except torch.OutOfMemoryError:
            split *= 2
        finally:
            if options.compile != "none":
                torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
    return {"fits": False}


def measured(options: Options, data: PreparedData, settings: Recipe) -> dict[str, Any]:
    """Train one model; its figures."""
    device, training = torch.device(options.device), settings.training
    torch.manual_seed(options.seed)
    windows = TokenWindows(data.split("train"), settings.window, training.batch_size, seed=options.seed)
    on_gpu = device.type == "cuda"
    trainer = Trainer(
        settings,
        build_model(settings.model_config_of()),
        lambda start, stop: loader(windows, start, stop, options.workers, on_gpu),
    )
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    steps, losses, seconds = trainer.steps(), [], []
    losses += [result.loss for result in islice(steps, options.warmup)]
    for _ in range((options.steps - options.warmup) // SPAN):
        wait(device)
        started = time.perf_counter()
        results = list(islice(steps, SPAN))
        wait(device)
        seconds.append(time.perf_counter() - started)
        losses += [result.loss for result in results]
    timing = Timing(tuple(seconds))
    tokens_per_second = SPAN * results[-1].tokens / timing.median
    peak = options.peak_flops or peak_flops(device, training.precision)
    utilisation = Utilisation(trainer.model, settings.window, peak)
    depth = results[-1].depth
    last = losses[-2 * SPAN :]
    return {
        "fits": True,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "depth": depth,
        "batch_size": training.batch_size,
        "accumulation": training.accumulation,
        "tokens_per_second": tokens_per_second,
        "flops_per_second": utilisation.flops_per_token(depth) * tokens_per_second,
        "mfu": utilisation.of(depth, tokens_per_second),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "first_loss": losses[0],
        "last_loss": sum(last) / len(last),
        "spans": len(seconds),
        "spread": timing.spread,
    }


def report(options: Options, rows: list[dict[str, Any]]) -> None:
    """Print the card and the line of JSON."""
    on_gpu = torch.device(options.device).type == "cuda"
    name = torch.cuda.get_device_name(options.device) if on_gpu else platform.processor() or platform.machine()
    machine = {"device": name, "torch": torch.__version__, "hrmlm": hrmlm.__version__}
    table = Table(title=f"Training on {name}", title_justify="left")
    for column in ("model", "D", "params", "tokens/s", "TFLOP/s", "MFU", "peak memory", "loss", "batch", "spread"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(row["model"], str(row["d_model"]), *(_cells(row) if row["fits"] else ["does not fit"]))
    console = Console()
    console.print(table)
    console.print(
        f"{options.batch_size} x {options.length} tokens per step, none of them padding; {options.steps} steps, of "
        f"which {options.warmup} to warm up; speed: median over spans of {SPAN} steps; {options.precision}, compile "
        f"{options.compile}, {' '.join(options.set)} torch {torch.__version__}; loss: nats per token, mean of the last "
        f"{2 * SPAN} steps; spread = (slowest - fastest) / median."
    )
    print(json.dumps({"options": asdict(options), "machine": machine, "rows": rows}))


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['parameters'] / 1e6:,.1f} M",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['flops_per_second'] / 1e12:,.3g}",
        "–" if row["mfu"] is None else f"{row['mfu']:.3f}",
        "–" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**30:,.2f} GiB",
        f"{row['last_loss']:.3f}",
        f"{row['batch_size']} x {row['accumulation']}",
        f"{row['spread']:.0%}",
    ]


if __name__ == "__main__":
    main()
