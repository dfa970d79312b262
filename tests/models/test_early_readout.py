"""Distillation from the last readout to an earlier one: its value, its gradient, its window, what it refuses."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hrmlm.data.batch import IGNORE
from hrmlm.errors import UserError
from hrmlm.models import LanguageModel, model_config
from hrmlm.models.early_readout import exit_loss
from tests.families import FAMILIES
from tests.models.helpers import (
    build,
    gradients,
    lively_model,
    random_batch,
    reached,
    recorded_calls,
    step,
)

WEIGHT, EVERY = 0.5, 2
SETTINGS = {"exit_weight": WEIGHT, "exit_every": EVERY}


def _distils(name: str) -> bool:
    model = build(name)
    known = "exit_weight" in type(model.config).model_fields
    return known and model.trained_depth > 1 and model.n_passes == 1 and not model.learns_depth


DISTILS = [name for name in FAMILIES if _distils(name)]
each = pytest.mark.parametrize("name", DISTILS)


class Chosen:
    """Stands for a random generator: always the same smaller depth, then the same first position."""

    def __init__(self, depth: int, offset: int) -> None:
        self.answers = [depth, offset]

    def random(self) -> float:
        """Above every probability of ending the step early."""
        return 1.0

    def randint(self, low: int, high: int) -> int:
        """The next answer, which must be one that can be drawn."""
        answer = self.answers.pop(0)
        assert low <= answer <= high
        return answer


def expected_divergence(last: Tensor, early: Tensor, scored_BL: Tensor, offset: int) -> Tensor:
    """Written out position by position, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(scored_BL.shape[0]):
        for place in range(offset, scored_BL.shape[1], EVERY):
            if scored_BL[row, place]:
                p, q = last[row, place].double().softmax(-1), early[row, place].double().softmax(-1)
                total = total + EVERY * (p * (p / q).log()).sum()
    return total


@each
def test_value(name: str) -> None:
    """The divergence of two plain forward passes, beside the cross-entropy and never in it."""
    model = lively_model(name, **SETTINGS)
    batch = random_batch(model, rows=3, length=9, ignored=2)
    with torch.no_grad():
        last = model(batch.inputs_BL).logits
    (plain,) = model.train().losses(batch)
    for depth in range(1, model.trained_depth):
        with torch.no_grad():
            early = model.eval()(batch.inputs_BL, depth=depth).logits
        for offset in range(EVERY):
            (partial,) = model.train().losses(batch, Chosen(depth, offset))
            expected = float(expected_divergence(last, early, batch.targets_BL != IGNORE, offset))
            assert expected > 0.01
            assert float(partial.extra["exit_divergence"]) == pytest.approx(expected, rel=1e-4)
            assert float(partial.objective.detach() - plain.objective.detach()) == pytest.approx(
                WEIGHT * expected, rel=1e-3, abs=1e-3
            )
            assert torch.equal(partial.task_nats, plain.task_nats)
            assert (partial.depth, partial.n_targets) == (model.trained_depth, 3 * 7)
            assert not partial.extra["exit_divergence"].requires_grad


@each
@pytest.mark.parametrize("window", ["all", "one step"])
def test_gradient(name: str, window: str) -> None:
    """That of the cross-entropy, plus that of a training pass which ends at the smaller depth and is pulled to fixed
    probabilities. With a window of one step every earlier readout lies before it, and has a window of its own."""
    model = build(name)
    size = model.config.total_steps if window == "all" else 1
    if getattr(model.config, "readout", None) == "fast" and window != "all":
        pytest.skip("this readout needs a larger window")
    model = lively_model(name, **SETTINGS, gradient_window=size).double().train()
    batch = random_batch(model, length=6, ignored=1)
    scored_BL = batch.targets_BL != IGNORE
    with torch.no_grad():
        last = model(batch.inputs_BL).logits
    for depth in range(1, model.trained_depth):
        model.zero_grad()
        step(model, batch, Chosen(depth, 1))
        ours = gradients(model)
        model.zero_grad()
        step(model, batch)
        early = model(batch.inputs_BL, depth=depth).logits
        (WEIGHT * expected_divergence(last, early, scored_BL, 1)).backward()
        for parameter, gradient in gradients(model).items():
            torch.testing.assert_close(ours[parameter], gradient, rtol=1e-4, atol=1e-5)


