"""Learning from a teacher: any student, any teacher, one tokenizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hrmlm.checkpoint import save_checkpoint
from hrmlm.data.batch import IGNORE, Batch, SoftTargets
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.models import build_model
from hrmlm.training.recipe import Recipe, load_recipe
from hrmlm.training.train import train
from tests.families import FAMILIES
from tests.models.helpers import gradients, lively_model, random_batch, step
from tests.training.helpers import Listener, Stop, StopAfter, assert_same_run, record, settings, tiny

BYTES = Tokenizer.bytes()


def softened(batch: Batch, logits_BLV: Tensor, temperature: float, weight: float) -> Batch:
    return Batch(batch.inputs_BL, batch.targets_BL, SoftTargets(logits_BLV, temperature, weight))


def expected_divergence(ours_BLV: Tensor, theirs_BLV: Tensor, scored_BL: Tensor, temperature: float) -> float:
    """Σ p (ln p − ln q), spelled out."""
    p = torch.exp(theirs_BLV.double() / temperature)
    q = torch.exp(ours_BLV.double() / temperature)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return float((p * (p.log() - q.log())).sum(-1)[scored_BL].sum())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_objective_of_every_student(name: str) -> None:
    """(1 − w) · cross-entropy + w · τ² · divergence, over the positions with a target; the loss told is the text's."""
    model = lively_model(name).train()
    plain = random_batch(model, rows=2, length=9, ignored=2)
    theirs_BLV = 2 * torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3))
    partials = list(model.losses(plain))
    soft = list(model.losses(softened(plain, theirs_BLV, 3.0, 0.25)))
    assert [float(p.task_nats) for p in soft] == [float(p.task_nats) for p in partials]
    for without, with_teacher in zip(partials, soft, strict=True):
        penalty = float(without.objective.detach()) - float(without.task_nats)
        value = 0.75 * float(without.task_nats) + 0.25 * 9 * float(with_teacher.extra["distillation"]) + penalty
        assert float(with_teacher.objective.detach()) == pytest.approx(value, rel=1e-5)
    counted = sum(float(p.extra["distillation"]) for p in soft if p.counted)
    with torch.no_grad():
        ours_BLV = model.eval()(plain.inputs_BL).logits
    expected = expected_divergence(ours_BLV, theirs_BLV, plain.targets_BL != IGNORE, 3.0)
    assert counted == pytest.approx(expected, rel=1e-4)


def test_the_ends_of_the_weight() -> None:
    """0 is training without a teacher; 1 with a teacher that is the model itself teaches nothing."""
    model = lively_model("transformer").train()
    batch = random_batch(model)
    with torch.no_grad():
        own_BLV = model(batch.inputs_BL).logits
    step(model, batch)
    plain = gradients(model)
    model.zero_grad()
    step(model, softened(batch, torch.zeros_like(own_BLV), 2.0, 0.0))
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, plain[key])
    model.zero_grad()
    step(model, softened(batch, own_BLV, 2.0, 1.0))
    for key, gradient in gradients(model).items():
        assert float(gradient.abs().max()) < 1e-3 * float(plain[key].abs().max()), key


