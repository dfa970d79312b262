"""Evaluation with exit policies: real loss, real steps, and block calls as decoding makes them."""

import statistics

import numpy as np
import pytest
import torch

from hrmlm.errors import UserError
from hrmlm.evaluation.depth import EXITS, probe_depth
from hrmlm.evaluation.loss import evaluate_ids, score_documents, score_stream
from hrmlm.models import LanguageModel
from hrmlm.steps import depth_keywords
from tests.evaluation.test_depth import probe
from tests.evaluation.test_scoring import random_ids
from tests.evaluation.test_steps import BYTES, TEXT
from tests.families import FAMILIES
from tests.models.exit_reference import numbers_of_first_cycle, run
from tests.models.helpers import lively_model
from tests.models.test_exit_policy import CASES

each_case = pytest.mark.parametrize(("family", "rule"), CASES)


def case(family: str, rule: str, **changes: object) -> tuple[LanguageModel, str, float]:
    model = lively_model(family, **changes).double()
    tokens_L = torch.from_numpy(random_ids(40).astype(np.int64))
    limit = statistics.median(numbers_of_first_cycle(model, tokens_L, rule))
    return model, f"{rule}:{limit!r}", limit


@each_case
def test_scores_are_those_of_the_position_by_position_reference(family: str, rule: str) -> None:
    model, policy, limit = case(family, rule)
    ids = random_ids(25)
    score = score_stream(model, ids, window=10, stride=10, batch_size=2, exit=policy)
    nats, steps = [], []
    for start in range(0, 24, 10):
        part_L = torch.from_numpy(ids[start : start + 11].astype(np.int64))
        logits_LV, cycles = run(model, part_L[:-1], rule, limit)
        nats += torch.nn.functional.cross_entropy(logits_LV, part_L[1:], reduction="none").tolist()
        steps += cycles
    assert score.steps.tolist() == steps
    np.testing.assert_allclose(score.nats, nats, atol=1e-5)
    (document,) = score_documents(model, [ids], window=10, exit=policy)
    assert document.steps == sum(steps)


@pytest.mark.parametrize(("family", "rule"), [("hrm_lm-passes", "kl"), ("universal-halting", "change")])
def test_the_report_says_what_stopped_them(family: str, rule: str) -> None:
    model, policy, limit = case(family, rule, vocab_size=BYTES.vocab_size)
    report = evaluate_ids(model, BYTES.encode(TEXT), BYTES, window=32, exit=policy).to_dict()
    assert (report["exit"], report["halting"], report["halt_threshold"]) == (policy, rule, limit)
    assert report["depth"] is None
    assert len(report["steps"]["histogram"]) > 1
    assert sum(report["steps"]["histogram"].values()) == report["tokens"]
    fixed = evaluate_ids(model, BYTES.encode(TEXT), BYTES, window=32, exit="cycles:1")
    assert fixed.total_nats == evaluate_ids(model, BYTES.encode(TEXT), BYTES, window=32, depth=1).total_nats
    assert (fixed.depth, fixed.exit) == (1, "cycles:1")


@each_case
def test_block_calls_are_those_of_cached_decoding(family: str, rule: str) -> None:
    """Counted with hooks while the same text is decoded token by token, every token alone."""
    model, policy, _ = case(family, rule, vocab_size=BYTES.vocab_size)
    text = TEXT[:20]
    result = probe(model, text, thresholds=[], exits=[policy], depths=[1, 2])
    ids = [BYTES.end_of_text, *BYTES.encode(text)][:-1]
    calls: list[int] = []
    for name in {item.module for item in model.schedule()}:
        model.get_submodule(name).register_forward_hook(lambda module, args, output: calls.append(1))
    for point in result.points:
        calls.clear()
        keywords = depth_keywords(model, point.depth, point.halt_threshold, point.exit)
        cache, steps = model.new_cache(1, len(ids), depth=point.depth), []
        with torch.no_grad():
            for token in ids:
                out = model(torch.tensor([[token]]), cache=cache, **keywords)
                most = (point.depth or model.trained_depth) * model.n_passes
                steps.append(most if out.steps_BL is None else int(out.steps_BL))
        assert point.applications == pytest.approx(len(calls) / len(ids)), point.name
        assert point.mean_steps == pytest.approx(statistics.mean(steps)), point.name


@pytest.mark.parametrize("family", FAMILIES)
def test_default_policies_are_those_a_model_can_follow(family: str) -> None:
    model = lively_model(family, vocab_size=BYTES.vocab_size)
    names = [point.exit for point in probe(model, "text", thresholds=[], depths=[]).points[1:]]
    cases = {rule for name, rule in CASES if name == family}
    if model.learns_depth or model.trained_depth * model.n_passes == 1:
        cases = set()
    assert names == [name for name in EXITS if name.partition(":")[0] in cases]


def test_more_cycles_than_trained_are_counted() -> None:
    model = lively_model("hrm_lm", vocab_size=BYTES.vocab_size)
    exit_point, depth_point = probe(model, "text", thresholds=[], exits=["cycles:5"], depths=[5]).points[1:]
    assert (exit_point.mean_steps, exit_point.applications) == (5, len(model.schedule(5)))
    assert exit_point.report.total_nats == depth_point.report.total_nats


def test_a_policy_that_a_model_cannot_follow_is_refused_before_any_work() -> None:
    def never(**settings: object) -> None:
        pytest.fail("evaluated")

    for exits in (["change:0.1"], ["chang:0.1"]):
        with pytest.raises(UserError):
            probe_depth(lively_model("transformer"), never, exits=exits)
