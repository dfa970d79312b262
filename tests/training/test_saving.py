"""Kills and full disks during saves, and damaged checkpoints: there is always a good one (R18)."""

import errno
import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import hrmlm
from hrmlm import checkpoint
from hrmlm.checkpoint import MANIFEST, OPTIMIZER, WEIGHTS
from hrmlm.errors import UserError
from hrmlm.training.recipe import Recipe
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import train
from tests.training.helpers import (
    Stop,
    StopAfter,
    assert_clean,
    assert_same_run,
    child,
    run_child,
    steps_done,
    tiny,
    truncate_weights,
    wait_for,
)


def newest_step(out: Path) -> int:
    return RunDirectory(out).newest().step if RunDirectory(out).checkpoints() else 0


def test_killed_at_random_moments_while_saving_every_step(data: Path, tmp_path: Path) -> None:
    recipe = tiny(data, **{"training.save_every": 1, "training.eval_every": 5, "training.steps": 10_000})
    out, chance = tmp_path / "run", random.Random(5)
    for attempt in range(8):
        reached = newest_step(out)
        with child(lambda start: train(recipe, out, resume=start > 0), attempt) as process:
            wait_for(lambda r=reached: steps_done(out) > r or not process.is_alive())  # type: ignore[misc]
            process.join(chance.uniform(0, 0.2))
            assert process.is_alive()
            process.kill()
        assert newest_step(out) >= reached
    end = newest_step(out) + 2
    with pytest.raises(Stop):
        train(recipe, out, resume=True, reporter=StopAfter(end))
    with pytest.raises(Stop):
        train(recipe, tmp_path / "straight", reporter=StopAfter(end))
    assert RunDirectory(out).newest().step == end - 1
    assert_same_run(out, tmp_path / "straight")
    assert_clean(out)


def alter(path: Path) -> None:
    content = bytearray((path / WEIGHTS).read_bytes())
    content[-5] ^= 1
    (path / WEIGHTS).write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncate_weights,
    "altered": alter,
    "zero-length weights": lambda path: os.truncate(path / WEIGHTS, 0),
    "optimizer missing": lambda path: (path / OPTIMIZER).unlink(),
    "no manifest": lambda path: (path / MANIFEST).unlink(),
    "half a manifest": lambda path: os.truncate(path / MANIFEST, 100),
    "empty": lambda path: (shutil.rmtree(path), path.mkdir()),
}


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of 6 steps with checkpoints of steps 4 and 6."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny(data, **{"training.eval_every": 0}), out)
    assert [path.name for path in RunDirectory(out).checkpoints()] == ["step-00000006", "step-00000004"]
    return out


@pytest.mark.parametrize(("damage", "keep"), [("truncated", 2), *((damage, 1) for damage in DAMAGES)])
def test_damaged_newest_checkpoint_makes_way(
    damage: str, keep: int, whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The older one is used, the bad one named, and replaced when the run gets there again."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    DAMAGES[damage](out / "checkpoints" / "step-00000006")
    train(tiny(data, **{"training.eval_every": 0, "training.keep": keep}), out, resume=True)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "step-00000006" in warnings[0]
    assert_same_run(out, whole)
    assert_clean(out)
    assert len(RunDirectory(out).checkpoints()) == keep


def test_best_is_damaged(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(whole, tmp_path / "run")
    truncate_weights(tmp_path / "run" / "checkpoints" / "step-00000006")
    hrmlm.load(tmp_path / "run")
    assert "step-00000006" in capsys.readouterr().err


def test_no_usable_checkpoint(whole: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        truncate_weights(path)
    with pytest.raises(UserError, match="no usable checkpoint"):
        train(tiny(data), tmp_path / "run", resume=True)


def test_checkpoint_of_a_later_version_is_kept(whole: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    manifest = tmp_path / "run" / "checkpoints" / "step-00000006" / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        train(tiny(data), tmp_path / "run", resume=True)
    assert manifest.is_file()


def test_disk_full_while_saving(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, out = tiny(data, **{"training.eval_every": 0}), tmp_path / "run"
    real, calls = checkpoint.save_file, []

    def full(tensors: dict, path: Path) -> None:
        calls.append(path)
        if len(calls) == 4:  # the optimizer state of the second checkpoint
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        train(recipe, out)
    assert [path.name for path in RunDirectory(out).checkpoints()] == ["step-00000002"]
    assert_clean(out)
    train(recipe, out, resume=True)
    train(recipe, tmp_path / "straight")
    assert_same_run(out, tmp_path / "straight")


def limited(recipe: Recipe, out: Path) -> None:
    """Train where no file can grow beyond what the weights need; the failure is the system's own."""
    from hrmlm.training.trainer import Trainer

    step = Trainer.step

    def limit_from_step_3(self: Trainer, number: int, micro_batches: list) -> object:
        if number == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        return step(self, number, micro_batches)

    Trainer.step = limit_from_step_3  # type: ignore[method-assign, assignment]
    from hrmlm.cli import main

    main(["train", str(recipe), "--out", str(out)])


def test_system_refuses_to_write_more(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import yaml

    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tiny(data, **{"training.eval_every": 0}).to_dict()))
    out = tmp_path / "run"
    assert run_child(limited, tmp_path / "r.yaml", out) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert "too large" in error[-1]
    assert not any("Traceback" in line for line in error)
    assert [path.name for path in RunDirectory(out).checkpoints()] == ["step-00000002"]
    assert_clean(out)


def test_best_is_kept_beside_the_newest(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.6, 2.7, 2.8])
    from hrmlm.training import validation as module

    real = module.evaluate_ids

    def scripted(*arguments: object, **options: object) -> object:
        report = real(*arguments, **options)  # type: ignore[arg-type]
        return _Report(next(losses), report.bits_per_byte, report.perplexity)

    monkeypatch.setattr(module, "evaluate_ids", scripted)
    out = tmp_path / "run"
    changes = {"training.eval_every": 1, "training.save_every": 1, "training.keep": 1}
    result = train(tiny(data, **changes), out)
    assert (result.best_step, result.best_loss, result.loss) == (2, 2.0, 2.8)
    assert [path.name for path in RunDirectory(out).checkpoints()] == ["step-00000006", "step-00000002"]
    assert json.loads((out / "best.json").read_text()) == {"step": 2, "loss": 2.0}


class _Report:
    def __init__(self, loss: float, bits: float | None, perplexity: float | None) -> None:
        self.nats_per_token, self.bits_per_byte, self.perplexity = loss, bits, perplexity
        self.steps = None
