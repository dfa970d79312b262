"""Distilled exits in a run: their divergence stands apart in the record, and the exits come to agree."""

from pathlib import Path

import pytest
import torch

from hrmlm.data.tokens import PreparedData, TokenWindows
from hrmlm.evaluation.agreement import agreements
from hrmlm.models.base import evaluating
from hrmlm.training.train import train
from tests.training.helpers import record, tiny, tiny_trainer

FAMILIES = ["hrm_lm-exits", "universal-exits"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_record_keeps_divergence_and_loss_apart(family: str, data: Path, tmp_path: Path) -> None:
    changes = {"training.accumulation": 2, "model.exit_probability": 0.4, "training.steps": 12}
    train(tiny(data, family, **changes), tmp_path / "run")
    lines = record(tmp_path / "run")
    full = [line["depth"] == max(other["depth"] for other in lines) for line in lines]
    assert {True, False} == set(full)
    assert ["exit_divergence" in line for line in lines] == full
    assert all(0 < line["exit_divergence"] < 1 for line in lines if "exit_divergence" in line)
    assert not any("exit_divergence" in line for line in record(tmp_path / "run", "eval"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_step_reports_what_one_without_exits_reports(family: str, data: Path, tmp_path: Path) -> None:
    losses = []
    for weight in (0.5, 0.0):
        changes = {"model.exit_weight": weight, "model.exit_every": 4, "training.steps": 1}
        train(tiny(data, family, **changes), tmp_path / str(weight))
        losses.append(record(tmp_path / str(weight))[0]["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_exits_come_to_agree(family: str, data: Path) -> None:
    """After the same steps on the same text, every smaller depth is closer to the full one with distillation."""
    windows = TokenWindows(PreparedData.open(data).split("train"), 32, 4)
    ids = PreparedData.open(data).split("valid")[:300]
    rejected = {}
    for weight in (0.0, 2.0):
        trainer = tiny_trainer(
            lambda start, stop: [windows[i] for i in range(start, stop)],
            family,
            **{"model.exit_weight": weight, "model.exit_every": 4, "training.steps": 30},
            **{"schedule.warmup": 3, "optimizer.lr": 1e-2},
        )
        losses = [result.loss for result in trainer.steps()]
        assert losses[-1] < losses[0] - 1.5
        with evaluating(trainer.model), torch.no_grad():
            found = agreements(trainer.model, ids, range(1, trainer.model.trained_depth), window=32)
        rejected[weight] = [1 - agreement.acceptance for agreement in found.values()]
    for plain, taught in zip(rejected[0.0], rejected[2.0], strict=True):
        assert taught < 0.6 * plain
