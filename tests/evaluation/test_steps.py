"""Evaluation of learned depth: steps are counted, recorded, and independent of batches (R29, R31, R35)."""

import json

import numpy as np
import pytest
import torch

from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.evaluation.loss import evaluate_ids, score_documents, score_stream, score_tokens
from hrmlm.models import LanguageModel, build_model
from tests.evaluation.test_loss import shown
from tests.evaluation.test_scoring import make, random_ids
from tests.families import FAMILIES

ADAPTIVE = [name for name, settings in FAMILIES.items() if build_model(settings).learns_depth]
adaptive = pytest.mark.parametrize("family", ADAPTIVE)
BYTES = Tokenizer.bytes()
TEXT = "Some text to read, with a few words in it. " * 4


def lively(family: str = "cosmicfish") -> LanguageModel:
    """A model over bytes whose positions stop at different steps."""
    return make(family, vocab_size=BYTES.vocab_size)


def steps_by_hand(model: LanguageModel, ids: np.ndarray) -> list[int]:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(ids[None].astype(np.int64))).steps_BL[0].tolist()


@adaptive
@pytest.mark.parametrize("stride", [1, 3, 10])
def test_steps_are_those_of_the_position_that_predicts(family: str, stride: int) -> None:
    model, ids = make(family), random_ids(35)
    score = score_stream(model, ids, window=10, stride=stride)
    assert score.steps is not None
    for token in range(1, 35):
        place = score.positions[token - 1]
        expected = steps_by_hand(model, ids[token - 1 - place : token])[-1]
        assert score.steps[token - 1] == expected
    assert len(set(score.steps.tolist())) > 1, "depth must vary to prove something"
    if stride == 10:
        assert score.positions.tolist() == [k % 10 for k in range(34)]


@adaptive
@pytest.mark.parametrize("settings", [{}, {"halt_threshold": 0.4}, {"depth": 2}])
def test_steps_depend_neither_on_the_batch_size_nor_on_the_pad_id(family: str, settings: dict) -> None:
    model, ids = make(family), random_ids(52)
    alone = score_stream(model, ids, window=10, stride=3, batch_size=1, **settings)
    for batch_size, pad_id in [(2, 63), (64, 5)]:
        other = score_stream(model, ids, window=10, stride=3, batch_size=batch_size, pad_id=pad_id, **settings)
        np.testing.assert_array_equal(other.steps, alone.steps)
        np.testing.assert_allclose(other.nats, alone.nats, atol=1e-5)


@adaptive
def test_steps_of_documents_depend_neither_on_the_batch_nor_on_the_order(family: str) -> None:
    model = make(family)
    documents = [random_ids(64)[:n] for n in (1, 2, 17, 64)]
    expected = [None, *(sum(steps_by_hand(model, document[:-1])) for document in documents[1:])]
    for batch_size in (1, 2, 3, 4):
        order = np.random.default_rng(batch_size).permutation(4)
        scores = score_documents(model, [documents[i] for i in order], batch_size=batch_size)
        assert [score.steps for score in scores] == [expected[i] for i in order]


@adaptive
def test_a_lower_threshold_stops_earlier_and_depth_is_exact(family: str) -> None:
    model, ids = make(family), random_ids(60)
    means = [score_stream(model, ids, halt_threshold=x).steps.mean() for x in (0.2, 0.6, 0.99)]
    assert means == sorted(means)
    assert means[0] < means[-1]
    trained = score_stream(model, ids)
    np.testing.assert_array_equal(trained.steps, score_stream(model, ids, halt_threshold=0.99).steps)
    for depth in (1, model.trained_depth):
        assert set(score_stream(model, ids, depth=depth).steps.tolist()) == {depth}


def test_the_report_counts_text_only_and_tells_how_it_was_decided() -> None:
    model, ids = lively(), [*BYTES.encode(TEXT), BYTES.end_of_text] * 2
    report = evaluate_ids(model, ids, BYTES, window=32)
    values = report.to_dict()
    assert report.steps is not None
    assert report.steps.total == report.tokens == 2 * len(TEXT)
    assert sum(values["steps"]["histogram"].values()) == report.tokens
    mean = sum(int(n) * count for n, count in values["steps"]["histogram"].items()) / report.tokens
    assert values["steps"]["mean"] == pytest.approx(mean)
    assert len(values["steps"]["by_position"]) == 32
    assert (values["halting"], values["halt_threshold"], values["depth"]) == ("token", 0.99, None)
    fixed = evaluate_ids(model, ids, BYTES, depth=2).to_dict()
    assert (fixed["halting"], fixed["halt_threshold"], fixed["depth"]) == ("fixed", None, 2)
    assert fixed["steps"]["histogram"] == {"2": report.tokens}
    for words in (
        "mean outer steps",
        "  2 steps",
        f"at most {len(model.schedule())} block applications",
        "halting: token, threshold 0.99",
    ):
        assert words in shown(report)
    json.dumps(values, allow_nan=False)


def test_the_report_repeats_the_number() -> None:
    model, ids = lively(), BYTES.encode(TEXT)
    first = evaluate_ids(model, ids, BYTES, window=32, halt_threshold=0.6, first_tokens=100).to_dict()
    settings = {key: first[key] for key in ("window", "stride", "batch_size", "depth", "halt_threshold")}
    assert evaluate_ids(model, ids, BYTES, first_tokens=first["first_tokens"], **settings).to_dict() == first
    assert first["tokens"] == 100


def test_other_families_have_no_steps() -> None:
    report = evaluate_ids(make("hrm_lm", vocab_size=257), BYTES.encode(TEXT), BYTES)
    assert report.steps is report.halting is report.halt_threshold is None
    assert "steps" not in shown(report)
    assert score_documents(make("hrm_lm"), [random_ids(9)])[0].steps is None


def test_impossible_settings_are_refused() -> None:
    model, ids = make("cosmicfish"), random_ids(20)
    for settings in ({"halt_threshold": 0}, {"halt_threshold": 0.5, "depth": 1}, {"depth": 0}):
        for score in (score_tokens, lambda m, i, **s: score_documents(m, [i], **s)):
            with pytest.raises(UserError):
                score(model, ids, **settings)
    with pytest.raises(UserError, match="does not learn"):
        score_tokens(make("transformer"), ids, halt_threshold=0.5)


def test_scoring_in_training_mode_counts_the_same_steps() -> None:
    """O4: no exploration and no constant in favour of stopping outside training."""
    model, ids = make("cosmicfish", exploration=1.0), random_ids(60)
    steps = score_stream(model.eval(), ids).steps
    np.testing.assert_array_equal(score_stream(model.train(), ids).steps, steps)
    with torch.no_grad():
        training = model.train()(torch.from_numpy(ids[None, :-1].astype(np.int64))).steps_BL[0]
    np.testing.assert_array_equal(training, steps)
