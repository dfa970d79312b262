"""Learned depth: weights, independence of rows and positions, decoding without stopped tokens (R33, R35, R41)."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from hrmlm.errors import UserError
from hrmlm.models import LanguageModel
from hrmlm.models.blocks import ForwardCall, States, prepare_call
from hrmlm.models.halting import HaltingHead, LearnedHalting, run_adaptive
from tests.families import FAMILIES
from tests.models.helpers import build, lively_model, random_tokens, recorded_calls
from tests.models.test_causality import check_causal

ADAPTIVE = [name for name in FAMILIES if build(name).learns_depth]
STEPS = {"universal": "n_steps", "cosmicfish": "max_steps", "memory_hrm": "iterations"}
each_family = pytest.mark.parametrize("name", ADAPTIVE)


def force(model: LanguageModel, logit: float) -> LanguageModel:
    """Every position halts with probability σ(logit), whatever its state."""
    with torch.no_grad():
        model.halting.q.weight.zero_()
        model.halting.q.bias.copy_(torch.tensor([logit, 0.0]))
    return model


@torch.no_grad()
def deep_model(name: str) -> LanguageModel:
    """A lively model of up to 8 steps, whose head lets single tokens take 1, 3, 7 and 8 of them, and others."""
    model = lively_model(name, **{STEPS[FAMILIES[name]["family"]]: 8}).double()
    generator = torch.Generator().manual_seed(0)
    model.halting.q.bias.copy_(torch.tensor([-2.5, 0.0]))
    for _ in range(200):
        model.halting.q.weight.normal_(std=0.7, generator=generator)
        if {1, 3, 7, 8} <= set(model(torch.arange(64)[:, None]).steps_BL.unique().tolist()):
            return model
    raise AssertionError("no such head found")


def core_modules(model: LanguageModel) -> dict[str, int]:
    """Modules inside the adaptive loop, with their calls per outer step."""
    counts = [{}, {}]
    for depth in (1, 2):
        for application in model.schedule(depth):
            counts[depth - 1][application.module] = counts[depth - 1].get(application.module, 0) + 1
    return {name: counts[1][name] - n for name, n in counts[0].items() if counts[1][name] > n}


class Script(HaltingHead):
    """Gives scripted halting probabilities (B, L) instead of reading states."""

    def __init__(self, p_SBL: Tensor) -> None:
        super().__init__(2)
        self.script = iter(p_SBL)

    def forward(self, state_BLD: Tensor) -> Tensor:
        return next(self.script)


class Adding:
    """A model whose cycle adds a number to its states; remembers what every cycle was given."""

    def __init__(self, number: float) -> None:
        self.number = number
        self.given: list[Tensor] = []

    def cycle(self, index: int, states: States, call: ForwardCall) -> States:
        self.given.append(states[0])
        return tuple(state + self.number for state in states)

    def read(self, states: States) -> Tensor:
        return states[0]


def run_scripted(p_SBL: Tensor, states: tuple[Tensor, ...], threshold: float = 0.99, **changes: object) -> tuple:
    """run_adaptive with a model that adds 1; the output, the call, and the states that every step was given."""
    S, B, L = p_SBL.shape
    call = prepare_call(B, L, 2, 1e4, torch.device("cpu"), None)
    for key, value in changes.items():
        setattr(call, key, value)
    model = Adding(1)
    rule = LearnedHalting(Script(p_SBL), threshold)
    return run_adaptive(model, states, rule, call, S, (0, 1)), call, model.given


@pytest.mark.parametrize("minimum", [1, 2, 5, 7])
def test_weights_sum_to_one(minimum: int) -> None:
    """The output of a state that is 1 at every step is the sum of the weights; also with sums near the threshold."""
    p_SBL = torch.rand(7, 40, 50) ** 2
    p_SBL[0, :5], p_SBL[1, 5:10], p_SBL[:, 10:20] = 0.99, 0.989, 0.0
    call = prepare_call(40, 50, 2, 1e4, torch.device("cpu"), None)
    call.minimum_steps = minimum
    ones = torch.ones(40, 50, 3)
    output = run_adaptive(Adding(0), (ones,), LearnedHalting(Script(p_SBL), 0.99), call, 7, (0, 1))
    torch.testing.assert_close(output, ones, atol=1e-6, rtol=0)
    steps = set(call.steps_BL.unique().tolist())
    assert steps == set(range(minimum, 8))


def test_the_rule_by_hand() -> None:
    """p = 0.5, 0.3, 0.9: stops at step 3 with weights 0.5, 0.3 and R = 0.2."""
    start = torch.zeros(1, 3, 2)
    p_SBL = torch.tensor([[[0.5, 0.995, 0.1]], [[0.3, 0.5, 0.1]], [[0.9, 0.5, 0.1]], [[0.9, 0.5, 0.1]]])
    output, call, given = run_scripted(p_SBL, (start,))
    assert call.steps_BL.tolist() == [[3, 1, 4]]
    torch.testing.assert_close(call.step_cost_BL, torch.tensor([[3.2, 2.0, 4.7]]))
    torch.testing.assert_close(output[0, :, 0], torch.tensor([0.5 + 0.6 + 0.6, 1.0, 0.1 + 0.2 + 0.3 + 4 * 0.7]))
    assert [state[0, :, 0].tolist() for state in given] == [[0, 0, 0], [1, 1, 1], [2, 1, 2], [3, 1, 3]], "frozen"
    assert torch.equal(start, torch.zeros(1, 3, 2)), "nothing is changed in place"
    fixed, call, given = run_scripted(p_SBL, (start,), depth=3)
    assert len(given) == 3
    assert call.steps_BL.tolist() == [[3, 3, 3]]
    assert torch.equal(fixed, start + 3), "a fixed depth gives its last state"
    explored, call, _ = run_scripted(p_SBL, (start,), minimum_steps=3)
    assert call.steps_BL.tolist() == [[3, 4, 4]]
    torch.testing.assert_close(explored[0, 0, 0], torch.tensor(0.5 / 4 + 2 * 0.3 / 4 + 3 * 0.8), msg="a quarter counts")


@each_family
@torch.no_grad()
def test_two_forwards_are_identical(name: str) -> None:
    model = lively_model(name)
    tokens_BL = random_tokens(model, 2, 12)
    first = model(tokens_BL)
    kept = first.steps_BL.clone()
    second, third = model(tokens_BL), model(tokens_BL[:, :5])
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(kept, second.steps_BL)
    assert torch.equal(kept, first.steps_BL), "a later call leaves the earlier result alone"
    assert torch.equal(kept[:, :5], third.steps_BL)
    assert len(kept.unique()) > 1


@each_family
def test_a_head_that_reads_a_mean_over_positions_is_caught(name: str) -> None:
    """R32: by the very check that the family passes, with and without a cache."""
    model = deep_model(name)
    tokens_BL, later_BL = random_tokens(model, 2, 11, seed=3), random_tokens(model, 2, 11, seed=4)
    for chunks in (None, [11], [1] * 11):
        check_causal(model, tokens_BL, 5, later_BL, chunks=chunks)
    run = nn.Linear.forward
    head = model.halting.q

    def pooled(x_BLD: Tensor) -> Tensor:
        return run(head, x_BLD.mean(dim=1, keepdim=True).expand_as(x_BLD))

    head.forward = pooled
    with pytest.raises(AssertionError, match=r"steps_BL|logits"):
        check_causal(model, tokens_BL, 5, later_BL)


def _rows_that_stop_at(model: LanguageModel, wanted: tuple[int, ...]) -> Tensor:
    """Single tokens (B, 1) that take these numbers of steps."""
    steps = model(torch.arange(64)[:, None]).steps_BL[:, 0].tolist()
    return torch.tensor([[steps.index(number)] for number in wanted])


@each_family
@torch.no_grad()
def test_rows_that_stop_at_1_3_7_and_never(name: str) -> None:
    """R35: alone, together, in any order, with padding: same outputs and steps."""
    model = deep_model(name)
    first_B1 = _rows_that_stop_at(model, (1, 3, 7, 8))
    tokens_BL = torch.cat([first_B1, random_tokens(model, 4, 6)], dim=1)
    lengths = [1, 7, 4, 2]
    alone = [model(tokens_BL[row : row + 1, :length]) for row, length in enumerate(lengths)]
    assert [int(out.steps_BL[0, 0]) for out in alone] == [1, 3, 7, 8]
    for order in itertools.permutations(range(4)):
        lengths_B = torch.tensor([lengths[row] for row in order])
        out = model(tokens_BL[list(order)], lengths_B=lengths_B)
        for place, row in enumerate(order):
            torch.testing.assert_close(out.logits[place, : lengths[row]], alone[row].logits[0], atol=1e-5, rtol=0)
            assert torch.equal(out.steps_BL[place, : lengths[row]], alone[row].steps_BL[0])


@each_family
@pytest.mark.parametrize("chunk", [1, 3, 12])
@torch.no_grad()
def test_cached_equals_full_while_rows_stop_at_different_steps(name: str, chunk: int) -> None:
    model = deep_model(name)
    tokens_BL = torch.cat([_rows_that_stop_at(model, (1, 3, 7, 8)), random_tokens(model, 4, 11)], dim=1)
    full = model(tokens_BL)
    assert any(len(set(column)) > 1 for column in full.steps_BL.T.tolist())
    cache = model.new_cache(4, 12)
    parts = [model(part, cache=cache) for part in tokens_BL.split(chunk, dim=1)]
    torch.testing.assert_close(torch.cat([part.logits for part in parts], dim=1), full.logits, atol=1e-5, rtol=0)
    assert torch.equal(torch.cat([part.steps_BL for part in parts], dim=1), full.steps_BL)


@each_family
@torch.no_grad()
def test_decoding_computes_what_runs_and_nothing_else(name: str) -> None:
    """Rows computed in the core = steps executed; keys and values behind a stop are copies of the last ones."""
    model = deep_model(name)
    tokens_B1 = _rows_that_stop_at(model, (1, 3, 7, 8))
    cache = model.new_cache(4, 4)
    with recorded_calls(model) as calls:
        steps = model(tokens_B1, cache=cache).steps_BL[:, 0].tolist()
    assert steps == [1, 3, 7, 8]
    for module, per_step in core_modules(model).items():
        assert [len(state) for state in calls[module]][::per_step] == [4, 3, 3, 2, 2, 2, 2, 1]
        assert sum(len(state) for state in calls[module]) == sum(steps) * per_step
    stride = sum(core_modules(model).values())
    first = cache.n_slots - 8 * stride
    for tensors in (cache.keys, cache.values):
        by_step = torch.stack(tensors[first:]).unflatten(0, (8, stride))[:, :, :, :, 0]
        for row, stop in enumerate(steps):
            for later in range(stop, 8):
                assert torch.equal(by_step[later, :, row], by_step[stop - 1, :, row])
            assert not any(torch.equal(by_step[s, :, row], by_step[s - 1, :, row]) for s in range(1, stop))


@each_family
@torch.no_grad()
def test_a_full_forward_ends_with_its_slowest_position(name: str) -> None:
    model = force(build(name), 10.0)
    with recorded_calls(model) as calls:
        assert bool((model(random_tokens(model, 2, 5)).steps_BL == 1).all())
    for module, per_step in core_modules(model).items():
        assert len(calls[module]) == per_step


@each_family
@torch.no_grad()
def test_a_fixed_depth_runs_exactly_so_many_steps(name: str) -> None:
    """R41: counted; with the trained head, and with one that would stop at once."""
    for model in (lively_model(name), force(lively_model(name), 10.0)):
        for depth in (1, 2, model.trained_depth):
            for cache in (None, model.new_cache(2, 5, depth=depth)):
                with recorded_calls(model) as calls:
                    out = model(random_tokens(model, 2, 5), depth=depth, cache=cache)
                assert bool((out.steps_BL == depth).all())
                assert all(len(calls[m]) == n * depth for m, n in core_modules(model).items())
    for bad in (0, -1):
        with pytest.raises(UserError, match=f"depth {bad}"):
            model(random_tokens(model, 1, 2), depth=bad)


@each_family
@torch.no_grad()
def test_a_lower_threshold_stops_sooner(name: str) -> None:
    """Never later for a token alone, whose context does not change."""
    model = deep_model(name)
    tokens_B1 = torch.arange(64)[:, None]
    steps = [model(tokens_B1, halt_threshold=x).steps_BL for x in (0.01, 0.3, 0.6, 0.9, 0.99, 1.0)]
    for lower, higher in itertools.pairwise(steps):
        assert bool((lower <= higher).all())
    assert float(steps[0].double().mean()) < float(steps[2].double().mean()) < float(steps[5].double().mean())
    assert torch.equal(steps[4], model(tokens_B1).steps_BL), "0.99 is the trained one"
    for bad in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(UserError, match="above 0 and at most 1"):
            model(tokens_B1, halt_threshold=bad)
    with pytest.raises(UserError, match="give one of them"):
        model(tokens_B1, halt_threshold=0.5, depth=2)


def test_models_of_fixed_depth_have_no_threshold() -> None:
    model = build("universal")
    with pytest.raises(UserError, match="does not learn when to stop"):
        model(random_tokens(model, 1, 2), halt_threshold=0.5)
    assert model(random_tokens(model, 1, 2)).steps_BL is None


@each_family
@torch.no_grad()
def test_statistics_of_stopped_positions_are_zero(name: str) -> None:
    model = deep_model(name)
    out = model(random_tokens(model, 2, 6), stats=True)
    schedule = model.schedule()
    assert [record.name for record in out.stats] == [application.name for application in schedule]
    steps = out.steps_BL
    for record in out.stats:
        if record.name.startswith("step "):
            ran = steps >= int(record.name.split()[1])
            assert torch.equal(record.rms_BL > 0, ran)
