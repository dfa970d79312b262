"""Context, empty prompts, vocabulary, bad input (R08, R38)."""

from typing import Any

import pytest
import torch

from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.inference import GenerationOptions, generate, stream
from tests.inference.helpers import ANY, BYTES, END, each_family, greedy, limited, small_model


@limited
@pytest.mark.parametrize("cache", [True, False])
def test_prompt_and_answer_beside_the_context(family: str, cache: bool) -> None:
    model = small_model(family, context=16)
    for length in (15, 16, 17, 100):
        for asked in (1, 2, 50):
            prompt = list(range(65, 65 + length))
            if length > 16:
                with pytest.raises(UserError, match=f"{length} tokens .* context of 16"):
                    generate(model, BYTES, [prompt], greedy(asked, cache=cache))
                continue
            result = generate(model, BYTES, [prompt], greedy(asked, cache=cache))[0]
            assert len(result.ids) == min(asked, 16 - length + 1)
            assert result.finish_reason == "length"
            assert "".join(e.text for e in stream(model, BYTES, prompt, greedy(asked, cache=cache))) == result.text


@each_family
def test_an_empty_prompt_is_a_new_document(family: str) -> None:
    model = small_model(family)
    empty, end_mark = generate(model, BYTES, ["", [END]], greedy(6))
    assert empty.ids == end_mark.ids
    assert (empty.prompt_ids, end_mark.prompt_ids) == ([], [END])


@each_family
def test_no_new_tokens(family: str) -> None:
    model = small_model(family)
    result = generate(model, BYTES, "abc", greedy(0))[0]
    assert (result.ids, result.logprobs, result.text, result.finish_reason) == ([], [], "", "length")
    assert list(stream(model, BYTES, "abc", greedy(0))) == []
    assert generate(model, BYTES, [], greedy(5)) == []


@each_family
def test_padding_of_the_vocabulary_never_comes_out(family: str) -> None:
    model = small_model(family, vocab_size=300, used_vocab=BYTES.vocab_size, context=256)
    with torch.no_grad():
        model.embedding.weight[BYTES.vocab_size :] = 100.0
        model.norm.weight.fill_(10.0)
    rows = [greedy(25), *(GenerationOptions(temperature=50, seed=seed, max_new_tokens=25) for seed in range(40))]
    for row in generate(model, BYTES, ["a"] * len(rows), rows):
        assert max(row.ids) < BYTES.vocab_size
        assert all(logprob > -200 for logprob in row.logprobs), "padding takes no probability either"


def test_another_tokenizer_is_refused() -> None:
    model = small_model(ANY, vocab_size=300)
    with pytest.raises(UserError, match="predicts 300 ids and the tokenizer has 257"):
        generate(model, BYTES, "a")


@pytest.mark.parametrize("token", [-1, 257, 10**9])
def test_prompt_ids_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(UserError, match=f"{token} is outside the vocabulary"):
        generate(small_model(ANY), BYTES, [[1, token]])


def test_stream_refuses_at_once() -> None:
    with pytest.raises(UserError, match="context of 64"):
        stream(small_model(ANY), BYTES, "x" * 65)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": float("nan")}, "max_new_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"max_tokens": 5}, "max_new_tokens"),
    ],
)
def test_bad_options_are_named(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=name):
        GenerationOptions.parse(settings, "generation")


def test_prompts_of_any_kind() -> None:
    model = small_model(ANY)
    ids = BYTES.encode("né")
    prompts = ["né", "né".encode(), ids, torch.tensor(ids)]
    assert len({tuple(row.prompt_ids + row.ids) for row in generate(model, BYTES, prompts, greedy(3))}) == 1
    with pytest.raises(UserError, match="prompt 1 is a number"):
        generate(model, BYTES, [1, 2])  # type: ignore[list-item]


def test_options_must_fit_the_prompts() -> None:
    model = small_model(ANY)
    with pytest.raises(UserError, match="2 options for 1 prompts"):
        generate(model, BYTES, ["a"], [greedy(1), greedy(1)])
    with pytest.raises(UserError, match="cache must be the same"):
        generate(model, BYTES, ["a", "b"], [greedy(1), greedy(1, cache=False)])


def test_a_ruined_model_is_reported() -> None:
    model = small_model(ANY)
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    for options in (greedy(5), GenerationOptions(seed=1)):
        with pytest.raises(UserError, match="not finite"):
            generate(model, BYTES, "a", options)


def test_a_tokenizer_of_merges() -> None:
    tokenizer = Tokenizer.train(["the cat sat on the mat, the rat sat on the cat. " * 20], 300)
    model = small_model(ANY, vocab_size=tokenizer.vocab_size)
    result = generate(model, tokenizer, "the cat", GenerationOptions(seed=3, max_new_tokens=30))[0]
    assert result.prompt_ids == tokenizer.encode("the cat")
    assert result.text == tokenizer.decode(result.ids)
