"""Tiny runs learn, in every family, precision and mode."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hrmlm
from hrmlm.checkpoint import WEIGHTS, read_tensors
from hrmlm.data.tokens import PreparedData, TokenWindows
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import train
from tests.families import FAMILIES
from tests.training.helpers import FAMILY, record, tiny, tiny_trainer

QUIET = {"training.eval_every": 0, "training.save_every": 0}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_a_pattern(family: str, data: Path) -> None:
    windows = TokenWindows(PreparedData.open(data).split("train"), 32, 4)
    changes = {"training.steps": 25, "schedule.warmup": 3, "optimizer.lr": 1e-2}
    trainer = tiny_trainer(lambda start, stop: [windows[i] for i in range(start, stop)], family, **changes)
    losses = [result.loss for result in trainer.steps()]
    assert losses[0] == pytest.approx(math.log(257), rel=0.05)
    assert losses[-1] < 3.2 < losses[0] - 1.5


def test_bfloat16_autocast(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny(data, **{"training.precision": "bfloat16", "schedule.warmup": 0}), out)
    train(tiny(data, **{"schedule.warmup": 0}), tmp_path / "float32")
    ours, theirs = ([line["loss"] for line in record(path)] for path in (out, tmp_path / "float32"))
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=0.02)
    stored = read_tensors(RunDirectory(out).newest().path / WEIGHTS)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


def test_compiled_model_saves_plain_names(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: what was trained compiled loads plainly, and the other way round. (The backend here makes no code.)"""
    compiled: list[Any] = []
    real = torch.compile

    def without_code(function: Any, **options: Any) -> Any:
        compiled.append(function)
        return real(function, **{**options, "backend": "eager"})

    monkeypatch.setattr(torch, "compile", without_code)
    changes = {**QUIET, "training.steps": 2}
    train(tiny(data, "transformer", **changes, **{"training.compile": True}), tmp_path / "compiled")
    assert len(compiled) == 2
    train(tiny(data, "transformer", **changes), tmp_path / "plain")
    ours, theirs = (
        read_tensors(RunDirectory(tmp_path / name).newest().path / WEIGHTS) for name in ("compiled", "plain")
    )
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(
        hrmlm.load(tmp_path / "compiled")(tokens).logits, hrmlm.load(tmp_path / "plain")(tokens).logits
    )
    longer = tiny(data, "transformer", **{**changes, "training.steps": 3, "training.compile": False})
    assert train(longer, tmp_path / "compiled", resume=True).step == 3


def test_result_of_a_run(data: Path, tmp_path: Path) -> None:
    result = train(tiny(data), tmp_path / "run")
    assert result.parameters == sum(p.numel() for p in hrmlm.load(tmp_path / "run").parameters())
    assert (result.step, result.steps, result.tokens) == (6, 6, 6 * 2 * 16)
    assert result.loss == record(tmp_path / "run", "eval")[-1]["loss"]
    assert result.tokens_per_second > 0
    assert result.stopped_by is None


def test_evaluation_during_training_is_that_of_the_evaluate_command(data: Path, tmp_path: Path) -> None:
    from hrmlm.evaluation.loss import evaluate_data

    result = train(tiny(data, **QUIET, **{"training.eval_tokens": None}), tmp_path / "run")
    report = evaluate_data(hrmlm.load(tmp_path / "run"), PreparedData.open(data), "valid", window=16)
    assert report.nats_per_token == pytest.approx(result.loss, rel=1e-9)
    assert report.bits_per_byte == pytest.approx(result.bits_per_byte, rel=1e-9)


def test_family_used_here_has_a_gradient_window() -> None:
    """Most tests of this folder use this family because a part of its graph is cut off."""
    assert FAMILIES[FAMILY]["gradient_window"] == 1
