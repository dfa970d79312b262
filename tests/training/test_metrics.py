"""The record of a run, and trackers that fail."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hrmlm.errors import UserError
from hrmlm.training import metrics
from hrmlm.training.metrics import Metrics, read_metrics, supersede
from hrmlm.training.train import train
from tests.training.helpers import record, tiny

TRACKED = {"training.trackers": ("tensorboard",)}


class Fake:
    """A tracker that fails where it is told to."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at, self.logged = fails_at, []  # type: ignore[var-annotated]
        if fails_at == "init":
            raise ConnectionError("no network")

    def log(self, step: int, values: dict[str, float]) -> None:
        if self.fails_at == "log" and step == 3:
            raise ConnectionError("no network")
        self.logged.append((step, values))

    def close(self) -> None:
        if self.fails_at == "close":
            raise ConnectionError("no network")


@pytest.mark.parametrize("fails_at", ["init", "log", "close", "never"])
def test_tracker_never_stops_training(
    fails_at: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "TensorBoard", lambda directory: Fake(fails_at))
    assert train(tiny(data, **TRACKED), tmp_path / "run").step == 6
    assert [line["step"] for line in record(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr().err.count("warning:") == (fails_at != "never")


def test_tensorboard_writes_events(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny(data, **TRACKED), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    written = [(e.step, e.value) for e in events.Scalars("step/loss")]
    assert written == [(line["step"], pytest.approx(line["loss"])) for line in record(tmp_path / "run")]
    assert [e.step for e in events.Scalars("eval/loss")] == [3, 6]


def test_missing_package_is_told_before_anything_is_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'hrmlm\[tensorboard\]'"):
        train(tiny(data, **TRACKED), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_trackers_nothing_is_imported(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train(tiny(data, **{"training.steps": 1}), tmp_path / "run")


def test_lines_are_json_also_for_values_that_are_not_finite(tmp_path: Path) -> None:
    record_ = Metrics(tmp_path / "m.jsonl")
    record_.write("step", 1, loss=float("nan"), norm=float("inf"), name="ü\u2028")
    record_.close()
    text = (tmp_path / "m.jsonl").read_text(encoding="utf-8")
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["loss"] is None
    assert (line["loss_text"], line["norm_text"]) == ("nan", "inf")
    assert read_metrics(tmp_path / "m.jsonl") == [line]


def test_superseded_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines: list[dict[str, Any]] = [{"event": "step", "step": n} for n in range(1, 6)]
    lines += [{"event": "eval", "step": 3}, {"event": "eval", "step": 5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "st')
    supersede(path, 4, evaluated=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]
    assert len(read_metrics(path, superseded=True)) == 7
    supersede(tmp_path / "missing.jsonl", 1)
    assert not (tmp_path / "missing.jsonl").exists()


def test_names_in_the_record_never_call_an_objective_perplexity(data: Path, tmp_path: Path) -> None:
    """O5: perplexity is that of the evaluation's cross-entropy."""
    import math

    train(tiny(data), tmp_path / "run")
    assert all("perplexity" not in line for line in record(tmp_path / "run"))
    for line in record(tmp_path / "run", "eval"):
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
