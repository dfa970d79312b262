"""Drafting changes the speed, never the text: every family, every r and γ, greedy and sampled, batches, ends inside
drafts; and the planner that chooses r and γ."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hrmlm.errors import UserError
from hrmlm.inference import Completion, Engine, GenerationOptions, generate
from hrmlm.inference.drafting import Drafting, DraftOptions, Planner, reading_shares
from hrmlm.models import LanguageModel
from tests.families import FAMILIES
from tests.inference.helpers import BYTES, END, greedy, say, small_model

drafters = pytest.mark.parametrize("family", [name for name in FAMILIES if not small_model(name).carries_state])

PROMPTS = ["hello wor", "x", "", "a longer prompt, longer than a chunk"]
OPTIONS = [greedy(16), GenerationOptions(seed=5, max_new_tokens=16, temperature=0.8, top_k=20, top_p=0.95)]


def fixed_depth(model: LanguageModel) -> dict[str, int]:
    """Models that learn their depth draft at a fixed one."""
    return {"depth": model.trained_depth} if model.learns_depth else {}


def cycles(model: LanguageModel) -> int:
    return model.trained_depth * model.n_passes


def drafting(family: str, **changes: object) -> LanguageModel:
    model = small_model(family, **changes)
    if cycles(model) < 2:
        pytest.skip("one cycle: nothing to draft with (refused, see below)")
    return model


def same(plain: Sequence[Completion], drafted: Sequence[Completion]) -> None:
    for a, b in zip(plain, drafted, strict=True):
        assert a.ids == b.ids
        assert (a.text, a.finish_reason, a.steps) == (b.text, b.finish_reason, b.steps)
        assert b.logprobs == pytest.approx(a.logprobs, abs=1e-4)


@drafters
@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding(family: str, options: GenerationOptions) -> None:
    model = drafting(family)
    options = options.model_copy(update={**fixed_depth(model), "prefill_chunk": 7})
    plain = generate(model, BYTES, PROMPTS, options)
    assert not any(any(row.drafted) for row in plain)
    lone = options.model_copy(update={"draft": 1, "draft_tokens": 3})
    alone = [generate(model, BYTES, [prompt], lone)[0] for prompt in PROMPTS]
    guessed = 0
    for r, n in [(1, 1), (cycles(model) - 1, 5), ("auto", None), (1, None)]:
        drafted = generate(model, BYTES, PROMPTS, options.model_copy(update={"draft": r, "draft_tokens": n}))
        same(plain, drafted)
        same(alone, drafted)
        guessed += sum(sum(row.drafted) for row in drafted)
    assert guessed > 0


@given(r=st.integers(1, 3), n=st.integers(1, 9), tokens=st.integers(1, 40), seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_any_sizes(r: int, n: int, tokens: int, seed: int) -> None:
    """Up to the context limit, which falls inside drafts."""
    model = small_model("universal", context=32)
    plain = GenerationOptions(seed=seed, temperature=0.7, max_new_tokens=tokens)
    prompts = ["ab", "a prompt of 25 characters", ""]
    drafted = plain.model_copy(update={"draft": r, "draft_tokens": n})
    same(generate(model, BYTES, prompts, plain), generate(model, BYTES, prompts, drafted))


@drafters
def test_chunks_of_the_prompt_change_nothing(family: str) -> None:
    model = small_model(family)
    whole = generate(model, BYTES, PROMPTS, greedy(12))
    for chunk in (1, 5, 36):
        same(whole, generate(model, BYTES, PROMPTS, greedy(12, prefill_chunk=chunk)))


# Adversarial drafts: what the first cycles guess and what the full depth says are scripted


def scripted(
    monkeypatch: pytest.MonkeyPatch, truth: bytes, guess: bytes, **options: object
) -> tuple[Completion, Engine]:
    """A row whose full depth says `truth`; drafts say `guess`."""
    full, draft = [*truth], [*guess]
    say(monkeypatch, full)
    engine = Engine(small_model("hrm_lm"), BYTES, ["x"], greedy(40, draft=1, draft_tokens=4, **options))
    decoder = engine._decoder
    assert isinstance(decoder, Drafting)
    run = decoder.runner.first

    def first(tokens_BL: Tensor, call: object, count: int) -> tuple:
        states, logits_BLV = run(tokens_BL, call, count)
        return states, torch.full_like(logits_BLV, torch.nan)  # marks a draft's logits

    decoder.runner.first = first
    choose = decoder.sampler.__call__

    class Both(type(decoder.sampler)):
        def __call__(self, logits_BLV: Tensor, first: Sequence[int]) -> Tensor:
            if bool(logits_BLV.isnan().any()):
                return torch.tensor([[draft[number] for number in first]])
            return choose(logits_BLV, first)

    decoder.sampler.__class__ = Both
    for _ in engine.run():
        pass
    return engine.completions()[0], engine


TEXT = b"abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("guess", "forwards", "drafted"),
    [
        (
            TEXT,
            1 + 3,
            4 + 4 + 3,
        ),  # the prompt gives 1 token, a round 5; the last one ends at its third guess
        (bytes(26), 1 + 13, 0),  # every guess is wrong: as many steps as plain decoding
        (b"a" + TEXT[1:4] + b"?" + TEXT[5:], 1 + 3, 3 + 4 + 4),  # the fourth of the first draft is wrong
    ],
    ids=["all accepted", "none accepted", "rejected in the middle"],
)
def test_guesses(monkeypatch: pytest.MonkeyPatch, guess: bytes, forwards: int, drafted: int) -> None:
    truth = [*TEXT[:13], END]
    guesses = [*guess[:13], *([END] if guess[1:2] == TEXT[1:2] else [0])]
    row, engine = scripted(monkeypatch, truth + [0] * 30, guesses + [0] * 30)
    assert row.text == TEXT[:13].decode()
    assert row.finish_reason == "end"
    assert row.ids == truth
    assert engine.forwards == forwards
    assert sum(row.drafted) == drafted


def test_the_end_inside_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind an accepted end mark, or a stop string, is thrown away."""
    row, _ = scripted(monkeypatch, [*b"abc", END, *b"defgh"], [*b"abc", END, *b"defgh"])
    assert (row.text, row.ids, row.finish_reason) == ("abc", [*b"abc", END], "end")
    row, _ = scripted(monkeypatch, b"abcdefghij" * 5, b"abcdefghij" * 5, stop=("cd",))
    assert (row.text, row.finish_reason) == ("ab", "stop")
    assert row.ids == [*b"abcd"]