def _reached(model: LanguageModel, rng: object) -> dict[str, bool]:
    """Whether a gradient arrived at each application, by name."""
    with recorded_calls(model) as calls:
        step(model.train(), random_batch(model), rng)
    return {item.name: reached(calls[item.module].pop(0)) for item in model.schedule()}


@pytest.mark.parametrize("name", ["hrm_lm", "universal"])
def test_windows(name: str) -> None:
    """An early readout inside the window shares it; one before it has a window of the same length that ends there."""
    shape = {"hrm_lm": {"n_cycles": 4}, "universal": {"n_steps": 6}}[name]
    for k in range(1, build(name, **shape).config.total_steps + 1):
        model = lively_model(name, **shape, **SETTINGS, gradient_window=k)
        full = {item.name: item.in_window for item in model.schedule()}
        assert _reached(model, None) == full
        for depth in range(1, model.trained_depth):
            early = {item.name: item.in_window for item in model.schedule(depth)}
            shares = full[model.schedule(depth)[-1].name]
            expected = {item: inside or (not shares and early.get(item, False)) for item, inside in full.items()}
            assert _reached(model, Chosen(depth, 0)) == expected, (k, depth)
            assert sum(expected.values()) > sum(full.values()) or shares


@each
def test_a_batch_without_targets_is_harmless(name: str) -> None:
    model = lively_model(name, **SETTINGS).train()
    (partial,) = step(model, random_batch(model, length=6, ignored=6), Chosen(1, 0))
    assert float(partial.objective.detach()) == float(partial.extra["exit_divergence"]) == 0.0
    assert all(bool((gradient == 0).all()) for gradient in gradients(model).values())


@each
def test_every_smaller_depth_and_position_is_drawn(name: str) -> None:
    model = lively_model(name, **SETTINGS).train()
    batch = random_batch(model, length=4)
    values = {
        (depth, offset): float(next(model.losses(batch, Chosen(depth, offset))).extra["exit_divergence"])
        for depth in range(1, model.trained_depth)
        for offset in range(EVERY)
    }
    seen = {float(next(model.losses(batch, random.Random(seed))).extra["exit_divergence"]) for seed in range(40)}
    assert seen == set(values.values())
    assert len(seen) == len(values)


def test_steps_that_end_early_have_no_divergence() -> None:
    model = lively_model("hrm_lm", **SETTINGS, exit_probability=0.5).train()
    seen = set()
    for seed in range(20):
        (partial,) = model.losses(random_batch(model), random.Random(seed))
        seen.add((partial.depth, "exit_divergence" in partial.extra))
    assert seen == {(1, False), (2, True)}


@settings(max_examples=40, deadline=None)
@given(every=st.integers(1, 6), length=st.integers(1, 9), seed=st.integers(0, 1000))
def test_positions_add_up(every: int, length: int, seed: int) -> None:
    """The mean over all first positions is the divergence over all scored positions, and it is 0 of equal readouts."""
    generator = torch.Generator().manual_seed(seed)
    early, last = (torch.randn(2, length, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    scored = torch.rand(2, length, generator=generator) < 0.7

    def divergence(early_BLV: torch.Tensor, every: int, offset: int) -> torch.Tensor:
        compared = slice(offset, None, every)
        loss = exit_loss(lambda state: state, last[:, compared], scored[:, compared], every)
        return loss(early_BLV[:, compared].flatten(0, 1), slice(None))[0]

    sums = [divergence(early, every, offset) for offset in range(every)]
    torch.testing.assert_close(torch.stack(sums).mean(), divergence(early, 1, 0))
    assert float(divergence(last, every, 0)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"n_passes": 2, "exit_weight": 1.0}, "exit_weight with 2 passes.*use exit_probability"),
        ({"n_cycles": 1, "exit_weight": 1.0}, "exit_weight needs at least 2 cycles"),
        ({"exit_probability": 1.0, "exit_weight": 1.0}, "exit_weight without effect"),
        ({"exit_every": 2}, "exit_every without effect"),
        ({"exit_weight": -1.0}, "greater than or equal to 0"),
        ({"exit_weight": float("inf")}, "finite"),
        ({"exit_weight": 1.0, "exit_every": 0}, "greater than 0"),
        ({"family": "universal", "n_steps": 1, "exit_weight": 1.0}, "exit_weight needs at least 2 steps"),
        ({"family": "universal", "halting": "token", "exit_weight": 1.0}, "exit_weight with halting"),
    ],
)
def test_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        model_config({"family": "hrm_lm", **changes})
    assert "\n" not in str(caught.value)
