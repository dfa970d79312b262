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
    context, stretch = text[:24], text[24:48]
    expected = [context, *([token] for token in stretch[:WARM_UP])] * 4
    assert fed == expected + [context, *([token] for token in stretch)] * 4 * 2
    assert [(s.tokens, s.context, s.rounds, s.cycles) for s in speeds] == [(24, 24, 2, c) for c in (2, 1, 2, 2)]
    assert all(s.tokens_per_second > 0 and s.spread >= 0 for s in speeds)


def test_speed_is_the_median_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 3.0, 1.0, 2.0, 7.0, 1.5])

    class Clocked(speed.Stretch):
        def decode(self, run: Run, n_tokens: int) -> tuple[float, float, float]:
            return 0.5, next(seconds), 2.0

    monkeypatch.setattr(speed, "Stretch", Clocked)
    (found,) = decode_speeds(lively_model("hrm_lm"), random_ids(50), [Run()], seconds=ROUNDS * (0.5 + 10 / 4))
    assert found.tokens == 10, "as many as fit into the seconds, beside the context"
    assert (found.tokens_per_second, found.spread, found.rounds) == (10 / 2.0, 3.0, ROUNDS)


def test_no_time_is_enough_for_one_token() -> None:
    (found,) = decode_speeds(lively_model("hrm_lm"), random_ids(50), [Run()], seconds=1e-9)
    assert found.tokens == 1


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
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="above 0"):
            decode_speeds(model, random_ids(50), [Run()], seconds=seconds)


def test_a_short_context_is_enough() -> None:
    for context in (3, 4, 64):
        found = decode_speeds(lively_model("hrm_lm", context=context), random_ids(64), [Run()], seconds=1)[0]
        assert found.context + found.tokens <= context
