"""Tiny runs over bytes, looked at from outside: what stands in the checkpoint and in the record."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hrmlm
from hrmlm.checkpoint import OPTIMIZER, WEIGHTS, open_checkpoint, read_tensors
from hrmlm.models import LanguageModel, build_model
from hrmlm.parallel import ALONE, Parallel
from hrmlm.training.metrics import read_metrics
from hrmlm.training.recipe import Recipe
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import Reporter
from hrmlm.training.trainer import StepResult, Trainer
from tests.families import FAMILIES

FAMILY = "hrm_lm-window"  # for tests that do not depend on the family

RANDOM = {"model.dropout": 0.1, "training.accumulation": 3}
"""Settings that draw random numbers; `exits` adds exit sampling where the family has it."""


def settings(data: Path | None, family: str = FAMILY, **changes: Any) -> dict[str, Any]:
    """Settings of a tiny run; changes: "section.key" with a dot, given as a mapping."""
    result: dict[str, Any] = {
        "model": {**FAMILIES[family], "vocab_size": None, "context": 32},
        "data": {"path": None if data is None else str(data), "window": 16},
        "training": {"steps": 6, "batch_size": 2, "eval_every": 3, "eval_tokens": 100, "save_every": 2},
        "optimizer": {"lr": 3e-3},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        result.setdefault(section, {})[name] = value
    return result


def tiny(data: Path | None, family: str = FAMILY, **changes: Any) -> Recipe:
    return Recipe.parse(settings(data, family, **changes), "recipe")


def exits(family: str) -> dict[str, Any]:
    """Exit sampling for the families that have more than one depth to choose from."""
    model = build_model(FAMILIES[family])
    known = "exit_probability" in type(model.config).model_fields
    return {"model.exit_probability": 0.5} if known and model.trained_depth > 1 and not model.learns_depth else {}


def tiny_trainer(
    batches: Callable[..., Any], family: str = FAMILY, parallel: Parallel = ALONE, **changes: Any
) -> Trainer:
    recipe = tiny(None, family, **{"model.vocab_size": 257, "model.context": 64, **changes})
    torch.manual_seed(0)
    return Trainer(recipe, build_model(recipe.model), batches, parallel=parallel)


class Stop(Exception):
    """Ends a run like a power cut, within the process."""


class StopAfter(Reporter):
    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, result: StepResult, tokens_per_second: float) -> None:
        if result.step == self.at:
            raise Stop


class Listener(Reporter):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def start(self, recipe: Recipe, done: int, notes: list[str]) -> None:
        self.notes = notes


def state(run: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint: weights and optimizer."""
    checkpoint = RunDirectory(run).newest()
    optimizer = {f"optimizer {n}": t for n, t in read_tensors(checkpoint.path / OPTIMIZER).items()}
    return read_tensors(checkpoint.path / WEIGHTS) | optimizer


def record(run: Path, event: str = "step") -> list[dict[str, Any]]:
    """The lines of one kind in metrics.jsonl, less the measured times."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["event"] == event]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def position(run: Path) -> dict[str, Any]:
    training = RunDirectory(run).newest().training
    assert training is not None
    return {key: value for key, value in training.items() if key != "recipe"}


def assert_same_run(run: Path, reference: Path) -> None:
    """Bit-identical weights, optimizer state, learning rates, losses, evaluations and position."""
    ours, theirs = state(run), state(reference)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert record(run) == record(reference)
    assert record(run, "eval") == record(reference, "eval")
    assert position(run) == position(reference)
    assert RunDirectory(run).best_step() == RunDirectory(reference).best_step()


def assert_clean(run: Path) -> None:
    """No temporary file anywhere, and each checkpoint that is there is whole."""
    assert [path for path in run.rglob("*") if path.name.startswith(".partial-")] == []
    for path in RunDirectory(run).checkpoints():
        open_checkpoint(path)


@contextmanager
def child(function: Callable[..., Any], *arguments: Any, group: bool = False) -> Iterator[Any]:
    """A forked process that runs function(*arguments); group: as the leader of a process group of its own."""

    def work() -> None:
        if group:
            os.setsid()
        function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def run_child(function: Callable[..., Any], *arguments: Any) -> int | None:
    """The exit code of function(*arguments) in a forked process; negative: the signal that killed it."""
    with child(function, *arguments) as process:
        process.join(60)
        return process.exitcode


def steps_done(run: Path) -> int:
    """Steps in the record of a run that may be going on."""
    path = run / "metrics.jsonl"
    return sum(line["event"] == "step" for line in read_metrics(path)) if path.is_file() else 0


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def kill_in_backward(step: int, index: int, number: signal.Signals = signal.SIGKILL) -> None:
    """From now on this process dies (by signal `number`) just after the backward pass of one micro-batch."""
    backward = Trainer._backward

    def deadly(self: Trainer, now: int, micro_batch: int, *rest: Any, **options: Any) -> None:
        backward(self, now, micro_batch, *rest, **options)
        if (now, micro_batch) == (step, index):
            os.kill(os.getpid(), number)

    Trainer._backward = deadly  # type: ignore[method-assign]


def weights(model: LanguageModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def truncate_weights(checkpoint: Path) -> None:
    """Cut the weights of a checkpoint in half."""
    file = checkpoint / WEIGHTS
    os.truncate(file, file.stat().st_size // 2)


def environment() -> dict[str, str]:
    """Of a fresh interpreter that finds this package from any directory and uses one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hrmlm.__file__).parents[1])}
