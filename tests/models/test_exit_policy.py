"""Early exit by rule: decisions and logits of every position, however the text is fed, in any batch (R32, R33, R36)."""

import contextlib
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hrmlm.errors import UserError
from hrmlm.models import LanguageModel, exit_policy
from hrmlm.models.exit_policy import ReadoutDivergence, StateChange, parse_exit
from hrmlm.steps import depth_keywords
from tests.families import FAMILIES
from tests.models.exit_reference import numbers_of_first_cycle, run
from tests.models.helpers import build, lively_model, random_tokens

MODELS = {name: build(name) for name in FAMILIES}
EXITING = [name for name, model in MODELS.items() if model.cycle_slots is not None and not model.carries_state]
CASES = [(name, rule) for name in EXITING for rule in ("change", "kl") if rule == "change" or not MODELS[name].finishes]
each_case = pytest.mark.parametrize(("family", "rule"), CASES)
LENGTH = 10


def deep(model: LanguageModel) -> bool:
    return model.trained_depth * model.n_passes > 1


def case(family: str, rule: str) -> tuple[LanguageModel, str, float, Tensor]:
    """A model in float64, a policy that stops about half of the positions at once, its limit, and tokens."""
    model = lively_model(family).double()
    tokens_BL = random_tokens(model, 3, LENGTH)
    limit = statistics.median(number for row in tokens_BL for number in numbers_of_first_cycle(model, row, rule))
    return model, f"{rule}:{limit!r}", limit, tokens_BL


def observe(model: LanguageModel, tokens_BL: Tensor, policy: str, chunks: list[int] | None = None) -> dict[str, Tensor]:
    """Logits and steps; chunks: fed through a cache in pieces of these lengths."""
    keywords, cache = depth_keywords(model, exit=policy), None
    if chunks is not None:
        cache = model.new_cache(*tokens_BL.shape)
    with torch.no_grad():
        pieces_BL = tokens_BL.split(chunks or LENGTH, dim=1)
        outputs = [model(piece_BL, cache=cache, **keywords) for piece_BL in pieces_BL]
    return {name: torch.cat([getattr(out, name) for out in outputs], dim=1) for name in ("logits", "steps_BL")}


@each_case
def test_however_it_is_fed_a_text_is_what_each_position_alone_decides(family: str, rule: str) -> None:
    model, policy, limit, tokens_BL = case(family, rule)
    for chunks in (None, [LENGTH], [4, 1, 5], [1] * LENGTH):
        seen = observe(model, tokens_BL, policy, chunks)
        for row, tokens_L in enumerate(tokens_BL):
            logits_LV, cycles = run(model, tokens_L, rule, limit)
            assert seen["steps_BL"][row].tolist() == cycles
            torch.testing.assert_close(seen["logits"][row], logits_LV, atol=1e-5, rtol=0)  # logits are float32
    assert not deep(model) or len(seen["steps_BL"].unique()) > 1, "depth must vary to prove something"


@each_case
def test_a_row_decides_alone_as_in_a_batch_and_padding_changes_nothing(family: str, rule: str) -> None:
    model, policy, _, tokens_BL = case(family, rule)
    lengths_B = torch.tensor([3, 10, 1])
    with torch.no_grad():
        padded = model(tokens_BL, lengths_B=lengths_B, **depth_keywords(model, exit=policy))
    for row, length in enumerate(lengths_B.tolist()):
        alone = observe(model, tokens_BL[row : row + 1, :length], policy)
        assert padded.steps_BL[row, :length].tolist() == alone["steps_BL"][0].tolist()
        torch.testing.assert_close(padded.logits[row, :length], alone["logits"][0], atol=1e-5, rtol=0)


