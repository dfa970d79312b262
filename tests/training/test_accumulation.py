"""Several micro-batches are one batch (R09); what has no targets teaches nothing and harms nothing (R10)."""

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F

from hrmlm.data.batch import IGNORE, Batch
from hrmlm.training.trainer import StepResult, Trainer
from tests.families import FAMILIES
from tests.training.helpers import tiny_trainer, weights

EACH = pytest.mark.parametrize("family", FAMILIES)


def batch(targets: int, rows: int = 1, length: int = 50, seed: int = 0) -> Batch:
    """Random ids of which only the last `targets` positions of each row are scored."""
    generator = torch.Generator().manual_seed(seed)
    ids_BL = torch.randint(0, 257, (rows, length + 1), generator=generator)
    targets_BL = ids_BL[:, 1:].clone()
    targets_BL[:, : length - targets] = IGNORE
    return Batch(ids_BL[:, :-1].contiguous(), targets_BL)


def joined(batches: Iterable[Batch]) -> Batch:
    batches = list(batches)
    return Batch(torch.cat([b.inputs_BL for b in batches]), torch.cat([b.targets_BL for b in batches]))


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def no_batches(start: int, stop: int) -> Iterable[Batch]:
    return []


def step(batches: list[Batch], family: str, chunk: int | None = None) -> tuple[Trainer, StepResult]:
    """One step without dropout and clipping."""
    trainer = tiny_trainer(no_batches, family, **{"optimizer.clip": 1e9, "training.loss_chunk": chunk})
    return trainer, trainer.step(1, batches)


@EACH
def test_unequal_micro_batches_equal_one_batch_of_all_their_tokens(family: str) -> None:
    parts = [batch(1, seed=1), batch(7, seed=2), batch(50, seed=3)]
    many, result = step(parts, family)
    one, expected = step([joined(parts)], family)
    ours, theirs = gradients(many), gradients(one)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() <= 1e-5 * theirs[name].norm() + 1e-9, name
    assert result.targets == expected.targets == 58
    assert result.tokens == expected.tokens == 150
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)


@EACH
def test_reported_loss_is_the_cross_entropy_per_target(family: str) -> None:
    parts = [batch(3, rows=2, seed=1), batch(20, seed=2)]
    trainer = tiny_trainer(no_batches, family)
    everything = joined([batch(3, rows=2, seed=1), batch(20, seed=2)])
    with torch.no_grad():
        logits_BLV = trainer.model.eval()(everything.inputs_BL).logits.double()
    trainer.model.train()
    expected = F.nll_loss(
        logits_BLV.log_softmax(-1).flatten(0, 1), everything.targets_BL.flatten(), ignore_index=IGNORE
    )
    result = trainer.step(1, parts)
    assert result.targets == 26
    assert result.loss == pytest.approx(float(expected), rel=1e-5)


def test_ten_micro_batches_with_accumulation_4_are_three_updates() -> None:
    """An incomplete last window is used, not thrown away."""
    trainer = tiny_trainer(
        lambda start, stop: [batch(50, seed=index) for index in range(start, min(stop, 10))],
        **{"training.accumulation": 4, "training.steps": 3},
    )
    results = list(trainer.steps())
    assert [result.targets for result in results] == [200, 200, 100]
    assert all(result.updated for result in results)
    assert {int(s["step"]) for s in trainer.optimizer.state.values()} == {3}


@EACH
@pytest.mark.parametrize("chunk", [None, 16])  # chunks of 16: some without any target in the first part
def test_micro_batch_without_targets_changes_nothing(family: str, chunk: int | None) -> None:
    parts = [batch(7, seed=1), batch(50, seed=2)]
    plain, _ = step(parts, family, chunk)
    with_masked, result = step([parts[0], batch(0, seed=3), parts[1]], family, chunk)
    # Dropout is off, so that the place of a micro-batch in the step does not matter.
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradient, gradients(with_masked)[name])
    assert with_masked.progress.batches_without_targets == 1
    assert result.targets == 57


@EACH
@pytest.mark.parametrize("frugal", [False, True])
def test_step_without_targets_changes_nothing(family: str, frugal: bool) -> None:
    changes = {"training.loss_chunk": 16, "training.checkpoint_activations": True} if frugal else {}
    trainer = tiny_trainer(no_batches, family, **{"optimizer.weight_decay": 0.5, **changes})
    trainer.step(1, [batch(50)])
    before = weights(trainer.model), {k: v.clone() for k, v in trainer.optimizer_state().items()}
    result = trainer.step(2, [batch(0, seed=1), batch(0, seed=2)])
    after = weights(trainer.model), trainer.optimizer_state()
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert (result.updated, result.targets, trainer.progress.batches_without_targets) == (False, 0, 2)
    assert trainer.step(3, [batch(50, seed=3)]).updated
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_step_without_targets_in_a_run_is_recorded(data, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from hrmlm.data.tokens import TokenWindows
    from hrmlm.training.train import train
    from tests.training.helpers import record, tiny

    item = TokenWindows.__getitem__

    def masked(self: TokenWindows, index: int) -> Batch:
        made = item(self, index)
        return Batch(made.inputs_BL, torch.full_like(made.targets_BL, IGNORE)) if index == 2 else made

    monkeypatch.setattr(TokenWindows, "__getitem__", masked)
    train(tiny(data), tmp_path / "run")
    lines = record(tmp_path / "run")
    assert [line["loss"] is None for line in lines] == [False, False, True, False, False, False]
    assert [line["batches_without_targets"] for line in lines] == [0, 0, 1, 1, 1, 1]
