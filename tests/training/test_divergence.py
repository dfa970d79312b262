"""A run that diverges stops at that step and leaves nothing that is not finite behind (R12)."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

import hrmlm
from hrmlm.checkpoint import WEIGHTS, NotFiniteError, read_tensors, save_checkpoint
from hrmlm.cli import main
from hrmlm.models import build_model
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import train
from hrmlm.training.trainer import StepResult, Trainer, TrainingDiverged
from tests.families import FAMILIES
from tests.training.helpers import FAMILY, record, settings, state, tiny

LONG = {"training.steps": 60, "training.save_every": 7, "training.eval_every": 10, "training.batch_size": 1}


def assert_finite(out: Path) -> None:
    for path in RunDirectory(out).checkpoints():
        assert all(t.isfinite().all() for t in read_tensors(path / WEIGHTS).values())
    assert all(tensor.isfinite().all() for tensor in state(out).values())
    assert all(p.isfinite().all() for p in hrmlm.load(out).parameters())


def poison(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """NaN in one gradient, from inside the backward pass of this step."""
    update = Trainer._update

    def bad(self: Trainer, result: StepResult) -> None:
        if result.step == step:
            next(p for p in self.model.parameters() if p.grad is not None).grad.view(-1)[3] = math.nan  # type: ignore
        update(self, result)

    monkeypatch.setattr(Trainer, "_update", bad)


def test_nan_gradient_stops_with_the_step_number(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, 30)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(settings(data, **LONG)))
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        main(["train", str(tmp_path / "r.yaml"), "--out", str(out)])
    assert stop.value.code == 1
    assert "error: step 30: the gradient is not finite" in capsys.readouterr().err
    assert RunDirectory(out).newest().step == 28
    assert len(record(out)) == 29
    assert ["step 30" in line["reason"] for line in record(out, "stop")] == [True]
    assert_finite(out)


def test_nan_in_one_recurrence_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the third application of the shared cell, and only from the fourth training step on."""
    from hrmlm.models.blocks import Block

    forward, calls = Block.forward, []

    def bad(self: Block, x_BLD: Tensor, *rest: object) -> Tensor:
        y_BLD = forward(self, x_BLD, *rest)  # type: ignore[arg-type]
        calls.append(self)
        applications = 1 + 3 * 2  # input, 3 cycles of a fast and a slow step
        if len(calls) == 3 * applications + 5:
            y_BLD = y_BLD * torch.where(torch.arange(y_BLD.shape[1]) == 7, math.nan, 1.0)[:, None]
        return y_BLD

    monkeypatch.setattr(Block, "forward", bad)
    with pytest.raises(TrainingDiverged, match="step 4: the loss"):
        train(tiny(data, **{"training.eval_every": 0}), tmp_path / "run")
    monkeypatch.undo()
    assert RunDirectory(tmp_path / "run").newest().step == 2
    assert_finite(tmp_path / "run")


def test_weights_that_overflow_are_never_saved(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def bad(self: Trainer, number: int, micro_batches: list) -> StepResult:
        result = step(self, number, micro_batches)
        if number == 4:
            next(self.model.parameters()).data[0, 0] = math.inf
        return result

    monkeypatch.setattr(Trainer, "step", bad)
    with pytest.raises(TrainingDiverged, match=r"step 4: embedding.weight"):
        train(tiny(data, **{"training.eval_every": 0}), tmp_path / "run")
    assert RunDirectory(tmp_path / "run").newest().step == 2
    assert_finite(tmp_path / "run")


def test_validation_loss_that_is_not_finite_is_never_best(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hrmlm.training import validation as module

    class Report:
        nats_per_token, bits_per_byte, steps = math.nan, math.nan, None

    monkeypatch.setattr(module, "evaluate_ids", lambda *a, **k: Report)
    with pytest.raises(TrainingDiverged, match="step 3: the validation loss"):
        train(tiny(data), tmp_path / "run")
    assert RunDirectory(tmp_path / "run").best_step() is None
    assert len(record(tmp_path / "run", "stop")) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_save_refuses(value: float, tmp_path: Path) -> None:
    model = build_model(FAMILIES[FAMILY])
    list(model.parameters())[-1].data.view(-1)[0] = value
    with pytest.raises(NotFiniteError):
        save_checkpoint(tmp_path / "c", model)
    model = build_model(FAMILIES[FAMILY])
    with pytest.raises(NotFiniteError):
        save_checkpoint(tmp_path / "c", model, optimizer_state={"m": torch.tensor([1.0, value])})
    assert list(tmp_path.iterdir()) == []
