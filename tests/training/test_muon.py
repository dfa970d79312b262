"""Muon for the matrices of the blocks: which they are, what one step does, and that a run resumes with it."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hrmlm.errors import UserError
from hrmlm.models import build_model
from hrmlm.training.optimizer import Together, build_optimizer, parameter_groups
from hrmlm.training.recipe import OptimizerConfig
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import train
from tests.families import FAMILIES
from tests.training.helpers import Stop, StopAfter, assert_same_run, state, tiny, tiny_trainer, weights
from tests.training.test_accumulation import batch

MUON = {"optimizer.kind": "muon"}


@pytest.mark.parametrize("family", FAMILIES)
def test_muon_gets_the_matrices_inside_blocks_and_cells(family: str) -> None:
    """By name: what multiplies activations in there; not the embedding, tables, halting heads, gains or biases."""
    model = build_model(FAMILIES[family])
    groups = parameter_groups(model, OptimizerConfig(kind="muon"))
    ours = {id(p) for group in groups if group["kind"] == "muon" for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in ours}
    endings = ("qkv.weight", "out.weight", "gate_up.weight", "down.weight", "up.weight", "gate.weight", "mix.weight")
    outside = ("embedding", "memory.", "halting.")
    expected = {n for n, _ in model.named_parameters() if n.endswith(endings) and not n.startswith(outside)}
    assert names == expected
    assert len(names) >= 4


def test_rates_of_both_follow_the_schedule() -> None:
    changes = {"optimizer.lr": 4e-3, "optimizer.muon_lr": 2e-2, "schedule.warmup": 4}
    trainer = tiny_trainer(lambda a, b: [], "hrm_lm", **MUON, **changes)
    assert isinstance(trainer.optimizer, Together)
    for step in (1, 4):
        assert trainer.step(step, [batch(20)]).lr == pytest.approx(4e-3 * step / 4)
        for part, peak in (("adamw", 4e-3), ("muon", 2e-2)):
            for group in trainer.optimizer.parts[part].param_groups:
                assert group["lr"] == pytest.approx(peak * step / 4)


def newton_schulz(x: Tensor) -> Tensor:
    """Five steps of the published quintic iteration, in float64, without transposing: X ← aX + b XXᵀX + c (XXᵀ)²X."""
    x = x.double() / x.double().norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_one_step_is_muon_inside_and_adamw_outside(adjust: str) -> None:
    changes = {"optimizer.clip": 1e9, "optimizer.weight_decay": 0.2, "optimizer.lr": 1e-2, "schedule.warmup": 0}
    trainer = tiny_trainer(lambda a, b: [], "hrm_lm", **MUON, **changes, **{"optimizer.muon_adjust": adjust})
    before = weights(trainer.model)
    lr = trainer.step(1, [batch(50)]).lr
    inside = {id(p) for g in trainer.optimizer.param_groups if g["kind"] == "muon" for p in g["params"]}
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None
        gradient, decay = parameter.grad.double(), 0.2 if parameter.ndim >= 2 else 0.0
        if id(parameter) in inside:
            rows, columns = parameter.shape
            size = 0.2 * max(rows, columns) ** 0.5 if adjust == "match_rms_adamw" else max(1, rows / columns) ** 0.5
            update, tolerance = size * newton_schulz(gradient), 0.2  # torch computes it in bfloat16
        else:
            update, tolerance = gradient / (gradient.abs() + 1e-8), 1e-3
        done = (before[name].double() * (1 - lr * decay) - parameter.detach().double()) / lr
        assert float((done - update).norm() / update.norm()) < tolerance, name


@pytest.mark.parametrize("family", ["hrm_lm-window", "memory_hrm-lora"])
def test_resumes_exactly(family: str, data: Path, tmp_path: Path) -> None:
    recipe = tiny(data, family, **MUON, **{"training.accumulation": 2, "model.dropout": 0.1})
    train(recipe, tmp_path / "straight")
    with pytest.raises(Stop):
        train(recipe, tmp_path / "stopped", reporter=StopAfter(5))
    train(recipe, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")
    kept = {name.rpartition("::")[2] for name in state(tmp_path / "straight") if "::" in name}
    assert kept == {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}


def test_state_of_another_optimizer_is_refused(data: Path, tmp_path: Path) -> None:
    train(tiny(data), tmp_path / "run")
    with pytest.raises(UserError, match=r"optimizer\.kind \(was 'adamw', now 'muon'\)"):
        train(tiny(data, **MUON), tmp_path / "run", resume=True)
    tensors = {f"{name}::{key}": t for name, key, t in _adamw_state(tmp_path / "run")}
    trainer = tiny_trainer(lambda a, b: [], **MUON, **{"model.context": 32})
    with pytest.raises(UserError, match=r"does not fit the model: .*qkv.weight::momentum_buffer"):
        trainer.load_optimizer_state(tensors)


def _adamw_state(run: Path) -> list[tuple[str, str, Tensor]]:
    assert RunDirectory(run).is_run()
    found = [(*name.removeprefix("optimizer ").split("::"), t) for name, t in state(run).items() if "::" in name]
    return [(name, key, tensor) for name, key, tensor in found]


def test_loading_a_state_dict_keeps_the_parts_together() -> None:
    """torch's own way to load a state replaces groups and state; the parts go on with the new ones."""
    ours, theirs = (tiny_trainer(lambda a, b: [], "hrm_lm", **MUON) for _ in range(2))
    ours.step(1, [batch(30)])
    theirs.model.load_state_dict(ours.model.state_dict())
    theirs.optimizer.load_state_dict(deepcopy(ours.optimizer.state_dict()))
    for trainer in (ours, theirs):
        trainer.step(2, [batch(40)])
    for name, tensor in weights(ours.model).items():
        assert torch.equal(tensor, weights(theirs.model)[name]), name


@pytest.mark.parametrize("settings", [{"muon_lr": 0.1}, {"muon_adjust": "original"}, {"muon_momentum": 0.9}])
def test_settings_without_effect_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(settings))} without effect: kind is adamw"):
        tiny(None, **{f"optimizer.{key}": value for key, value in settings.items()})


def test_sharded_weights_are_refused() -> None:
    """torch's Muon would make parts of matrices orthogonal, or gather them at every product."""
    model = build_model(FAMILIES["hrm_lm"])
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert isinstance(build_optimizer(model, OptimizerConfig()), torch.optim.AdamW)
        with pytest.raises(UserError, match="muon needs whole matrices"):
            build_optimizer(model, OptimizerConfig(kind="muon"))
    finally:
        distributed.destroy_process_group()


def test_adamw_is_the_default_and_fused() -> None:
    for kind in ("adamw", "muon"):
        optimizer = build_optimizer(build_model(FAMILIES["hrm_lm"]), OptimizerConfig(kind=kind))  # type: ignore[arg-type]
        adamw = optimizer.parts["adamw"] if isinstance(optimizer, Together) else optimizer
        assert isinstance(adamw, torch.optim.AdamW)
        assert all(group["fused"] for group in adamw.param_groups)
    assert OptimizerConfig().kind == "adamw"
