"""A row of a batch is what it would be alone (R36, R37), and ends where it ends (R40)."""

from itertools import permutations

import pytest
import torch

from hrmlm.inference import Engine, GenerationOptions, generate
from tests.inference.helpers import ANY, BYTES, END, each_family, greedy, limited, say, small_model

PROMPTS = ["x", "hello", "twenty bytes of text"]


@each_family
def test_unequal_prompts_in_any_order(family: str) -> None:
    assert [len(BYTES.encode(prompt)) for prompt in PROMPTS] == [1, 5, 20]
    model = small_model(family)
    alone = {prompt: generate(model, BYTES, prompt, greedy(8))[0].ids for prompt in PROMPTS}
    orders = list(permutations(PROMPTS))
    for order, cache in [*((order, True) for order in orders), (orders[1], False), (orders[-1], False)]:
        together = generate(model, BYTES, order, greedy(8, cache=cache))
        assert [row.ids for row in together] == [alone[prompt] for prompt in order]


@each_family
@pytest.mark.parametrize("cache", [True, False])
def test_rows_of_a_mixed_batch(family: str, cache: bool) -> None:
    model = small_model(family)
    rows = [
        GenerationOptions(temperature=0, max_new_tokens=4, cache=cache),
        GenerationOptions(temperature=1, seed=1, max_new_tokens=6, cache=cache),
        GenerationOptions(temperature=1, seed=2, max_new_tokens=0, cache=cache),
        GenerationOptions(temperature=3, seed=2, top_k=9, max_new_tokens=3, cache=cache),
        GenerationOptions(temperature=0.7, seed=1, top_p=0.8, max_new_tokens=5, cache=cache),
    ]
    prompts = [*PROMPTS, "", "hello"]
    together = generate(model, BYTES, prompts, rows)
    for prompt, options, row in zip(prompts, rows, together, strict=True):
        alone = generate(model, BYTES, prompt, options)[0]
        assert (row.ids, row.text, row.finish_reason) == (alone.ids, alone.text, alone.finish_reason)
        assert len(row.ids) == options.max_new_tokens or row.ids[-1] == END


@each_family
@pytest.mark.parametrize("cache", [True, False])
def test_rows_end_at_their_own_step(family: str, cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(family)
    calls: list[int] = []
    model.embedding.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    letters = BYTES.encode("abcdefghij")
    say(monkeypatch, *[[*letters[:step], END, *letters] for step in (4, 0, 2)])
    engine = Engine(model, BYTES, PROMPTS, greedy(30, cache=cache))
    events = list(engine.run())
    rows = engine.completions()
    assert [row.text for row in rows] == ["abcd", "", "ab"]
    assert [row.ids for row in rows] == [[*letters[:step], END] for step in (4, 0, 2)]
    assert all(len(row.logprobs) == len(row.ids) and row.finish_reason == "end" for row in rows)
    assert engine.forwards == len(calls) == 5, "as many as the slowest row has tokens"
    assert calls == [3, 2, 2, 1, 1], "rows that ended are not computed any more"
    assert [event.row for event in events if event.finish_reason] == [1, 2, 0]
    monkeypatch.undo()
    with torch.no_grad():
        for row in rows:
            logits_V = model(torch.tensor([row.prompt_ids + row.ids[:-1]])).logits[0, -1]
            assert row.logprobs[-1] == pytest.approx(float(logits_V.log_softmax(-1)[END]), abs=1e-4)


@limited
def test_a_long_row_that_leaves_does_not_limit_the_others(family: str) -> None:
    model = small_model(family, context=16)
    for cache in (True, False):
        long, short = generate(model, BYTES, ["sixteen letters.", "x"], greedy(50, cache=cache))
        assert (len(long.ids), len(short.ids)) == (1, 16)
        assert short.ids == generate(model, BYTES, "x", greedy(50))[0].ids


def test_a_prompt_that_ends_with_the_end_mark_goes_on() -> None:
    model = small_model(ANY)
    result = generate(model, BYTES, [[*BYTES.encode("done"), END]], greedy(5))[0]
    assert len(result.ids) == 5
    assert result.finish_reason == "length"
