"""Groups, schedules, warm-up, clipping, exit sampling: the training recipe in numbers."""

import math
import random
from collections import Counter
from typing import Any, Literal

import pytest
import torch

from hrmlm.models import build_model
from hrmlm.training.optimizer import LearningRate, build_optimizer, parameter_groups
from hrmlm.training.recipe import OptimizerConfig, ScheduleConfig
from tests.families import FAMILIES
from tests.training.helpers import tiny_trainer
from tests.training.test_accumulation import batch

EACH = pytest.mark.parametrize("family", FAMILIES)


def rates(steps: int, peak: float = 1.0, family: str = "transformer", **config: Any) -> LearningRate:
    return LearningRate.of(ScheduleConfig(**config), peak, steps, build_model(FAMILIES[family]))


@EACH
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_is_in_exactly_one_group(family: str, kind: Literal["adamw", "muon"]) -> None:
    model = build_model(FAMILIES[family])
    groups = parameter_groups(model, OptimizerConfig(kind=kind, weight_decay=0.3))
    counts = Counter(id(p) for group in groups for p in group["params"])
    assert counts == {id(p): 1 for p in model.parameters()}
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0.3 if parameter.ndim >= 2 else 0.0), name
        is_vector = "norm" in name or "bias" in name or name.endswith("_init")
        assert (parameter.ndim < 2) == is_vector or "step" in name, name


def test_frozen_parameters_are_left_out() -> None:
    model = build_model(FAMILIES["transformer"])
    model.embedding.weight.requires_grad_(False)
    assert model.embedding.weight is not next(iter(build_optimizer(model, OptimizerConfig()).param_groups))["params"][0]
    assert (
        sum(len(group["params"]) for group in parameter_groups(model, OptimizerConfig()))
        == len(list(model.parameters())) - 1
    )


def test_cosine_against_the_formula() -> None:
    schedule = rates(100, peak=2e-3, kind="cosine", warmup=10, min_ratio=0.1)
    for step in (1, 5, 10):
        assert schedule.at(step) == pytest.approx(2e-3 * step / 10)
    for step in range(10, 101):
        progress = (step - 10) / 90
        expected = 2e-4 + (2e-3 - 2e-4) * (math.cos(progress * math.pi) + 1) / 2
        assert schedule.at(step) == pytest.approx(expected, rel=1e-12)
    assert schedule.at(100) == pytest.approx(2e-4)
    assert rates(100, kind="cosine", warmup=0, min_ratio=0).at(100) == pytest.approx(0, abs=1e-15)
    assert rates(100, kind="cosine", warmup=0).at(1) == pytest.approx(1, rel=1e-3)


def test_wsd_against_the_formula() -> None:
    schedule = rates(200, peak=1e-3, kind="wsd", warmup=20, min_ratio=0.0, decay_fraction=0.25)
    for step in range(1, 201):
        expected = 1e-3 * min(step / 20, 1, (200 - step) / 50)
        assert schedule.at(step) == pytest.approx(expected, rel=1e-12, abs=1e-18)