# Exactness of the distribution


def test_sampled_pairs_follow_the_model() -> None:
    """Two tokens, the second one always drafted: their joint frequencies are the products the model gives."""
    model = small_model("hrm_lm", n_cycles=3)
    n = 3000
    rows = [
        GenerationOptions(seed=s, temperature=0.6, top_k=3, max_new_tokens=3, draft=1, draft_tokens=2) for s in range(n)
    ]
    texts = generate(model, BYTES, ["x"] * n, rows)
    assert 0.02 < sum(sum(row.drafted) for row in texts) / (2 * n) < 0.98, "accepted and rejected, both"

    def top(ids: list[int]) -> dict[int, float]:
        with torch.no_grad():
            logits_V = model(torch.tensor([[*b"x", *ids]])).logits[0, -1].double() / 0.6
        values, places = logits_V.topk(3)
        return dict(zip(places.tolist(), values.softmax(-1).tolist(), strict=True))

    expected = {
        (a, b, c): p * q * r for a, p in top([]).items() for b, q in top([a]).items() for c, r in top([a, b]).items()
    }
    chi_square, freedom, rest = 0.0, -1, [0.0, 0.0]
    seen = [tuple(row.ids) for row in texts if END not in row.ids]
    assert len(seen) == n
    assert set(seen) <= set(expected)
    for triple, probability in expected.items():
        if probability * n >= 5:
            chi_square += (seen.count(triple) - probability * n) ** 2 / (probability * n)
            freedom += 1
        else:
            rest[0] += seen.count(triple)
            rest[1] += probability * n
    if rest[1] >= 5:
        chi_square, freedom = chi_square + (rest[0] - rest[1]) ** 2 / rest[1], freedom + 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5, f"{chi_square=} for {freedom} degrees of freedom"


# Refusals


