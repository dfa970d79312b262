"""Speed is measured on the given text, really decoded, with every setting alike; and within bounds."""

import pytest
import torch

from hrmlm.errors import UserError
from hrmlm.evaluation import speed
from hrmlm.evaluation.speed import ROUNDS, WARM_UP, Run, decode_speeds
from hrmlm.models.cache_policy import parse_cache_policy
from tests.evaluation.test_scoring import random_ids
from tests.models.helpers import lively_model


def test_the_same_text_is_decoded_token_by_token_with_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ROUNDS", 2)
    model, ids = lively_model("hrm_lm"), random_ids(50)
    fed: list[list[int]] = []
    model.embedding.register_forward_pre_hook(lambda module, args: fed.append(args[0][0].tolist()))
    runs = [Run(), Run(depth=1), Run(exit="change:1e-9"), Run(policy=parse_cache_policy("first"))]
    speeds = decode_speeds(model, ids, runs, seconds=100)
    text = ids.tolist()
    n_tokens, n_context = 24, 24
    assert fed[:4] == [text[:n_context]] * 4
    steps = [token for part in fed[4:] for token in part]
    stretch = text[n_context : n_context + n_tokens]
    assert steps == [*stretch[:WARM_UP] * 4, *stretch * 4 * 2]
    assert [(s.tokens, s.context, s.rounds, s.cycles) for s in speeds] == [(24, 24, 2, c) for c in (2, 1, 2, 2)]
    assert all(s.tokens_per_second > 0 and s.spread >= 0 for s in speeds)


def test_speed_is_the_median_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, *[3.0, 1.0, 2.0]])

    class Clocked(speed.Stretch):
        def decode(self, n_tokens: int) -> tuple[float, float]:
            return next(seconds), 2.0

    monkeypatch.setattr(speed, "Stretch", Clocked)
    (found,) = decode_speeds(lively_model("hrm_lm"), random_ids(50), [Run()], seconds=3 * 10 / 4)
    assert found.tokens == 10, "as many as fit into the seconds"
    assert (found.tokens_per_second, found.spread, found.rounds) == (10 / 2.0, 1.0, ROUNDS)


def test_cycles_are_those_that_were_executed() -> None:
    model, ids = lively_model("universal-halting"), random_ids(50)
    (found,) = decode_speeds(model, ids, [Run()], seconds=100)
    with torch.no_grad():
        steps_L = model(torch.tensor(ids[None].astype(int))).steps_BL[0]
    assert found.cycles == pytest.approx(float(steps_L[found.context : found.context + found.tokens].double().mean()))


def test_what_cannot_be_decoded() -> None:
    model = lively_model("hrm_lm")
    for n in (0, 1, 3):
        assert decode_speeds(model, random_ids(50)[:n], [Run(), Run(depth=1)]) == [None, None]
    assert decode_speeds(model, random_ids(4), [Run()], seconds=1)[0].tokens == 1
    assert decode_speeds(lively_model("cosmicfish", halting="sequence"), random_ids(50), [Run()]) == [None]
    with pytest.raises(UserError, match="above 0"):
        decode_speeds(model, random_ids(50), [Run()], seconds=0)


def test_a_short_context_is_enough() -> None:
    for context in (3, 4, 64):
        found = decode_speeds(lively_model("hrm_lm", context=context), random_ids(64), [Run()], seconds=1)[0]
        assert found.context + found.tokens <= context
