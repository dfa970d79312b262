"""Training losses: cross-entropy alone, masked targets, used vocabulary, supervision passes."""

import pytest
import torch

from hrmlm.data.batch import IGNORE, Batch
from tests.families import FAMILIES
from tests.models.helpers import build, gradients, lively_model, random_batch, random_tokens, recorded_calls, step


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_is_cross_entropy_of_the_logits(name: str) -> None:
    model = lively_model(name)
    batch = random_batch(model, rows=3, length=9, ignored=2)
    partials = list(model.train().losses(batch))
    counted = [partial for partial in partials if partial.counted]
    with torch.no_grad():
        logits = model.eval()(batch.inputs_BL).logits.double()
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets_BL.flatten(), reduction="sum", ignore_index=IGNORE
    )
    assert sum(float(partial.task_nats) for partial in counted) == pytest.approx(float(expected), rel=1e-6)
    assert sum(partial.n_targets for partial in counted) == 3 * 7
    assert counted[-1] is partials[-1]
    for partial in partials:
        penalty = float(partial.extra["step_cost"]) if model.learns_depth else 0.0
        assert float(partial.objective.detach()) == pytest.approx(float(partial.task_nats) + penalty, rel=1e-6)
        assert partial.objective.requires_grad
        assert not partial.task_nats.requires_grad
        assert partial.depth == model.trained_depth
        assert (partial.extra == {}) == (not model.learns_depth)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_without_targets_is_harmless(name: str) -> None:
    """R10: zero, not zero divided by zero."""
    model = lively_model(name).train()
    for partial in step(model, random_batch(model, length=6, ignored=6)):
        assert float(partial.objective.detach()) == 0.0
        assert partial.n_targets == 0
    assert all(bool((gradient == 0).all()) for gradient in gradients(model).values())


@pytest.mark.parametrize("name", FAMILIES)
def test_sums_over_micro_batches_add_up(name: str) -> None:
    """The objective is a sum over targets: unequal parts of a batch give the gradients of the whole."""
    model = lively_model(name).double().train()
    batch = random_batch(model, rows=3, length=6)
    batch.targets_BL[0, :4] = IGNORE
    step(model, batch)
    whole = gradients(model)
    model.zero_grad()
    for part in batch.split(2):
        step(model, part)
    for name_, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, whole[name_], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_padded_ids_have_no_logit_at_all(name: str) -> None:
    """R08: what can be generated and what perplexity normalises over are the same set of ids."""
    model, used = lively_model(name, used_vocab=50), 50
    full = lively_model(name)
    batch = Batch(random_tokens(model, 2, 6), random_tokens(model, 2, 6, seed=5) % used)
    with torch.no_grad():
        logits, all_logits = model(batch.inputs_BL).logits, full(batch.inputs_BL).logits
    assert logits.shape == (2, 6, used)
    torch.testing.assert_close(logits, all_logits[..., :used], rtol=1e-5, atol=1e-6)
    log_p = logits.double() - logits.double().exp().sum(dim=-1, keepdim=True).log()
    expected = -log_p.gather(-1, batch.targets_BL[..., None]).sum()
    counted = [partial for partial in step(model.train(), batch) if partial.counted]
    assert sum(float(partial.task_nats) for partial in counted) == pytest.approx(float(expected), rel=1e-6)
    unseen = [i for i in range(used, 64) if i not in batch.inputs_BL.unique().tolist()]
    assert unseen
    assert bool((model.embedding.weight.grad[unseen] == 0).all())


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_each_supervision_pass_has_its_own_loss(passes: int) -> None:
    """S passes of N cycles run like one pass of S·N cycles whose gradient stops between passes."""
    model, single = lively_model("hrm_lm", n_passes=passes), lively_model("hrm_lm")
    batch = random_batch(model)
    partials = step(model.train(), batch)
    assert [partial.counted for partial in partials] == [False] * (passes - 1) + [True]
    for p, partial in enumerate(partials, start=1):
        with torch.no_grad():
            logits = single(batch.inputs_BL, depth=2 * p).logits
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BL.flatten(), reduction="sum")
        torch.testing.assert_close(partial.task_nats, nats, rtol=1e-6, atol=1e-5)
    with torch.no_grad():
        evaluated = model.eval()(batch.inputs_BL).logits
    torch.testing.assert_close(evaluated, logits, rtol=0, atol=1e-5)
    total = {name: torch.zeros_like(gradient) for name, gradient in gradients(model).items()}
    for p in range(1, passes + 1):
        windowed = lively_model("hrm_lm", n_cycles=2 * p, gradient_window=4).double().train()
        step(windowed, batch)
        total = {name: gradient + gradients(windowed)[name] for name, gradient in total.items()}
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(
            gradient.double(), total[name], rtol=1e-3, atol=1e-3 * float(total[name].abs().max())
        )


def test_states_are_detached_between_passes() -> None:
    model = lively_model("hrm_lm", n_passes=2).train()
    with recorded_calls(model) as calls:
        losses = model.losses(random_batch(model))
        next(losses).objective.backward()
        first = {module: len(states) for module, states in calls.items()}
        kept = {module: [state.grad.clone() for state in states] for module, states in calls.items()}
        next(losses).objective.backward()
        assert next(losses, None) is None
    for module, states in calls.items():
        assert len(states) == 2 * first[module]
        for state, gradient in zip(states, kept[module], strict=False):
            assert torch.equal(state.grad, gradient), f"{module}: the second pass reached into the first"


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_do_not_depend_on_the_global_generator(name: str) -> None:
    """Without dropout; exit sampling draws from the generator it is given."""
    model = build(name).train()
    state = torch.get_rng_state()
    list(model.losses(random_batch(model)))
    assert torch.equal(state, torch.get_rng_state())
