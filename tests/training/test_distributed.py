"""Several processes train as one does: the same gradients, for every family and either engine (R09, R53, R54)."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from hrmlm.data.batch import Batch
from hrmlm.models import build_model
from hrmlm.parallel import ALONE, Parallel
from hrmlm.training.trainer import Trainer
from tests.families import FAMILIES
from tests.training.helpers import tiny, tiny_trainer
from tests.training.processes import run
from tests.training.test_accumulation import batch

STRATEGIES = ("ddp", "fsdp")

STEPS = (
    [batch(1, rows=3, seed=1), batch(0, rows=2, seed=8), batch(7, rows=3, seed=2), batch(50, rows=3, seed=3)],
    [batch(9, rows=1, seed=4)],
)
"""Micro-batches of 1, 7 and 50 targets per row and one without any; rows that do not divide; fewer rows than processes.
Accumulation over several micro-batches, and none."""

FRUGAL = {"training.checkpoint_activations": True, "training.loss_chunk": 5}


def whole(tensor: torch.Tensor) -> np.ndarray:
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().numpy().copy()


def outcome(trainer: Trainer, steps: Iterable[list[Batch]] = STEPS) -> list[dict[str, Any]]:
    """What each step reports, and its gradients."""
    outcomes = []
    for number, micro_batches in enumerate(steps, start=1):
        result = trainer.step(number, micro_batches)
        gradients = {name: whole(p.grad) for name, p in trainer.model.named_parameters() if p.grad is not None}
        outcomes.append({**vars(result), "loss": result.loss, "gradients": gradients})
    return outcomes


def assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        for key in ("targets", "tokens", "depth", "updated"):
            assert a[key] == b[key]
        assert (a["loss"], a["norm"]) == pytest.approx((b["loss"], b["norm"]), rel=1e-5)
        assert a["extra"] == pytest.approx(b["extra"], rel=1e-4, abs=1e-5)  # small differences of large numbers
        assert a["gradients"].keys() == b["gradients"].keys()
        for name, gradient in a["gradients"].items():
            error = np.linalg.norm(gradient - b["gradients"][name])
            assert error <= 1e-5 * np.linalg.norm(gradient) + 1e-7, name


def variants() -> list[tuple[str, dict[str, Any]]]:
    """Every family as it is; those whose modules meet in every way also with checkpointing and a loss in chunks."""
    frugal = ("hrm_lm", "hrm_lm-window", "universal-halting", "memory_hrm")
    return [(family, {}) for family in FAMILIES] + [(family, FRUGAL) for family in frugal]


def family_outcome(parallel: Parallel, family: str, strategy: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
    settings = {"optimizer.clip": 1e9, "optimizer.lr": 1e-6, "parallel.strategy": strategy, **changes}
    return outcome(tiny_trainer(lambda a, b: [], family, parallel, **settings))


def all_families(parallel: Parallel, names: list[str]) -> Any:
    parallel.configure(100, "cpu")
    results = {
        (strategy, family, bool(changes)): family_outcome(parallel, family, strategy, changes)
        for strategy in STRATEGIES
        for family, changes in variants()
        if family in names
    }
    return results if parallel.is_first else None


@pytest.fixture(scope="module")
def of_two() -> dict[tuple[str, str, bool], list[dict[str, Any]]]:
    return run(2, all_families, list(FAMILIES))[0]


@pytest.fixture(scope="module")
def of_four() -> dict[tuple[str, str, bool], list[dict[str, Any]]]:
    return run(4, all_families, ["hrm_lm-passes", "memory_hrm"])[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_have_the_gradients_of_one(family: str, of_two: dict[Any, Any]) -> None:
    for _, changes in [v for v in variants() if v[0] == family]:
        alone = family_outcome(ALONE, family, "ddp", changes)
        assert alone[0]["targets"] == 3 * (1 + 7 + 50)
        for strategy in STRATEGIES:
            assert_same(of_two[strategy, family, bool(changes)], alone)


@pytest.mark.parametrize("family", ["hrm_lm-passes", "memory_hrm"])
def test_four_processes_have_the_gradients_of_one(family: str, of_four: dict[Any, Any]) -> None:
    """Three rows for four processes: one has none. The smallest vectors have fewer values than there are processes."""
    for strategy in STRATEGIES:
        assert_same(of_four[strategy, family, False], family_outcome(ALONE, family, "ddp", {}))


MASTERS = ("hrm_lm-passes", "cosmicfish", "memory_hrm-lora")


def with_masters(parallel: Parallel) -> Any:
    if parallel.size > 1:
        parallel.configure(100, "cpu")
    changes = {"training.precision": "bfloat16_weights"}
    return {
        (family, strategy): family_outcome(parallel, family, strategy, changes)
        for family in MASTERS
        for strategy in (STRATEGIES if parallel.size > 1 else STRATEGIES[:1])
    }


def test_float32_masters_of_bfloat16_weights_in_two_processes() -> None:
    """Sharded or whole: the gradients are float32, and those of one process up to the resolution of bfloat16."""
    alone, of_two = with_masters(ALONE), run(2, with_masters)[0]
    for (family, strategy), ours in of_two.items():
        for a, b in zip(ours, alone[family, "ddp"], strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=2e-3), (family, strategy)
            assert a["norm"] == pytest.approx(b["norm"], rel=3e-2), (family, strategy)
            assert a["gradients"].keys() == b["gradients"].keys()
            for name, gradient in a["gradients"].items():
                assert gradient.dtype == np.float32
                error = np.linalg.norm(gradient - b["gradients"][name])
                assert error <= 5e-2 * np.linalg.norm(gradient) + 1e-3 * b["norm"], (family, strategy, name)


def thrice() -> Any:
    """A model whose block has three names, and whose head is its embedding."""
    torch.manual_seed(0)
    model = build_model({**FAMILIES["universal"], "vocab_size": 257})
    model.second, model.third = model.block, model.block
    return model


def of_shared(parallel: Parallel, strategy: str) -> Any:
    if parallel.size > 1:
        parallel.configure(100, "cpu")
    recipe = tiny(None, "universal", **{"model.vocab_size": 257, "parallel.strategy": strategy, "training.steps": 20})
    recipe = recipe.changed(["schedule.warmup=1", "optimizer.lr=0.01"])
    trainer = Trainer(recipe, thrice(), lambda a, b: [], parallel=parallel)
    losses = [trainer.step(step, [batch(30, rows=4)]).loss for step in range(1, 21)]
    trainer.engine.whole().__enter__()
    model = trainer.model
    tied = model.second.attention is model.block.attention and model.third.attention is model.block.attention
    return losses, tied, {name: whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_block_of_three_names_trains_as_in_one_process(strategy: str) -> None:
    losses, tied, weights = of_shared(ALONE, "ddp")
    assert losses[-1] < losses[0] - 0.5
    for ours, ours_tied, our_weights in run(2, of_shared, strategy):
        assert ours == pytest.approx(losses, abs=1e-4)
        assert ours_tied == tied is True
        assert our_weights.keys() == weights.keys()
        for name, weight in weights.items():
            np.testing.assert_allclose(our_weights[name], weight, atol=1e-3, err_msg=name)


def incomplete(parallel: Parallel) -> Any:
    parallel.configure(100, "cpu")
    trainer = tiny_trainer(
        lambda start, stop: [batch(50, seed=index) for index in range(start, min(stop, 10))],
        parallel=parallel,
        **{"training.accumulation": 4, "training.steps": 3},
    )
    return [(result.targets, result.updated) for result in trainer.steps()]


def test_ten_micro_batches_with_accumulation_4_are_three_updates() -> None:
    """An incomplete last window is used by all processes, also by the one without a row."""
    assert run(2, incomplete) == [[(200, True), (200, True), (100, True)]] * 2
