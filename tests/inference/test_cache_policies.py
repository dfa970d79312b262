"""Generation with cache policies: what a slow reference would say, in any batch, with and without drafts."""

import pytest
import torch

from hrmlm.errors import UserError
from hrmlm.inference import Engine, GenerationOptions, generate
from hrmlm.inference.generator import Generator
from tests.inference.helpers import BYTES, greedy, small_model
from tests.models.cache_policy_reference import reference
from tests.models.test_cache_policy import POLICIES, SHARING, fixed_depth

PROMPTS = ["x", "hello", "twenty bytes of text"]
each_family = pytest.mark.parametrize("family", SHARING)


@each_family
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_text_is_that_of_the_reference_alone_and_in_a_batch(family: str, policy: str) -> None:
    model = small_model(family).double()
    options = {"cache_policy": policy, "depth": fixed_depth(model)}
    together = generate(model, BYTES, PROMPTS, greedy(5, **options, prefill_chunk=3))
    for prompt, row in zip(PROMPTS, together, strict=True):
        assert generate(model, BYTES, prompt, greedy(5, **options))[0].ids == row.ids
        logits_LV = reference(model, torch.tensor([row.prompt_ids + row.ids[:-1]]), policy, options["depth"])[0]
        assert row.ids == logits_LV[len(row.prompt_ids) - 1 :].argmax(-1).tolist()
        logprobs = logits_LV.log_softmax(-1)[len(row.prompt_ids) - 1 :].amax(-1)
        torch.testing.assert_close(torch.tensor(row.logprobs), logprobs.float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["hrm_lm-passes", "universal", "universal-halting"])
@pytest.mark.parametrize("policy", ["first", "every:2"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_drafting_changes_nothing(family: str, policy: str, temperature: float) -> None:
    """Drafts go on from cycles whose keys are stored as in plain decoding, so the text is that of the same policy."""
    model = small_model(family).double()
    options = GenerationOptions(
        temperature=temperature, seed=1, max_new_tokens=12, cache_policy=policy, depth=fixed_depth(model)
    )
    plain = generate(model, BYTES, PROMPTS, options)
    for draft in (1, 2, 3):
        rows = generate(model, BYTES, PROMPTS, options.replace(draft=draft, draft_tokens=3))
        assert [row.ids for row in rows] == [row.ids for row in plain]
        assert any(any(row.drafted) for row in rows) or temperature


def test_prompts_are_fed_one_by_one_where_a_policy_needs_it() -> None:
    model = small_model("hrm_lm")
    lengths: list[int] = []
    model.embedding.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    for policy, expected in (("last", [1, 1, 1, 1, 1, 1, 1]), ("first", [5, 1, 1])):
        lengths.clear()
        generate(model, BYTES, "hello", greedy(3, cache_policy=policy))
        assert lengths == expected


def test_compiled_steps_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the eager backend: what is traced, not what a compiler makes of it."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compile(f, backend="eager", fullgraph=True))
    monkeypatch.setattr("shutil.which", lambda name: name)
    model = small_model("hrm_lm")
    with Generator(model, BYTES, compile=True) as generator:
        for policy in ("first", "last", "every:2"):
            options = greedy(6, cache_policy=policy)
            plain = generate(model, BYTES, ["hello", "x"], options)
            assert [row.ids for row in generator.generate(["hello", "x"], options)] == [row.ids for row in plain]


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("transformer", {"cache_policy": "first"}, "needs cycles that share their weights"),
        ("universal-halting", {"cache_policy": "every:2"}, "all positions at the same depth"),
        ("hrm_lm", {"cache_policy": "last", "exit": "change:0.1"}, "all positions at the same depth"),
        ("hrm_lm", {"cache_policy": "last", "draft": 1}, "cannot draft"),
    ],
)
def test_what_cannot_be_is_refused_at_once(family: str, settings: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        Engine(small_model(family), BYTES, ["x"], greedy(5, **settings))


def test_options() -> None:
    with pytest.raises(ValueError, match="cache_policy first without effect"):
        greedy(2, cache_policy="first", cache=False)
    with pytest.raises(ValueError, match="did you mean 'first'"):
        greedy(2, cache_policy="firs")
    with pytest.raises(UserError, match="cache_policy must be the same for all prompts"):
        generate(small_model("hrm_lm"), BYTES, ["a", "b"], [greedy(2), greedy(2, cache_policy="first")])
