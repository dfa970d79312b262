"""The curve of quality and compute: real loss, and steps that were really executed (R35, R41)."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from hrmlm.errors import UserError
from hrmlm.evaluation.depth import THRESHOLDS, DepthProbe, probe_depth, show, write
from hrmlm.evaluation.loss import evaluate_ids
from hrmlm.models import LanguageModel
from tests.evaluation.test_scoring import make
from tests.evaluation.test_steps import ADAPTIVE, BYTES, TEXT, adaptive, lively
from tests.families import FAMILIES


def probe(model: LanguageModel, text: str = TEXT, **settings: object) -> DepthProbe:
    return probe_depth(model, partial(evaluate_ids, model, BYTES.encode(text), BYTES, window=32), **settings)


@adaptive
def test_points_are_evaluations(family: str) -> None:
    model = lively(family)
    result = probe(model, thresholds=[0.3, 0.99], depths=[1, 2])
    assert [point.name for point in result.points] == [
        "as trained",
        "threshold 0.3",
        "threshold 0.99",
        "depth 1",
        "depth 2",
    ]
    expected = [{}, {"halt_threshold": 0.3}, {"halt_threshold": 0.99}, {"depth": 1}, {"depth": 2}]
    for point, settings in zip(result.points, expected, strict=True):
        report = evaluate_ids(model, BYTES.encode(TEXT), BYTES, window=32, **settings)
        assert point.report.total_nats == report.total_nats
        assert point.mean_steps == report.steps.mean
    assert [point.mean_steps for point in result.points[3:]] == [1, 2]
    assert 1 < result.points[0].mean_steps == result.points[2].mean_steps
    assert result.points[1].mean_steps < result.points[2].mean_steps


@adaptive
def test_calls_per_token_are_those_of_cached_decoding(family: str) -> None:
    """Counted with hooks while the same text is decoded token by token."""
    model, text = lively(family), TEXT[:31]
    point = probe(model, text, thresholds=[], depths=[]).points[0]
    calls = []
    modules = {item.module for item in model.schedule()}
    for name in modules:
        model.get_submodule(name).register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    ids = [BYTES.end_of_text, *BYTES.encode(text)][:-1]
    cache = model.eval().new_cache(1, len(ids))
    with torch.no_grad():
        for token in ids:
            model(torch.tensor([[token]]), cache=cache)
    assert sum(calls) / len(ids) == pytest.approx(point.applications)
    assert point.applications < len(model.schedule())


@pytest.mark.parametrize("family", ["universal", "hrm_lm"])
def test_fixed_depth_runs_to_twice_the_trained_one(family: str) -> None:
    model = make(family, vocab_size=257)
    calls = []
    hook = next(item.module for item in model.schedule() if item.name.split()[0] in ("step", "slow"))
    model.get_submodule(hook).register_forward_hook(lambda module, args, output: calls.append(1))
    result = probe(model, "one window", exits=[])
    depths = [model.trained_depth, *range(1, 2 * model.trained_depth + 1)]
    assert [point.mean_steps for point in result.points] == depths
    assert [point.applications for point in result.points] == [len(model.schedule(depth)) for depth in depths]
    assert len(calls) == sum(depths), "the depth asked for is really executed"


def test_only_depths_that_the_model_can_run() -> None:
    result = probe(make("universal-options", vocab_size=257), "some text", exits=[])
    assert [point.depth for point in result.points] == [None, 1, 2, 3, 4], "its step vectors end at 4"


def test_defaults_of_learned_depth() -> None:
    result = probe(lively(), TEXT[:40])
    assert [point.halt_threshold for point in result.points if point.halt_threshold] == list(THRESHOLDS)
    assert [point.depth for point in result.points if point.depth] == [1, 2, 3, 4]


def test_steps_of_a_sequence_are_those_executed() -> None:
    """The released rule counts the steps before the one that stopped; that one was executed too."""
    model = make("cosmicfish", halting="sequence", vocab_size=257)
    with torch.no_grad():
        model.halting.q.bias[0] = 1000
    result = probe(model, TEXT[:30], depths=[2])
    assert result.points[0].report.steps.histogram == {0: 30}
    assert [point.mean_steps for point in result.points] == [1, 2]
    with pytest.raises(UserError, match="does not learn"):
        probe(model, thresholds=[0.5])


def test_impossible_settings_are_refused_before_any_work() -> None:
    def never(**settings: object) -> None:
        pytest.fail("evaluated")

    for settings in ({"depths": [1, 0]}, {"thresholds": [0.5, 2.0]}):
        with pytest.raises(UserError):
            probe_depth(make("cosmicfish"), never, **settings)
    with pytest.raises(UserError, match="no text to score"):
        probe(lively(), "")


def test_table_file_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = probe(lively(), TEXT[:60], thresholds=[0.5], depths=[1, 4])
    console = Console(record=True, width=120, file=SimpleNamespace(write=lambda text: None, flush=lambda: None))
    show(result, console)
    for words in ("as trained", "threshold 0.5", "depth 4", "steps/token", "nats/token"):
        assert words in (text := console.export_text(clear=False)), text
    assert write(result, tmp_path / "new" / "out").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "new" / "out" / "depth.json").read_text())
    assert stored == json.loads(json.dumps(result.to_dict()))
    assert stored["window"] == 32
    assert {"nats_per_token", "mean_steps", "applications_per_token", "steps"} <= stored["points"][0].keys()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'hrmlm\[study\]'"):
        write(probe(lively(), "text", thresholds=[], depths=[1]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_families_with_learned_depth_are_found() -> None:
    assert set(ADAPTIVE) < set(FAMILIES)
    assert ADAPTIVE