@pytest.fixture(scope="module")
def teachers(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A short run of some families."""
    root = tmp_path_factory.mktemp("teachers")
    names = ["transformer", "memory_hrm", "universal-halting"]
    for name in names:
        train(tiny(data, name, **{"training.steps": 2}), root / name)
    return {name: root / name for name in names}


def taught(data: Path, student: str, teacher: Path, **changes: Any) -> Recipe:
    given = settings(data, student, **changes)
    return Recipe.parse({**given, "distillation": {"teacher": str(teacher), "weight": 0.5}}, "recipe")


@pytest.mark.parametrize("student", ["hrm_lm-passes", "memory_hrm", "universal", "cosmicfish"])
@pytest.mark.parametrize("teacher", ["transformer", "memory_hrm", "universal-halting"])
def test_any_pair(student: str, teacher: str, data: Path, teachers: dict[str, Path], tmp_path: Path) -> None:
    listener = Listener()
    train(taught(data, student, teachers[teacher]), tmp_path / "taught", reporter=listener)
    assert any("teacher" in note for note in listener.notes)
    train(tiny(data, student), tmp_path / "alone")
    ours, plain = record(tmp_path / "taught"), record(tmp_path / "alone")
    assert ours[0]["loss"] == plain[0]["loss"], "cross-entropy alone"
    assert ours[-1]["loss"] != plain[-1]["loss"]
    assert all(line["distillation"] > 0 for line in ours)
    assert not any("distillation" in line for line in plain)


def test_resumed_exactly(data: Path, teachers: dict[str, Path], tmp_path: Path) -> None:
    recipe = taught(data, "memory_hrm", teachers["transformer"], **{"training.accumulation": 2})
    train(recipe, tmp_path / "straight")
    with pytest.raises(Stop):
        train(recipe, tmp_path / "stopped", reporter=StopAfter(4))
    for other in (
        taught(data, "memory_hrm", teachers["universal-halting"], **{"training.accumulation": 2}),
        tiny(data, "memory_hrm", **{"training.accumulation": 2}),
    ):
        with pytest.raises(UserError, match="not the one the run was started with"):
            train(other, tmp_path / "stopped", resume=True)
    train(recipe, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")


def test_a_student_comes_closer_to_its_teacher(data: Path, tmp_path: Path) -> None:
    changes = {"training.steps": 40, "schedule.warmup": 4, "optimizer.lr": 1e-2, "training.eval_every": 0}
    train(tiny(data, "transformer", **changes), tmp_path / "teacher")
    recipe = taught(data, "memory_hrm", tmp_path / "teacher", **changes)
    train(recipe.changed(["distillation.weight=1.0"]), tmp_path / "run")
    lines = record(tmp_path / "run")
    assert lines[-1]["distillation"] < 0.5 * lines[0]["distillation"]


def test_mistakes(data: Path, teachers: dict[str, Path], tmp_path: Path) -> None:
    other, plain, short = tmp_path / "other", tmp_path / "plain", tmp_path / "short"
    tokenizer = Tokenizer.train(["the cat sat on the mat. " * 20], 257)
    model = build_model({**FAMILIES["transformer"], "vocab_size": 257})
    save_checkpoint(other, model, tokenizer=tokenizer)
    save_checkpoint(plain, model)
    save_checkpoint(short, build_model({**FAMILIES["transformer"], "vocab_size": 257, "context": 8}), tokenizer=BYTES)
    for teacher, message in (
        (tmp_path / "nowhere", "does not exist"),
        (other, f"has tokenizer {tokenizer.fingerprint} and .*: a student learns from a teacher of the same tokenizer"),
        (plain, "has tokenizer none"),
        (short, "reads at most 8 tokens and the training windows have 16"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            train(taught(data, "memory_hrm", teacher), tmp_path / "run")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists(), "nothing is written"
    for change, message in (
        ("distillation.weight=1.5", "less than or equal to 1"),
        ("distillation.temperature=0", "greater than 0"),
        ("distillation.temperatur=2", "did you mean 'temperature'"),
        ("distillation=5", "distillation"),
    ):
        with pytest.raises(UserError, match=message):
            taught(data, "universal", teachers["transformer"]).changed([change])


def test_from_the_command_line() -> None:
    recipe = load_recipe("demo-transformer", ["distillation.teacher=runs/teacher", "distillation.weight=0.9"])
    assert recipe.distillation is not None
    assert (recipe.distillation.teacher, recipe.distillation.weight) == ("runs/teacher", 0.9)
    assert recipe.distillation.temperature == 2.0
    with pytest.raises(UserError, match=r"distillation\.teacher: "):
        load_recipe("demo-transformer", ["distillation.weight=0.9"])