def test_what_cannot_draft_says_why() -> None:
    with pytest.raises(UserError, match="at least 2 cycles"):
        generate(small_model("hrm_lm-no-gate"), BYTES, "x", greedy(3, draft=1))
    with pytest.raises(UserError, match="learns it"):
        generate(small_model("cosmicfish"), BYTES, "x", greedy(3, draft="auto"))
    with pytest.raises(UserError, match="1 to 3"):
        generate(small_model("universal"), BYTES, "x", greedy(3, draft=4))
    with pytest.raises(UserError, match="needs the cache"):
        generate(small_model("universal"), BYTES, "x", greedy(3, draft=1, cache=False))
    with pytest.raises(UserError, match="draft_tokens without effect"):
        GenerationOptions.parse({"draft_tokens": 3}, "generate")
    for wrong in ({"draft": 0}, {"draft": "much"}, {"draft": 1, "draft_tokens": 0}):
        with pytest.raises(UserError, match="draft"):
            GenerationOptions.parse(wrong, "generate")


# The planner


def measured(
    planner: Planner, plain: float, draft_cost: float, verify_cost: float, agreement: float, n: int = 60
) -> list:
    """Plans of a planner that lives in a world with these costs, in plain steps, and this agreement."""
    plans = []
    for index in range(n):
        plan = planner.plan(limit=100)
        plans.append(plan)
        if plan is None:
            planner.observe_plain(plain)
        else:
            r, tokens = plan
            accepted = next((i for i in range(tokens) if (index * 7 + i * 3) % 10 >= agreement * 10), tokens)
            planner.observe_round(r, tokens, plain * draft_cost * (tokens + 1), plain * verify_cost, [accepted])
    return plans


def planner(**options: int | None) -> Planner:
    return Planner(4, DraftOptions(**options), (0.05, 0.2, 0.15))


def test_it_drafts_where_that_pays() -> None:
    plans = measured(planner(), 1e-3, draft_cost=0.3, verify_cost=0.9, agreement=1.0, n=60)
    assert plans[:3] == [None] * 3, "first it times plain steps"
    assert all(plan is not None and plan[1] >= 4 for plan in plans[30:])


@pytest.mark.parametrize(
    ("draft_cost", "verify_cost", "agreement"), [(0.3, 0.9, 0.1), (1.0, 1.5, 0.9), (0.5, 4.0, 1.0)]
)
def test_it_stops_where_that_costs(draft_cost: float, verify_cost: float, agreement: float) -> None:
    """Nothing agrees, or drafting is as dear as decoding: at most one round in 20 is spent on trying again."""
    plans = measured(planner(), 1e-3, draft_cost, verify_cost, agreement, n=400)
    assert sum(plan is not None for plan in plans[60:]) <= 17


def test_agreement_on_the_prompt_decides_before_the_first_round() -> None:
    good, bad = planner(), planner()
    for r, agreed in ((1, 2), (2, 30), (3, 31)):
        good.observe_agreement(r, agreed, 32)
        bad.observe_agreement(r, 1, 32)
    for p in (good, bad):
        for _ in range(3):
            assert p.plan(10) is None
            p.observe_plain(1e-3)
    plan = good.plan(10)
    assert plan is not None
    assert plan[0] == 2, "r = 1 rarely agrees, r = 3 costs nearly all"
    assert bad.plan(10) is None


def test_what_is_given_is_not_chosen_and_the_limit_holds() -> None:
    assert planner(cycles=2, tokens=5).plan(3) == (2, 3)
    assert planner(cycles=2, tokens=5).plan(0) is None
    only_r = planner(cycles=3)
    for _ in range(3):
        only_r.observe_plain(1e-3)
    only_r.observe_agreement(3, 64, 64)
    plan = only_r.plan(2)
    assert plan is None or (plan[0] == 3 and plan[1] <= 2)


@drafters
def test_shares_of_a_step_sum_to_one(family: str) -> None:
    model = small_model(family)
    once, cycle, head = reading_shares(model, None)
    assert once >= 0
    assert cycle > 0
    assert once + cycles(model) * cycle + head == pytest.approx(1)


def test_models_that_carry_a_state_do_not_draft() -> None:
    family = next(name for name in FAMILIES if small_model(name).carries_state)
    with pytest.raises(UserError, match="replaces it by a memory"):
        generate(small_model(family), BYTES, "x", greedy(5, draft=1))