@each_case
@settings(max_examples=3, deadline=None, derandomize=True)
@given(t=st.integers(0, LENGTH - 2), shift=st.integers(1, 63), chunked=st.booleans())
def test_later_tokens_change_neither_logits_nor_decisions(
    family: str, rule: str, t: int, shift: int, chunked: bool
) -> None:
    model, policy, _, tokens_BL = case(family, rule)
    changed_BL = tokens_BL.clone()
    changed_BL[:, t + 1 :] = (changed_BL[:, t + 1 :] + shift) % 64
    before, after = (observe(model, tokens, policy, [5, 5] if chunked else None) for tokens in (tokens_BL, changed_BL))
    assert torch.equal(before["steps_BL"][:, : t + 1], after["steps_BL"][:, : t + 1])
    torch.testing.assert_close(before["logits"][:, : t + 1], after["logits"][:, : t + 1], atol=1e-5, rtol=0)


@each_case
def test_limits_without_effect_are_the_full_and_the_smallest_depth(family: str, rule: str) -> None:
    model = lively_model(family)
    tokens_BL = random_tokens(model, 2, LENGTH)
    most = model.trained_depth * model.n_passes
    for policy, depth, steps in ((f"{rule}:1e-30", model.trained_depth, most), (f"{rule}:1e30", 1, 1)):
        seen = observe(model, tokens_BL, policy)
        assert set(seen["steps_BL"].unique().tolist()) == {steps}
        if model.n_passes == 1 or steps > 1:  # a depth counts cycles per pass
            with torch.no_grad():
                expected = model(tokens_BL, depth=depth).logits
            torch.testing.assert_close(seen["logits"], expected, atol=1e-5, rtol=0)


@each_case
@torch.no_grad()
def test_rows_that_stopped_are_not_computed_any_more(family: str, rule: str) -> None:
    """One token per row: each module of the cycle is called for the rows that still run, and for no others."""
    model, policy, _, tokens_BL = case(family, rule)
    keywords = depth_keywords(model, exit=policy)
    cache = model.new_cache(3, LENGTH)
    first, stride = model.cycle_slots
    names = [a.module for a in model.schedule() if first <= a.slot < first + stride]
    rows: list[int] = []
    for name in set(names):
        model.get_submodule(name).register_forward_hook(lambda module, args, output: rows.append(len(args[0])))
    readouts: list[int] = []
    model.norm.register_forward_hook(lambda module, args, output: readouts.append(args[0].shape[-2]))
    for tokens_B1 in tokens_BL.split(1, dim=1):
        rows.clear(), readouts.clear()
        steps_B = model(tokens_B1, cache=cache, **keywords).steps_BL[:, 0]
        running = [int((steps_B > cycle).sum()) for cycle in range(int(steps_B.max()))]
        executed = sum(running) * stride
        if int(steps_B.max()) * stride + first > len(model.schedule()):  # nothing reads the very last application
            executed -= running[-1]
        assert sum(rows) == executed
        if rule == "kl":
            assert readouts[:-1] == running, "what is read out to decide is read of running rows only"


def test_cycles_and_halting_are_depth_and_threshold() -> None:
    model = lively_model("universal-halting")
    for policy, keywords in (("cycles:3", {"depth": 3}), ("halt:0.4", {"halt_threshold": 0.4})):
        assert depth_keywords(model, exit=policy) == depth_keywords(model, **keywords)
        tokens_BL = random_tokens(model, 2, LENGTH)
        with torch.no_grad():
            expected = model(tokens_BL, **keywords)
        assert torch.equal(observe(model, tokens_BL, policy)["steps_BL"], expected.steps_BL)
    assert depth_keywords(lively_model("transformer"), exit="cycles:2")["depth"] == 2


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_numbers_that_are_compared(rows: int, length: int, seed: int) -> None:
    torch.manual_seed(seed)
    before, after, head = torch.randn(rows, length, 8), torch.randn(rows, length, 8), torch.randn(8, 11)
    seen = StateChange(0.5).measure(before, after)
    by_hand = [[float((a - b).pow(2).sum().sqrt() / a.pow(2).sum().sqrt()) for a, b in zip(x, y, strict=True)]
               for x, y in zip(after, before, strict=True)]  # fmt: skip
    torch.testing.assert_close(seen, torch.tensor(by_hand))
    rule = ReadoutDivergence(0.5, lambda state: state @ head, 11)
    kept, exit_policy.LOGITS_AT_ONCE = exit_policy.LOGITS_AT_ONCE, 2 * 11 * 3  # three states at a time
    try:
        seen = rule.measure(before, after)
    finally:
        exit_policy.LOGITS_AT_ONCE = kept
    expected = torch.nn.functional.kl_div(
        (before @ head).log_softmax(-1), (after @ head).log_softmax(-1), log_target=True, reduction="none"
    )
    torch.testing.assert_close(seen, expected.sum(-1), atol=1e-5, rtol=1e-4)
    assert torch.equal(rule(before, after), (seen < 0.5).float())


