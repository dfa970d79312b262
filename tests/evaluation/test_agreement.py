"""Agreement of smaller depths with the model as trained, against a plain reference; as part of the probe."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrmlm.errors import UserError
from hrmlm.evaluation.agreement import Agreement, agreements
from hrmlm.evaluation.depth import probe_depth
from hrmlm.evaluation.loss import evaluate_ids
from hrmlm.models import LanguageModel
from tests.evaluation.test_steps import BYTES
from tests.families import FAMILIES
from tests.models.helpers import lively_model, random_tokens


def stream(model: LanguageModel, length: int, seed: int = 3) -> np.ndarray:
    return random_tokens(model, 1, length, seed)[0].numpy()


def reference(model: LanguageModel, ids: np.ndarray, depth: int, window: int, stride: int) -> Agreement:
    """Token by token: each is predicted once, by the first window that reaches it."""
    same, kept = [], []
    for target in range(1, len(ids)):
        start = 0
        while start + window < target:
            start += stride
        tokens = torch.from_numpy(ids[start:target])[None]
        with torch.no_grad():
            early = model(tokens, depth=depth).logits[0, -1].double()
            trained = model(tokens).logits[0, -1].double()
        same.append(int(early.argmax()) == int(trained.argmax()))
        kept.append(1 - 0.5 * float((early.softmax(-1) - trained.softmax(-1)).abs().sum()))
    return Agreement(len(same), float(np.mean(same)), float(np.mean(kept)))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str) -> None:
    model = lively_model(name)
    ids = stream(model, 30)
    depths = range(1, model.trained_depth + 1)
    found = agreements(model, ids, depths, window=8, stride=5, batch_size=3)
    for depth in depths:
        expected = reference(model, ids, depth, 8, 5)
        assert found[depth].positions == expected.positions == 29
        assert found[depth].greedy == expected.greedy
        assert found[depth].acceptance == pytest.approx(expected.acceptance, abs=1e-5)
    if not model.learns_depth:
        assert found[model.trained_depth].greedy == 1.0
        assert found[model.trained_depth].acceptance == pytest.approx(1.0, abs=1e-6)
    if model.trained_depth > 1:
        assert found[1].acceptance < 0.99


@settings(max_examples=25, deadline=None)
@given(length=st.integers(2, 20), window=st.integers(1, 9), stride=st.integers(1, 9), batch_size=st.integers(1, 4))
def test_windows(length: int, window: int, stride: int, batch_size: int) -> None:
    model, stride = lively_model("universal"), min(window, stride)
    ids = stream(model, length)
    (found,) = agreements(model, ids, [2], window=window, stride=stride, batch_size=batch_size).values()
    expected = reference(model, ids, 2, window, stride)
    assert (found.positions, found.greedy) == (expected.positions, expected.greedy)
    assert found.acceptance == pytest.approx(expected.acceptance, abs=1e-5)


def test_nothing_to_compare() -> None:
    model = lively_model("universal")
    assert agreements(model, [1], [1, 2]) == agreements(model, [], [1]) == {}
    assert agreements(model, [1, 2, 3], []) == {}


@pytest.mark.parametrize(
    ("ids", "changes", "told"),
    [
        ([1, 2], {"depths": [0]}, "depth 0 is not possible"),
        ([1, 64], {}, "token id 64"),
        ([1, 2], {"window": 0}, "window 0"),
        ([1, 2], {"stride": 0}, "stride 0"),
        ([1, 2], {"batch_size": 0}, "batch size 0"),
    ],
)
def test_refused(ids: list[int], changes: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        agreements(lively_model("universal"), ids, **{"depths": [1], **changes})


def test_in_the_probe() -> None:
    """Fixed depths have it, the model as trained and thresholds do not."""
    model = lively_model("cosmicfish", vocab_size=257)
    ids = BYTES.encode("A few words, and some more.")
    found = agreements(model, [BYTES.end_of_text, *ids], [1, 4], window=16)
    result = probe_depth(
        model,
        partial(evaluate_ids, model, ids, BYTES, window=16),
        thresholds=[0.5],
        depths=[1, 4],
        compare=partial(agreements, model, [BYTES.end_of_text, *ids], window=16),
    )
    assert [point.agreement for point in result.points] == [None, None, found[1], found[4]]
    assert [point["agreement"] for point in result.to_dict()["points"][1:3]] == [None, found[1].to_dict()]
