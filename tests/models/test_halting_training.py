"""Training of learned depth: gradients at every depth, exploration, step cost, precision (R09, R13, O1, O4, O5, O6)."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hrmlm.data.batch import IGNORE, Batch
from hrmlm.models import LanguageModel
from hrmlm.models.blocks import prepare_call
from tests.models.adaptive_reference import flat_loop, two_levels
from tests.models.helpers import build, gradients, lively_model, random_batch, random_tokens, step
from tests.models.reference import cross_entropy_sum
from tests.models.test_halting import ADAPTIVE, each_family, force, run_scripted


class Exploring:
    """Stands for a random generator: every batch explores with this minimum of steps."""

    def __init__(self, minimum: int) -> None:
        self.minimum = minimum

    def random(self) -> float:
        return 0.0

    def randint(self, low: int, high: int) -> int:
        assert low <= self.minimum <= high
        return self.minimum


@pytest.mark.parametrize(("name", "reference"), [("universal-halting", flat_loop), ("cosmicfish", two_levels)])
@pytest.mark.parametrize("logit", [0.0, -1.0, 3.0])
def test_equations_loss_cost_and_all_gradients(name: str, reference: Any, logit: float) -> None:
    model = lively_model(name, step_cost=0.3, epsilon=0.05)
    with torch.no_grad():
        model.halting.q.bias.copy_(torch.tensor([logit, 0.0]))
    model.double()
    batch = random_batch(model, rows=2, length=9, ignored=1)
    weights = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    most = model.trained_depth
    runs = [reference(row, weights, 2, most, 0.05) for row in batch.inputs_BL]
    out = model(batch.inputs_BL)
    assert out.steps_BL.tolist() == [steps for _, steps, _ in runs]
    expected = torch.stack([logits for logits, _, _ in runs])
    torch.testing.assert_close(out.logits.double(), expected, atol=2e-6, rtol=1e-6)
    scored = [reference_cost(reference, row, weights, most) for row in batch.inputs_BL]
    nats = sum(cross_entropy_sum(r[0][1:], t[1:]) for r, t in zip(runs, batch.targets_BL, strict=True))
    loss = nats + 0.3 * sum(scored)
    loss.backward()
    (partial,) = step(model.train(), batch)
    torch.testing.assert_close(partial.task_nats.double(), nats.detach(), atol=0, rtol=1e-6)
    torch.testing.assert_close(partial.objective.double(), loss, atol=0, rtol=1e-6)
    for key, gradient in gradients(model).items():
        wanted = torch.zeros_like(gradient) if weights[key].grad is None else weights[key].grad
        torch.testing.assert_close(gradient, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-5)


def reference_cost(reference: Any, row_L: Tensor, weights: dict[str, Tensor], most: int) -> Tensor:
    """steps + R of the positions after the first: of the whole row, less that of its first token alone."""
    return reference(row_L, weights, 2, most, 0.05)[2] - reference(row_L[:1], weights, 2, most, 0.05)[2]


@each_family
@pytest.mark.parametrize("logit", [6.0, 0.0, -30.0])
def test_gradients_at_every_depth(name: str, logit: float) -> None:
    """O1: stops forced at step 1, in between, and at the last step. The one weight of a position that stops at step 1
    is 1 whatever p is, so there the head learns from exploring batches."""
    model = force(lively_model(name), logit).train()
    batch = random_batch(model)
    for minimum in range(1, model.trained_depth + 1):
        model.zero_grad()
        (partial,) = step(model, batch, Exploring(minimum) if minimum > 1 else None)
        forced = {6.0: 1, -30.0: model.trained_depth}.get(logit)
        if forced:
            number = max(forced, minimum)
            assert int(partial.extra[f"steps_share/{number}"]) == partial.n_targets
        for key, gradient in gradients(model).items():
            if key.startswith("halting") and forced == 1 and minimum == 1:
                assert bool((gradient == 0).all())
            elif key.startswith("steps."):  # vectors of steps that were not executed
                assert bool((gradient != 0).any())
            else:
                assert bool((gradient != 0).any()), f"{key} at minimum {minimum}"


@pytest.mark.parametrize("better", [True, False])
def test_exploration_tells_a_collapsed_head_whether_depth_pays(better: bool) -> None:
    """All stop at step 1. States grow by 1 with every step; where more is better, p is pulled down, else up."""
    for minimum in (1, 2, 4):
        p_SBL = torch.full((5, 2, 3), 0.995, requires_grad=True)
        output, _, _ = run_scripted(p_SBL, (torch.zeros(2, 3, 1),), minimum_steps=minimum)
        (output if better else -output).sum().neg().backward()
        before = p_SBL.grad[: minimum - 1]
        assert bool(((before > 0) if better else (before < 0)).all())
        assert bool((p_SBL.grad[minimum - 1 :] == 0).all()), "the last weight is what is left"


@each_family
def test_training_and_evaluation_stop_at_the_same_steps(name: str) -> None:
    """O4: without exploration and dropout."""
    model = lively_model(name)
    tokens_BL = random_tokens(model, 3, 10)
    seen = [model.train(mode)(tokens_BL) for mode in (True, False)]
    assert torch.equal(seen[0].steps_BL, seen[1].steps_BL)
    assert torch.equal(seen[0].logits, seen[1].logits)


@each_family
def test_exploration_draws_from_the_given_generator_only(name: str) -> None:
    model = build(name, exploration=0.3)
    rng, drawn = random.Random(0), []
    before = torch.get_rng_state(), random.getstate()
    for _ in range(1000):
        call = prepare_call(1, 1, 2, 1e4, torch.device("cpu"), None)
        model.prepare_training(call, rng)
        drawn.append(call.minimum_steps)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    explored = [minimum for minimum in drawn if minimum > 1]
    assert 0.25 < len(explored) / 1000 < 0.35
    assert set(explored) == set(range(2, model.trained_depth + 1))
    for share, kinds in ((0.0, {1}), (1.0, set(range(2, model.trained_depth + 1)))):
        model = build(name, exploration=share)
        drawn = []
        for _ in range(60):
            call = prepare_call(1, 1, 2, 1e4, torch.device("cpu"), None)
            model.prepare_training(call, rng)
            drawn.append(call.minimum_steps)
        assert set(drawn) == kinds
    partial = step(lively_model(name).train(), random_batch(model), Exploring(3))[0]
    assert all(int(key.split("/")[1]) >= 3 for key in partial.extra if key.startswith("steps_share/"))
    none = build(name, exploration=1.0)
    call = prepare_call(1, 1, 2, 1e4, torch.device("cpu"), None)
    none.prepare_training(call, None)
    assert call.minimum_steps == 1


@each_family
def test_step_cost_follows_its_derivative(name: str) -> None:
    """Numerically, in float64, through R: away from the places where a position changes its number of steps."""
    model = lively_model(name, step_cost=1.0).double().train()
    batch = random_batch(model)

    def cost() -> tuple[Tensor, Tensor]:
        call = model.prepare(batch.inputs_BL)
        list(model.states(batch.inputs_BL, call))
        return call.step_cost_BL.sum(), call.steps_BL

    value, steps = cost()
    assert len(steps.unique()) > 1
    value.backward()
    checked = 0
    for key, parameter in model.named_parameters():
        if parameter.grad is None or not (
            key.startswith("halting") or "norm_mlp" in key or key.endswith("down.weight")
        ):
            continue
        index = int(parameter.grad.abs().argmax())
        slope, results = float(parameter.grad.flatten()[index]), []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.view(-1)[index] += sign * 1e-6
                results.append(cost())
                parameter.view(-1)[index] -= sign * 1e-6
        if torch.equal(results[0][1], steps) and torch.equal(results[1][1], steps):
            numeric = float(results[0][0] - results[1][0]) / 2e-6
            assert numeric == pytest.approx(slope, rel=1e-4, abs=1e-6), key
            checked += slope != 0
    assert checked >= 3


@each_family
def test_costs_are_sums_over_target_positions(name: str) -> None:
    """R09, O5: positions without a target cost nothing, and unequal parts add up."""
    model = lively_model(name, step_cost=0.1).double().train()
    tokens_BL, targets_BL = random_tokens(model, 3, 8), random_tokens(model, 3, 8, seed=5)
    targets_BL[0, 1:], targets_BL[1, :7] = IGNORE, IGNORE
    batch = Batch(tokens_BL, targets_BL)
    (partial,) = step(model, batch)
    whole = gradients(model)
    scored = targets_BL != IGNORE
    with torch.no_grad():
        steps_BL = model(tokens_BL).steps_BL
    assert int(partial.extra["steps"]) == int(steps_BL[scored].sum())
    for number in range(1, model.trained_depth + 1):
        share = int(partial.extra.get(f"steps_share/{number}", 0))
        assert share == int((steps_BL[scored] == number).sum())
    objective = float(partial.objective.detach())
    assert objective == pytest.approx(float(partial.task_nats) + float(partial.extra["step_cost"]), rel=1e-6)
    assert not partial.extra["step_cost"].requires_grad
    model.zero_grad()
    parts = [step(model, Batch(tokens_BL[i : i + 1], targets_BL[i : i + 1]))[0] for i in range(3)]
    assert sum(float(part.extra["step_cost"]) for part in parts) == pytest.approx(float(partial.extra["step_cost"]))
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, whole[key], rtol=1e-5, atol=1e-9)


@each_family
@pytest.mark.parametrize("logit", [0.0, 1.0])
def test_target_depth_pulls_from_both_sides(name: str, logit: float) -> None:
    """Below the target the head is pushed towards longer thinking, above it towards shorter."""

    def pull(**options: Any) -> tuple[float, float]:
        model = force(lively_model(name, step_cost=1.0, **options), logit).train()
        batch = random_batch(model)
        call = model.prepare(batch.inputs_BL)
        list(model.states(batch.inputs_BL, call))
        penalty, _ = model.penalties(call, batch.targets_BL != IGNORE)
        penalty.backward()
        return float(model.halting.q.bias.grad[0]), float(penalty.detach())

    shorter, cost = pull()
    most = build(name).trained_depth
    mean = cost / random_batch(build(name)).n_targets
    assert 2 < mean < most
    assert shorter < 0, "descent raises the logit to halt"
    above, below = pull(target_depth=2.0), pull(target_depth=float(most))
    assert above[0] == pytest.approx(shorter)
    assert below[0] == pytest.approx(-shorter)
    assert below[1] == pytest.approx((most - mean) * random_batch(build(name)).n_targets, rel=1e-5)


@each_family
def test_halting_is_computed_in_float32(name: str) -> None:
    model = lively_model(name)
    seen: list[Tensor] = []
    model.halting.q.register_forward_hook(lambda _m, _i, out: seen.append(out))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(random_tokens(model, 1, 5))
    assert seen
    assert {q.dtype for q in seen} == {torch.float32}
    assert out.logits.dtype == torch.float32
    seen.clear()
    model.to(torch.bfloat16)(random_tokens(model, 1, 5))
    assert {q.dtype for q in seen} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        (partial,) = step(lively_model(name).train(), random_batch(model))
    assert bool(partial.objective.isfinite())


@each_family
def test_nothing_keeps_a_graph_without_gradients(name: str) -> None:
    """O6: not the result, and not the cache either."""
    model = lively_model(name)
    cache = model.new_cache(1, 20)
    with torch.no_grad():
        for token in range(20):
            out = model(torch.tensor([[token]]), cache=cache)
            assert not out.logits.requires_grad
    assert not cache.keys[-1].requires_grad


def test_all_families_with_halting_are_here() -> None:
    kinds: set[type[LanguageModel]] = {type(build(name)) for name in ADAPTIVE}
    assert len(kinds) == 3
