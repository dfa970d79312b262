"""Peak memory of a training step: what is counted, what is predicted, what follows from it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hrmlm.cli import main
from hrmlm.evaluation.measured_memory import measure
from hrmlm.evaluation.training_memory import LiveMemory, predict
from hrmlm.models import build_model
from hrmlm.training.recipe import Recipe
from hrmlm.training.trainer import Trainer
from tests.families import FAMILIES
from tests.models.helpers import build, random_batch, step


def recipe(model: dict[str, Any], **training: Any) -> Recipe:
    return Recipe.parse({"model": model, "training": {"batch_size": 2, **training}}, "recipe")


def live_peak(name: str, again: bool = False, length: int = 24, **changes: Any) -> int:
    """Bytes of a real step's activations at their most, after a first one that made the gradients."""
    model = build(name, **changes).train()
    model.checkpoint_activations = again
    batch = random_batch(model, rows=4, length=length)
    step(model, batch, random.Random(0))
    with LiveMemory() as live:
        step(model, batch, random.Random(0))
    return live.peak


def test_what_lives_is_counted_once_and_forgotten() -> None:
    with LiveMemory() as live:
        first = torch.zeros(1000)
        view = first.view(10, 100)[3:].t()
        assert live.now == 4000
        second = torch.ones(500, dtype=torch.float64)
        first.add_(1)
        assert (live.now, live.peak) == (8000, 8000)
        del first
        assert live.now == 8000, "a view holds it"
        del view
        assert live.now == 4000
        (second + 1).sum()
        assert live.peak == 8008
    del second
    assert live.now == 0


@pytest.mark.parametrize(
    ("name", "frugal"),
    [("transformer-gqa", False), ("universal-halting", True), ("hrm_lm-exits", True), ("memory_hrm", False)],
)
def test_a_step_of_shapes_counts_like_a_real_one(name: str, frugal: bool) -> None:
    """Positions that could stop do not, with fresh weights: both run the most steps."""
    ways = {"checkpoint_activations": True, "loss_chunk": 7, "precision": "bfloat16"} if frugal else {}
    given = recipe({**FAMILIES[name], "context": 12, "dropout": 0.1}, **ways)
    predicted = predict(given)
    torch.manual_seed(0)
    with LiveMemory() as live:
        trainer = Trainer(given, build_model(given.model), lambda start, stop: [])
        trainer.step(1, [random_batch(trainer.model, length=12)])
        live.peak = 0
        trainer.step(2, [random_batch(trainer.model, length=12)])
    parameters = list(trainer.model.parameters())
    assert predicted.gradients == sum(p.nbytes for p in parameters)
    assert predicted.weights == sum(t.nbytes for t in [*parameters, *trainer.model.buffers()])
    state = [t for kept in trainer.optimizer.state.values() for t in kept.values()]
    assert predicted.optimizer == sum(t.nbytes for t in state)
    assert predicted.total == pytest.approx(live.peak, rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointed_activations_take_less(name: str) -> None:
    assert live_peak(name, again=True) < 0.8 * live_peak(name)


@pytest.mark.parametrize("again", [False, True])
def test_activations_follow_the_gradient_window_not_the_depth(again: bool) -> None:
    """hrm_lm: M = 4, 8 or 16 with the same K take the same, to the byte; K = 2, 4 and 8 of the same M do not."""
    same = [live_peak("hrm_lm", again, n_cycles=cycles, gradient_window=2) for cycles in (2, 4, 8)]
    assert len(set(same)) == 1
    more = [live_peak("hrm_lm", again, n_cycles=8, gradient_window=window) for window in (2, 4, 8)]
    assert more[0] < more[1] < more[2]


def test_activations_shrink_with_the_precision_of_the_residual_stream() -> None:
    model = {"family": "transformer", "vocab_size": 64, "context": 64, "d_model": 64, "n_layers": 3}
    full, low = (
        predict(recipe(model, batch_size=16, precision=precision)).activations
        for precision in ("float32", "bfloat16_weights")
    )
    assert low < 0.75 * full, "most of it is bfloat16"


def test_the_prediction_is_near_the_measurement() -> None:
    """In a new process, with both ways to save memory."""
    given = recipe(
        {"family": "hrm_lm", "vocab_size": 4096, "context": 128, "d_model": 128, "n_cycles": 3, "gradient_window": 3},
        batch_size=8,
        loss_chunk=256,
    )
    ratio = predict(given).total / measure(given)
    assert 1 / 1.2 < ratio < 1.2


def test_memory_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    model = {"family": "transformer", "vocab_size": 64, "context": 16, "d_model": 32, "n_layers": 1}
    path.write_text(yaml.safe_dump({"model": model}))

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["info", *arguments])
        output = capsys.readouterr()
        return int(stop.value.code or 0), output.out, output.err

    code, out, _ = call(str(path), "training.batch_size=3", "training.loss_chunk=8", "--memory", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["is_own"] for row in rows].count(True) == 1
    ways = {(row["precision"], row["checkpoint_activations"], row["loss_chunk"]) for row in rows}
    assert ways >= {("float32", again, chunk) for again in (False, True) for chunk in (None, 8)}
    assert {row["precision"] for row in rows} >= {"float32", "bfloat16"}
    for row in rows:
        parts = row["predicted"]
        assert parts["total"] == sum(parts[key] for key in ("weights", "gradients", "optimizer", "activations")) > 0
        assert row["measured"] is None
    code, out, _ = call(str(path), "training.loss_chunk=8", "--memory")
    lines = out.splitlines()
    assert code == 0
    assert max(map(len, lines)) <= 80
    assert "…" not in out, "cut off: which row is which?"
    named = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert named["checkpoint_activations"] == [str(row["checkpoint_activations"]).lower() for row in rows]
    assert named["loss_chunk"] == [str(row["loss_chunk"] or "none") for row in rows]
    assert len(named["total"]) == len(named["weights"]) == len(rows)
    wrong = (
        ["--measure"],
        ["training.stepz=1"],
        ["training.device=warp", "--memory"],
        ["model.vocab_size=null", "--memory"],
    )
    for arguments in ([str(tmp_path), "--memory"], *([str(path), *rest] for rest in wrong)):
        code, out, err = call(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
