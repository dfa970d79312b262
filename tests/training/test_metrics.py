"""The record of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from hrmlm.training.metrics import Metrics, read_metrics, supersede
from hrmlm.training.train import train
from tests.training.helpers import record, tiny


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
