"""Scores of tokens: the right context, no padding, no dependence on batches (R28, R29)."""

import numpy as np
import pytest
import torch

from hrmlm.errors import UserError
from hrmlm.evaluation.loss import score_documents, score_tokens
from hrmlm.models import build_model
from tests.families import FAMILIES

families = pytest.mark.parametrize("family", FAMILIES)


def make(family: str, **changes: object) -> torch.nn.Module:
    """A small model with livelier logits than a fresh one has, so that a wrong context shows."""
    model = build_model({**FAMILIES[family], **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and float(parameter.std()) < 0.05:
                parameter.mul_(10)
    return model


def random_ids(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, n).astype(np.uint16)


def by_hand(model: torch.nn.Module, ids: np.ndarray, start: int, end: int) -> list[float]:
    """Nats of tokens start+1..end given the tokens from `start` on, from one plain forward pass."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        log_p = model.eval()(tokens[None, start:end]).logits[0].double().log_softmax(-1)
    return [-float(log_p[i, tokens[start + 1 + i]]) for i in range(end - start)]


@families
def test_stride_one_gives_each_token_its_full_allowed_context(family: str) -> None:
    model, ids = make(family), random_ids(101)
    scores = score_tokens(model, ids, window=10, stride=1)
    expected = [by_hand(model, ids, max(0, token - 10), token)[-1] for token in range(1, 101)]
    np.testing.assert_allclose(scores, expected, atol=1e-5)


@families
def test_stride_equal_to_the_window_gives_disjoint_blocks(family: str) -> None:
    model, ids = make(family), random_ids(105)
    expected = [value for start in range(0, 104, 10) for value in by_hand(model, ids, start, min(start + 10, 104))]
    np.testing.assert_allclose(score_tokens(model, ids, window=10), expected, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 3, 5, 10])
def test_the_number_of_scores_is_the_number_of_tokens_after_the_first(stride: int) -> None:
    model = make("transformer")
    assert score_tokens(model, random_ids(101), window=10, stride=stride).shape == (100,)
    assert score_tokens(model, random_ids(7), window=10, stride=stride).shape == (6,)
    assert score_tokens(model, random_ids(1), window=10, stride=stride).shape == (0,)
    assert score_tokens(model, [], window=10, stride=stride).shape == (0,)


@families
@pytest.mark.parametrize("stride", [3, 10])
def test_scores_depend_neither_on_the_batch_size_nor_on_the_pad_id(family: str, stride: int) -> None:
    model, ids = make(family), random_ids(101)
    alone = score_tokens(model, ids, window=10, stride=stride, batch_size=1)
    for batch_size, pad_id in [(2, 0), (8, 63), (64, 5)]:
        together = score_tokens(model, ids, window=10, stride=stride, batch_size=batch_size, pad_id=pad_id)
        np.testing.assert_allclose(together, alone, atol=1e-5)


@families
def test_document_totals_depend_neither_on_the_batch_nor_on_the_order_nor_on_the_pad_id(family: str) -> None:
    model = make(family)
    documents = [random_ids(64)[:n] for n in (1, 2, 17, 64)]
    expected = [
        sum(by_hand(model, document, 0, len(document) - 1)) if len(document) > 1 else 0 for document in documents
    ]
    for batch_size in (1, 2, 3, 4):
        for pad_id in (0, 63):
            order = np.random.default_rng(batch_size).permutation(4)
            scores = score_documents(model, [documents[i] for i in order], batch_size=batch_size, pad_id=pad_id)
            assert [score.tokens for score in scores] == [len(documents[i]) - 1 for i in order]
            np.testing.assert_allclose(
                [score.nats for score in scores], [expected[i] for i in order], rtol=1e-5, atol=1e-5
            )


def test_long_documents_are_windowed_like_a_stream() -> None:
    model, ids = make("transformer"), random_ids(101)
    scores = score_documents(model, [ids, ids[:3]], window=10, stride=4, batch_size=5)
    assert scores[0].nats == pytest.approx(score_tokens(model, ids, window=10, stride=4).sum(), rel=1e-6)
    assert scores[1].tokens == 2


@families
def test_depth_is_passed_on(family: str) -> None:
    model, ids = make(family), random_ids(20)
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(ids[None, :-1].astype(np.int64)), depth=1).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[1:].astype(np.int64)), reduction="none")
    np.testing.assert_allclose(score_tokens(model, ids, depth=1), expected, atol=1e-5)


def test_scoring_leaves_the_model_in_its_mode_and_without_gradients() -> None:
    model = make("transformer", dropout=0.5).train()
    first, second = (score_tokens(model, random_ids(30)) for _ in range(2))
    assert model.training
    assert np.array_equal(first, second)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_ids_that_the_model_cannot_predict_are_refused() -> None:
    model = build_model({**FAMILIES["transformer"], "used_vocab": 60})
    with pytest.raises(UserError, match=r"token id 61 .* 0\.\.59"):
        score_tokens(model, np.array([3, 61, 4]))
    with pytest.raises(UserError, match="token id -1 "):
        score_documents(model, [[1, 2], [-1, 3]])


@pytest.mark.parametrize("settings", [{"stride": 0}, {"window": 10, "stride": 11}, {"window": 65}, {"batch_size": 0}])
def test_impossible_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(UserError):
        score_tokens(make("transformer"), random_ids(20), **settings)
    with pytest.raises(UserError):
        score_documents(make("transformer"), [random_ids(20)], **settings)