@EACH
@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_rates_of_any_run_are_positive_and_below_the_peak(family: str, kind: str) -> None:
    for steps in (1, 2, 7, 100, 30_000):
        for warmup in (None, 0, 5, 10**6):
            schedule = rates(steps, 1e-3, family, kind=kind, warmup=warmup)
            checked = {schedule.at(step) for step in {1, 2, steps // 2, steps - 1, steps} if 1 <= step <= steps}
            assert min(checked) > 0
            assert max(checked) <= 1e-3 * (1 + 1e-12)


def test_warmup_rule_of_recurrent_models() -> None:
    """max(1000, 100·N·T) in a run long enough; in a short one the announced fraction of it."""
    base = {"family": "hrm_lm", "vocab_size": 64, "d_model": 32, "n_heads": 2}
    for cycles, fast, expected in [(2, 2, 1000), (4, 3, 1200), (12, 3, 3600)]:
        model = build_model({**base, "n_cycles": cycles, "fast_steps": fast})
        schedule = LearningRate.of(ScheduleConfig(), 1.0, 100_000, model)
        assert schedule.warmup == expected
        assert str(expected) in schedule.note
        short = LearningRate.of(ScheduleConfig(warmup_fraction=0.1), 1.0, 500, model)
        assert short.warmup == 50
        assert "50" in short.note
        assert str(expected) in short.note
        assert LearningRate.of(ScheduleConfig(warmup=7), 1.0, 500, model).warmup == 7


@pytest.mark.parametrize(
    ("family", "share"),
    [("hrm_lm", 1), ("hrm_lm-window", 1 / 3), ("universal-options", 2 / 4), ("transformer", 1), ("hrm_lm-passes", 1)],
)
def test_gradients_are_clipped_to_base_times_window_share(family: str, share: float) -> None:
    trainer = tiny_trainer(lambda a, b: [], family, **{"optimizer.clip": 0.01})
    result = trainer.step(1, [batch(50)])
    grads = [p.grad.double().flatten() for p in trainer.model.parameters() if p.grad is not None]
    norm = torch.cat(grads).norm()
    assert result.norm > 0.01
    assert float(norm) == pytest.approx(0.01 * share, rel=1e-3)


def test_small_gradients_are_left_alone() -> None:
    trainer = tiny_trainer(lambda a, b: [], "hrm_lm-window", **{"optimizer.clip": 1e6})
    result = trainer.step(1, [batch(50)])
    grads = [p.grad.double().flatten() for p in trainer.model.parameters() if p.grad is not None]
    assert float(torch.cat(grads).norm()) == pytest.approx(result.norm, rel=1e-4)


def test_one_step_is_adamw_with_decoupled_decay() -> None:
    """Against the update written out by hand in float64."""
    changes = {"optimizer.clip": 1e9, "optimizer.weight_decay": 0.2, "optimizer.lr": 1e-2, "schedule.warmup": 0}
    trainer = tiny_trainer(lambda a, b: [], "transformer", **changes)
    before = {name: p.detach().double() for name, p in trainer.model.named_parameters()}
    lr = trainer.step(1, [batch(50)]).lr
    for name, parameter in trainer.model.named_parameters():
        gradient = parameter.grad.double()
        decay = 0.2 if parameter.ndim >= 2 else 0.0
        # After one step both bias-corrected moments are the gradient and its square.
        expected = before[name] * (1 - lr * decay) - lr * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{"family": "hrm_lm", "n_cycles": 5}, {"family": "universal", "n_steps": 5}])
def test_exit_sampling(settings: dict[str, Any]) -> None:
    """A share q of the steps ends early, at a depth that is uniform on 1 … N-1."""
    model = build_model({"vocab_size": 64, "d_model": 16, "n_heads": 1, "exit_probability": 0.4, **settings})
    rng = random.Random(1)
    depths = Counter(model._training_depth(rng) for _ in range(20_000))
    assert set(depths) == {1, 2, 3, 4, 5}
    assert depths[5] / 20_000 == pytest.approx(0.6, abs=0.015)
    for depth in range(1, 5):
        assert depths[depth] / 20_000 == pytest.approx(0.1, abs=0.01)


def test_depth_is_a_function_of_seed_and_step_and_shared_by_micro_batches() -> None:
    family, changes = "hrm_lm-window", {"model.exit_probability": 0.5, "training.accumulation": 2}
    runs = []
    for seed in (0, 0, 1):
        trainer = tiny_trainer(lambda a, b: [], family, **changes, **{"training.seed": seed})
        depths: list[set[int]] = []
        losses = trainer.model.losses

        def spy(*arguments: Any, seen: list[set[int]] = depths, losses: Any = losses) -> Any:
            for part in losses(*arguments):
                seen[-1].add(part.depth)
                yield part

        trainer.model.losses = spy  # type: ignore[method-assign]
        for step in range(1, 13):
            depths.append(set())
            trainer.step(step, [batch(5, length=5), batch(5, length=5)])
        assert all(len(used) == 1 for used in depths)
        runs.append(depths)
    assert runs[0] == runs[1] != runs[2]


def test_scaled_init_survives_the_trainer() -> None:
    trainer = tiny_trainer(lambda a, b: [], "hrm_lm-window", **{"model.d_model": 64})
    matrices = {name: p.detach() for name, p in trainer.model.named_parameters() if p.ndim == 2}
    for name, matrix in matrices.items():
        expected = 0.02 / math.sqrt(3) if name.startswith(("fast.", "slow.")) else 0.02
        assert float(matrix.std()) == pytest.approx(expected, rel=0.05), name