def test_a_state_that_is_not_a_number_goes_on() -> None:
    state = torch.full((1, 1, 4), torch.nan)
    assert StateChange(1.0)(state, state).tolist() == [[0.0]]
    assert StateChange(1.0)(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)).tolist() == [[0.0]]


def test_half_precision_is_compared_in_float32() -> None:
    before, after = torch.full((1, 4), 300.0, dtype=torch.float16), torch.full((1, 4), 299.0, dtype=torch.float16)
    assert StateChange(0.1).measure(before, after).tolist() == pytest.approx([1 / 299])


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("transformer", {"exit": "change:0.1"}, "share their weights"),
        ("transformer", {"exit": "kl:0.1"}, "share their weights"),
        ("transformer", {"exit": "cycles:3"}, "the model has 2 layers"),
        ("cosmicfish", {"exit": "kl:0.1"}, "give change:0.1"),
        ("hrm_lm", {"exit": "halt:0.5"}, "does not learn when to stop"),
        ("universal-halting", {"exit": "halt:1.5"}, "above 0 and at most 1"),
        ("hrm_lm", {"exit": "cycles:100000"}, "10,000"),
        ("hrm_lm", {"exit": "change:0.1", "depth": 2}, "exclude each other"),
        ("universal-halting", {"exit": "change:0.1", "halt_threshold": 0.5}, "exclude each other"),
    ],
)
def test_what_a_model_cannot_is_refused(family: str, settings: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        depth_keywords(build(family), **settings)


def test_forward_refuses_what_cannot_be() -> None:
    tokens_BL, rule = torch.zeros(1, 2, dtype=torch.long), StateChange(0.1)
    for family, keywords, told in (
        ("transformer", {}, "share their weights"),
        ("hrm_lm", {"depth": 1}, "exclude each other"),
        ("universal-halting", {"halt_threshold": 0.5}, "exclude each other"),
    ):
        with pytest.raises(UserError, match=told):
            build(family)(tokens_BL, exit=rule, **keywords)
    with pytest.raises(UserError, match="whole texts"):
        build("cosmicfish", halting="sequence")(tokens_BL, exit=rule)


@given(st.text() | st.from_regex(r"(cycles|change|kl|halt|chang):[0-9.e+-]{0,9}", fullmatch=True))
@settings(max_examples=200, derandomize=True)
def test_any_text_is_a_policy_or_a_mistake(text: str) -> None:
    with contextlib.suppress(UserError):
        policy = parse_exit(text)
        assert text.startswith(f"{policy.name}:")
        assert 0 < policy.value == float(text.partition(":")[2]) < float("inf")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("chang:0.1", "did you mean 'change'"),
        ("", "valid: change, cycles, halt, kl"),
        ("change", "such as change:0.1"),
        ("cycles:1.5", "a whole number above 0, such as cycles:4"),
        ("kl:0", "a number above 0"),
        ("kl:-1", "a number above 0"),
        ("kl:inf", "a number above 0"),
        ("kl:nan", "a number above 0"),
    ],
)
def test_mistakes_are_told(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_exit(text)
