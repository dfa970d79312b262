"""Rule 4, and the gradient window: which applications receive gradient, read off the applications themselves."""

import random

import pytest
import torch

from hrmlm.models import LanguageModel
from hrmlm.models.blocks import Application
from tests.families import FAMILIES
from tests.models.helpers import (
    FixedExit,
    build,
    gradients,
    lively_model,
    random_batch,
    reached,
    recorded_calls,
    step,
)

EXITS = [
    name
    for name in FAMILIES
    if "exit_probability" in type(build(name).config).model_fields and not build(name).learns_depth
]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("fresh", [True, False])
def test_every_parameter_gets_a_gradient(name: str, fresh: bool) -> None:
    model = build(name) if fresh else lively_model(name)
    step(model.train(), random_batch(model))
    for parameter_name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.isfinite().all()), parameter_name
        assert bool((parameter.grad != 0).any()), parameter_name


@pytest.mark.parametrize("name", EXITS)
def test_every_parameter_gets_a_gradient_under_exit_sampling(name: str) -> None:
    """Over several steps, which end at every depth."""
    model = build(name)
    if model.trained_depth == 1:
        pytest.skip("has one depth only")
    model = lively_model(name, exit_probability=0.7).train()
    rng, seen = random.Random(0), set()
    for seed in range(30):
        seen |= {partial.depth for partial in step(model, random_batch(model, seed=seed), rng)}
    assert seen == set(range(1, model.trained_depth + 1))
    assert all(bool((gradient != 0).any()) for gradient in gradients(model).values())


@pytest.mark.parametrize("name", EXITS)
def test_an_exit_at_a_depth_is_the_model_of_that_depth(name: str) -> None:
    if build(name).trained_depth == 1:
        pytest.skip("has one depth only")
    model = lively_model(name, exit_probability=0.9)
    batch = random_batch(model)
    for depth in range(1, model.trained_depth):
        partials = list(model.train().losses(batch, FixedExit(depth)))
        with torch.no_grad():
            logits = model.eval()(batch.inputs_BL, depth=depth).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BL.flatten(), reduction="sum")
        torch.testing.assert_close(partials[-1].task_nats, expected, rtol=1e-6, atol=1e-5)
        assert partials[-1].depth == depth
        assert len(partials) == model.n_passes


def _reached_by_application(model: LanguageModel, schedule: list[Application], rng: object) -> dict[str, bool]:
    """Run a training step; whether a gradient arrived at each application, by name. Every supervision pass repeats
    the applications that are not part of a pass's loop, and must treat them alike."""
    with recorded_calls(model) as calls:
        step(model.train(), random_batch(model), rng)
    by_name: dict[str, bool] = {}
    for module in {application.module for application in schedule}:
        expected = [application for application in schedule if application.module == module]
        states = calls[module]
        assert len(states) % len(expected) == 0, f"{module}: {len(states)} calls for {len(expected)} applications"
        for index, state in enumerate(states):
            name = expected[index % len(expected)].name
            assert by_name.setdefault(name, reached(state)) == reached(state)
    return by_name


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_reaches_exactly_the_applications_in_the_window(name: str) -> None:
    model = lively_model(name)
    schedule = model.schedule()
    seen = _reached_by_application(model, schedule, None)
    assert seen == {application.name: application.in_window for application in schedule}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("t", [1, 2, 3])
def test_window_of_two_speed_recurrence(n: int, t: int) -> None:
    """For every K and every depth: fast step m is inside if m > M − K, the slow step of cycle c if c·T > M − K."""
    for k in range(1, n * t + 1):
        exit_probability = 1.0 if n > 1 else 0.0
        shape = {"n_cycles": n, "fast_steps": t, "d_model": 16, "n_heads": 1}
        model = lively_model("hrm_lm", **shape, gradient_window=k, exit_probability=exit_probability)
        for depth in range(1, n + 1):
            total = depth * t
            expected = {"input": True}
            for m in range(1, total + 1):
                expected[f"fast {(m - 1) // t + 1}.{(m - 1) % t + 1}"] = m > total - k
            for c in range(1, depth + 1):
                expected[f"slow {c}"] = c * t > total - k
            schedule = model.schedule(depth)
            assert {application.name: application.in_window for application in schedule} == expected
            if k in (1, t, n * t - 1):  # the rest differs in nothing but numbers
                rng = FixedExit(depth) if depth < n else None
                assert _reached_by_application(model, schedule, rng) == expected


@pytest.mark.parametrize(("m", "k"), [(1, 1), (4, 1), (4, 3), (5, 2), (5, 5)])
def test_window_of_a_flat_loop(m: int, k: int) -> None:
    model = lively_model("universal", n_steps=m, gradient_window=k)
    expected = {f"step {i}": i > m - k for i in range(1, m + 1)}
    assert {application.name: application.in_window for application in model.schedule()} == expected
    assert _reached_by_application(model, model.schedule(), None) == expected
    assert model.gradient_share == k / m


@pytest.mark.parametrize("name", FAMILIES)
def test_the_window_is_for_training_only(name: str) -> None:
    """In evaluation mode gradients flow through all applications (saliency needs them)."""
    model = lively_model(name)
    with recorded_calls(model) as calls:
        model(random_batch(model).inputs_BL).logits.sum().backward()
    assert all(state.requires_grad for states in calls.values() for state in states)
