"""Monitors of learned depth: cost and loss apart, steps in the record, a warning when depth is constant (R13, O5)."""

import math
from pathlib import Path
from typing import Any

import pytest

from hrmlm.console import TrainingBar
from hrmlm.errors import UserError
from hrmlm.models import build_model
from hrmlm.steps import StepCounts
from hrmlm.training import trackers
from hrmlm.training.depth import constant_depth, per_target
from hrmlm.training.metrics import read_metrics
from hrmlm.training.train import Reporter, train
from hrmlm.training.trainer import StepResult
from tests.families import FAMILIES
from tests.training.helpers import Stop, record, tiny

FAMILIES_THAT_LEARN = [name for name, settings in FAMILIES.items() if build_model(settings).learns_depth]
Capture = pytest.CaptureFixture[str]
CONSTANT = {"model.initial_bias": 30.0, "model.exploration": 0.0, "training.steps": 4, "training.eval_every": 1}


def test_names_in_the_record() -> None:
    values = per_target({"step_cost": 2.0, "steps": 30.0, "steps_share/1": 5.0, "steps_share/4": 15.0}, 20)
    assert values == {"step_cost": 0.1, "mean_steps": 1.5, "steps_share": {"1": 0.25, "4": 0.75}}
    assert per_target({}, 0) == {}


@pytest.mark.parametrize("family", FAMILIES_THAT_LEARN)
def test_loss_and_cost_are_apart_and_steps_are_recorded(family: str, data: Path, tmp_path: Path) -> None:
    recipe = tiny(data, family, **{"model.step_cost": 0.5, "training.accumulation": 2, "model.exploration": 0.5})
    results: list[StepResult] = []

    class Keep(Reporter):
        def step(self, result: StepResult, tokens_per_second: float) -> None:
            results.append(result)

    train(recipe, tmp_path / "run", reporter=Keep())
    for line, result in zip(record(tmp_path / "run"), results, strict=True):
        assert line["loss"] == pytest.approx(result.nats / result.targets)
        assert line["loss"] < 6, "cross-entropy of 257 ids alone"
        assert 0.5 * line["mean_steps"] < line["step_cost"] <= 0.5 * (line["mean_steps"] + 1)
        assert line["mean_steps"] == pytest.approx(result.mean_steps)
        assert line["mean_steps"] == pytest.approx(sum(int(n) * share for n, share in line["steps_share"].items()))
        assert sum(line["steps_share"].values()) == pytest.approx(1)
        assert "steps" not in line
    for line in record(tmp_path / "run", "eval"):
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        assert line["mean_steps"] == pytest.approx(sum(int(n) * share for n, share in line["steps_share"].items()))
        assert sum(line["steps_share"].values()) == pytest.approx(1)


def test_families_of_fixed_depth_have_no_such_lines(data: Path, tmp_path: Path) -> None:
    train(tiny(data), tmp_path / "run")
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert not {"mean_steps", "steps_share", "step_cost"} & line.keys()


@pytest.mark.parametrize("family", FAMILIES_THAT_LEARN)
def test_a_constant_depth_is_told_once(family: str, data: Path, tmp_path: Path, capsys: Capture) -> None:
    train(tiny(data, family, **CONSTANT), tmp_path / "run")
    error = capsys.readouterr().err
    assert error.count("more than 99 % of positions stop at the same step, 1 of at most") == 1
    assert error.count("warning:") == 1
    (line,) = record(tmp_path / "run", "warning")
    assert (line["kind"], line["step"]) == ("constant_depth", 1)
    assert line["message"] in error
    assert record(tmp_path / "run", "eval")[0]["steps_share"] == {"1": 1.0}


def test_it_is_told_once_per_run_also_when_the_run_is_resumed(data: Path, tmp_path: Path, capsys: Capture) -> None:
    class StopAt(Reporter):
        def step(self, result: StepResult, tokens_per_second: float) -> None:
            if result.step == 3:
                raise Stop

    recipe = tiny(data, "cosmicfish", **CONSTANT)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", reporter=StopAt())
    train(recipe, tmp_path / "run", resume=True)
    assert capsys.readouterr().err.count("warning:") == 1
    assert len(record(tmp_path / "run", "warning")) == 1


def test_when_depth_counts_as_constant() -> None:
    fish = build_model(FAMILIES["cosmicfish"])
    assert "raise model.step_cost" in (constant_depth(fish, StepCounts({4: 1000})) or "")
    assert "lower model.step_cost" in (constant_depth(fish, StepCounts({1: 995, 2: 5})) or "")
    assert constant_depth(fish, StepCounts({1: 980, 2: 20})) is None
    assert constant_depth(fish, None) is None
    assert constant_depth(build_model({**FAMILIES["cosmicfish"], "max_steps": 1}), StepCounts({1: 10})) is None
    assert constant_depth(build_model(FAMILIES["hrm_lm"]), StepCounts({1: 10})) is None


def test_trackers_get_the_shares_one_by_one(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, float] = {}

    class Tracker:
        settling = highest = None

        def log(self, step: int, values: dict[str, float]) -> None:
            logged.update(values)

        def close(self) -> None:
            pass

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", lambda identity: Tracker())
    recipe = tiny(data, "cosmicfish", **{**CONSTANT, "training.steps": 1, "training.trackers": ("tensorboard",)})
    train(recipe, tmp_path / "run")
    assert logged["step/steps_share/1"] == logged["eval/steps_share/1"] == logged["step/mean_steps"] == 1.0
    assert not any(name.startswith("start/") and name not in ("start/parameters", "start/processes") for name in logged)


def test_the_progress_shows_mean_steps(data: Path, tmp_path: Path, capsys: Capture) -> None:
    settings: dict[str, Any] = {"training.steps": 1, "model.exploration": 0.0, "model.initial_bias": 30.0}
    train(tiny(data, "cosmicfish", **settings), tmp_path / "run", reporter=TrainingBar("run"))
    assert "1.00 steps per token" in capsys.readouterr().err
    train(tiny(data, **{"training.steps": 1}), tmp_path / "other", reporter=TrainingBar("other"))
    assert "steps per token" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model.halting": "sequence"}, "not trained"), ({"model.max_steps": 20_000}, "depth 20000 is beyond")],
)
def test_a_model_that_cannot_be_trained_leaves_no_run(
    change: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        train(tiny(data, "cosmicfish", **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_line_of_an_evaluation_tells_its_own_steps(data: Path, tmp_path: Path, capsys: Capture) -> None:
    """Not those of training, which explores."""
    recipe = tiny(data, "cosmicfish", **{**CONSTANT, "model.exploration": 1.0})
    train(recipe, tmp_path / "run", reporter=TrainingBar("x"))
    lines = [line for line in capsys.readouterr().err.splitlines() if "validation" in line]
    assert lines
    assert all("1.00 steps per token" in line for line in lines)
    assert all(line["mean_steps"] > 1 for line in record(tmp_path / "run"))
