"""Bytes, loss and speed of cache policies: the loss is that of a text decoded with that very cache."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from hrmlm.errors import UserError
from hrmlm.evaluation.cache_policies import CacheProbe, default_policies, probe_cache, show, write
from hrmlm.evaluation.loss import evaluate_ids, score_stream
from hrmlm.evaluation.speed import decode_speeds
from hrmlm.models import LanguageModel
from tests.evaluation.test_scoring import random_ids
from tests.evaluation.test_steps import BYTES, TEXT
from tests.models.cache_policy_reference import reference
from tests.models.helpers import lively_model
from tests.models.test_cache_policy import POLICIES, SHARING, fixed_depth

each_family = pytest.mark.parametrize("family", SHARING)


def probe(model: LanguageModel, text: str = TEXT, *policies: str, **settings: object) -> CacheProbe:
    evaluate = partial(evaluate_ids, model, BYTES.encode(text), BYTES, window=16)
    return probe_cache(model, evaluate, policies or None, **settings)


@each_family
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stride", [10, 4, 1])
def test_nats_are_those_of_the_slow_reference(family: str, policy: str, stride: int) -> None:
    model, ids = lively_model(family).double(), random_ids(14)
    depth = fixed_depth(model)
    seen = score_stream(model, ids, window=10, stride=stride, batch_size=3, depth=depth, cache_policy=policy)
    for token in range(1, 14):
        place = seen.positions[token - 1]
        context_L = torch.from_numpy(ids[token - 1 - place : token].astype(np.int64))
        logits_V = reference(model, context_L[None], policy, depth)[0, -1]
        expected = -float(logits_V.log_softmax(-1)[int(ids[token])])
        assert seen.nats[token - 1] == pytest.approx(expected, abs=1e-5)


def test_points_are_evaluations_with_bytes_of_the_tensors() -> None:
    model = lively_model("hrm_lm-passes", vocab_size=BYTES.vocab_size)
    result = probe(model, TEXT, "last", "every:2", "full", "last")
    assert [point.policy.name for point in result.points] == ["full", "last", "every:2"]
    exact = evaluate_ids(model, BYTES.encode(TEXT), BYTES, window=16)
    assert result.points[0].report.total_nats == pytest.approx(exact.total_nats, rel=1e-6)
    for point in result.points:
        report = evaluate_ids(model, BYTES.encode(TEXT), BYTES, window=16, cache_policy=point.policy.name)
        assert point.report.total_nats == report.total_nats
        cache = model.new_cache(5, 30, policy=point.policy)
        assert point.bytes_per_token == sum(t.nbytes for t in cache.keys + cache.values) / 150
        more = (report.total_nats - result.points[0].report.total_nats) / report.tokens
        assert result.nats_more(point) == pytest.approx(more)
        # One byte per token: nats to bits.
        assert result.bits_more(point) == pytest.approx(more / np.log(2))
    assert result.points[1].bytes_per_token < result.points[2].bytes_per_token < result.points[0].bytes_per_token


def test_defaults_are_what_the_model_tells_apart() -> None:
    names = {
        ("transformer", None): ["full"],
        ("universal-halting", None): ["full"],
        ("hrm_lm-no-gate", None): ["full"],
        ("hrm_lm", None): ["full", "first", "last"],
        ("universal-halting", 3): ["full", "every:2", "first", "last"],
        ("universal", 9): ["full", "every:2", "every:4", "every:8", "first", "last"],
    }
    for (family, depth), expected in names.items():
        model = lively_model(family)
        assert [policy.name for policy in default_policies(model, depth)] == expected


def test_what_cannot_be_is_refused_before_any_work() -> None:
    def never(**settings: object) -> None:
        pytest.fail("evaluated")

    for family, policies in (("transformer", ["first"]), ("cosmicfish", ["last"]), ("hrm_lm", ["full", "none"])):
        with pytest.raises(UserError, match="cache policy"):
            probe_cache(lively_model(family), never, policies)
    with pytest.raises(UserError, match="use hrmlm probe memory"):
        probe_cache(lively_model("memory_hrm"), never)
    with pytest.raises(UserError, match="no text to score"):
        probe(lively_model("hrm_lm", vocab_size=BYTES.vocab_size), "")


def test_table_file_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = lively_model("hrm_lm", vocab_size=BYTES.vocab_size)
    result = probe(model, speeds=lambda runs: decode_speeds(model, BYTES.encode(TEXT), runs, seconds=0.01))
    console = Console(record=True, width=120, file=SimpleNamespace(write=lambda text: None, flush=lambda: None))
    show(result, console)
    for words in ("full (exact)", "first", "last", "+nats", "tokens/s"):
        assert words in (text := console.export_text(clear=False)), text
    assert write(result, tmp_path / "out").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "out" / "cache.json").read_text())
    assert stored == json.loads(json.dumps(result.to_dict()))
    assert [point["exact"] for point in stored["points"]] == [True, False, False]
    assert stored["points"][0]["bits_per_byte_more"] == 0
    assert all(point["speed"]["tokens_per_second"] > 0 for point in stored["points"])
