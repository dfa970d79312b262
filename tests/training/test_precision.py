"""bfloat16 weights with float32 masters: nothing small is lost, losses stay close, runs resume exactly."""

from pathlib import Path

import pytest
import torch

from hrmlm.checkpoint import WEIGHTS, read_tensors
from hrmlm.models import build_model
from hrmlm.training.precision import computing_copies
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import train
from tests.families import FAMILIES
from tests.training.helpers import FAMILY, Stop, StopAfter, assert_same_run, exits, record, tiny, tiny_trainer, weights
from tests.training.test_accumulation import batch

LOW = {"training.precision": "bfloat16_weights"}


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_follow_float32(family: str) -> None:
    """Of six steps that learn, each loss within 3 % of the one in float32; and it is not float32 that was computed."""
    changes = {"optimizer.lr": 3e-3, "schedule.warmup": 0, "training.steps": 6, "schedule.min_ratio": 1}
    trainers = [tiny_trainer(lambda a, b: [], family, **changes, **low) for low in ({}, LOW)]
    losses = [[trainer.step(step, [batch(16, length=16)]).loss for step in range(1, 7)] for trainer in trainers]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert losses[0][-1] < losses[0][0] - 0.2
    assert {p.dtype for p in trainers[1].model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_a_bfloat16_model(family: str) -> None:
    """Bit for bit: the copies compute what a model that is bfloat16 altogether does."""
    torch.manual_seed(0)
    model = build_model({**FAMILIES[family], "vocab_size": 257})
    other = build_model({**FAMILIES[family], "vocab_size": 257})
    other.load_state_dict(model.state_dict())
    other.to(torch.bfloat16)
    with computing_copies("bfloat16_weights", model):
        for part in model.train().losses(batch(16, length=16)):
            part.objective.backward()
    for part in other.train().losses(batch(16, length=16)):
        part.objective.backward()
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = theirs[name].grad
        if gradient is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        if model.n_passes == 1 and not model.carries_state:  # else several backward passes add up, here in float32
            assert torch.equal(parameter.grad, gradient.float()), name


def test_updates_below_the_resolution_of_bfloat16_add_up() -> None:
    """At a rate of 1e-7 a gain of 1 moves by 1e-7 per step, 40,000 times less than bfloat16 resolves."""
    steps = 50
    changes = {"optimizer.lr": 1e-7, "schedule.warmup": 0, "schedule.min_ratio": 1, "training.steps": steps}
    trainer = tiny_trainer(lambda a, b: [], "transformer", **LOW, **changes)
    before = weights(trainer.model)["norm.weight"]
    for step in range(1, steps + 1):
        trainer.step(step, [batch(8, seed=1)])
    moved = (trainer.model.norm.weight.detach() - before).abs()
    assert float(moved.median()) == pytest.approx(steps * 1e-7, rel=0.5)
    assert torch.equal(before.bfloat16(), trainer.model.norm.weight.bfloat16())


@pytest.mark.parametrize("family", FAMILIES)
def test_resumes_exactly_and_stores_the_masters(family: str, data: Path, tmp_path: Path) -> None:
    recipe = tiny(data, family, **LOW, **exits(family), **{"training.steps": 3, "training.eval_every": 2})
    train(recipe, tmp_path / "straight")
    with pytest.raises(Stop):
        train(recipe, tmp_path / "stopped", reporter=StopAfter(2))
    train(recipe, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")
    stored = read_tensors(RunDirectory(tmp_path / "straight").newest().path / WEIGHTS)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in stored.values())


def test_a_run_goes_on_in_another_precision(data: Path, tmp_path: Path) -> None:
    train(tiny(data), tmp_path / "run")
    assert train(tiny(data, **LOW, **{"training.steps": 8}), tmp_path / "run", resume=True).step == 8
    assert len(record(tmp_path / "run")) == 8


def test_weights_are_put_back_whatever_happens() -> None:
    trainer = tiny_trainer(lambda a, b: [], FAMILY)
    model, before = trainer.model, dict(trainer.model.named_parameters())

    def fail() -> None:
        with computing_copies("bfloat16_weights", model):
            assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert dict(model.named_parameters()).items() == before.items()
    assert isinstance(model.embedding.weight, torch.nn.Parameter)
