"""Generation with exit policies: tokens and cycles are those of the full forward pass, alone and in a batch."""

import io
import statistics

import pytest
import torch
from rich.console import Console

from hrmlm.errors import UserError
from hrmlm.inference import Engine, generate, stream
from hrmlm.inference import show as showing
from hrmlm.inference.generation import SHARED
from hrmlm.inference.generator import Generator
from hrmlm.models import LanguageModel
from hrmlm.steps import depth_keywords
from tests.inference.helpers import BYTES, greedy, small_model
from tests.models.exit_reference import numbers_of_first_cycle
from tests.models.test_exit_policy import CASES, deep

PROMPTS = ["x", "hello", "twenty bytes of text"]
each_case = pytest.mark.parametrize(("family", "rule"), CASES)


def case(family: str, rule: str) -> tuple[LanguageModel, str]:
    """A model in float64 (no decision on a hair's breadth), and a policy that stops some of its positions at once."""
    model = small_model(family).double()
    numbers = numbers_of_first_cycle(model, torch.tensor(BYTES.encode(PROMPTS[2])), rule)
    return model, f"{rule}:{statistics.median(numbers)!r}"  # of an even number of them, so between two


@each_case
def test_tokens_and_cycles_are_those_of_the_full_forward_alone_and_in_a_batch(family: str, rule: str) -> None:
    model, policy = case(family, rule)
    expected: list[list[int]] = []
    together = generate(model, BYTES, PROMPTS, greedy(8, exit=policy, prefill_chunk=3))
    for prompt, row in zip(PROMPTS, together, strict=True):
        with torch.no_grad():
            out = model(torch.tensor([row.prompt_ids + row.ids[:-1]]), **depth_keywords(model, exit=policy))
        start = len(row.prompt_ids) - 1
        assert row.ids == out.logits[0, start:].argmax(-1).tolist()
        assert row.steps == out.steps_BL[0, start:].tolist()
        alone = list(stream(model, BYTES, prompt, greedy(8, exit=policy)))
        assert ([event.id for event in alone], [event.steps for event in alone]) == (row.ids, row.steps)
        recomputed = generate(model, BYTES, prompt, greedy(8, exit=policy, cache=False))[0]
        assert (recomputed.ids, recomputed.steps) == (row.ids, row.steps)
        expected.append(out.steps_BL[0].tolist())
    assert not deep(model) or len({step for steps in expected for step in steps}) > 1


def test_fixed_cycles_are_a_depth_and_can_be_drafted() -> None:
    model = small_model("hrm_lm")
    deep = generate(model, BYTES, "hello", greedy(12, depth=4))[0]
    for settings in ({}, {"draft": 1, "draft_tokens": 3}):
        row = generate(model, BYTES, "hello", greedy(12, exit="cycles:4", **settings))[0]
        assert (row.ids, row.steps) == (deep.ids, [4] * 12)


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("transformer", {"exit": "change:0.1"}, "share their weights"),
        ("cosmicfish", {"exit": "kl:0.1"}, "give change:0.1"),
        ("hrm_lm", {"exit": "change:0.1", "depth": 2}, "exclude each other"),
        ("hrm_lm", {"exit": "change:0.1", "draft": 1}, "drafting and an exit rule exclude each other"),
        ("universal-halting", {"exit": "halt:0.5", "draft": 1}, "give a depth"),
    ],
)
def test_what_cannot_be_is_refused_at_once(family: str, settings: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        stream(small_model(family), BYTES, "x", greedy(5, **settings))


def test_compiled_steps_run_to_a_fixed_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    with Generator(small_model("hrm_lm"), BYTES, compile=True) as generator:
        with pytest.raises(UserError, match="cannot be compiled"):
            generator.generate("x", greedy(5, exit="change:0.1"))
        generator.engine(["x"], greedy(5, exit="cycles:1"))


def test_options_of_a_batch_agree() -> None:
    assert {"exit", "cache_policy"} < set(SHARED)
    with pytest.raises(UserError, match="exit must be the same for all prompts"):
        generate(small_model("hrm_lm"), BYTES, ["a", "b"], [greedy(2), greedy(2, exit="change:0.1")])
    with pytest.raises(ValueError, match="unknown exit policy 'chang:1', did you mean 'change'"):
        greedy(2, exit="chang:1")


def test_cycles_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("hrm_lm-passes")
    file = io.StringIO()
    monkeypatch.setattr(showing, "Console", lambda: Console(file=file, width=80))
    engine = Engine(model, BYTES, ["hello"], greedy(6, exit="change:1e-9"))
    showing.show_depths(engine, ["hello"], 4)
    assert engine.completions()[0].steps == [4] * 6, "two passes of two cycles"
    assert "steps: 4 4 4 4 4 4 (mean 4.00 over 6 tokens)" in file.getvalue()
