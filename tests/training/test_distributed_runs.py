"""Whole runs by several processes: resumed by any number, stopped, killed, and checkpoints that do not show how they
were made (R20, R22, R55)."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hrmlm
from hrmlm.checkpoint import SHARDED_FORMAT, WEIGHTS, open_checkpoint, read_tensors
from hrmlm.cli import main
from hrmlm.data.tokens import PreparedData
from hrmlm.errors import UserError
from hrmlm.evaluation.loss import evaluate_ids
from hrmlm.parallel import Parallel
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import train
from hrmlm.training.trainer import StepResult, Trainer
from tests.training.helpers import (
    assert_clean,
    environment,
    kill_in_backward,
    position,
    record,
    settings,
    state,
    steps_done,
    tiny,
    wait_for,
)
from tests.training.processes import codes, run, start

FAMILY = "hrm_lm-passes"
QUICK = {"schedule.warmup": 1, "parallel.timeout": 60.0}


def whole_state(out: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, in whichever form."""
    checkpoint = RunDirectory(out).newest()
    assert checkpoint.optimizer is not None
    return read_tensors(checkpoint.weights) | {f"o {n}": t for n, t in read_tensors(checkpoint.optimizer).items()}


def assert_like(out: Path, reference: Path, whole_record: bool = True) -> None:
    """Losses within 1e-4, the same evaluations, the same position; tensors of the same names and about the same."""
    for event in ("step", "eval"):
        ours, theirs = record(out, event), record(reference, event)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
            assert [a.get(k) for k in ("tokens", "targets", "depth", "best")] == [
                b.get(k) for k in ("tokens", "targets", "depth", "best")
            ]
    losses = ("best_loss", "last_evaluation")
    assert {k: v for k, v in position(out).items() if k not in losses} == {
        k: v for k, v in position(reference).items() if k not in losses
    }
    tensors, expected = whole_state(out), whole_state(reference)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=1e-3)


def go(parallel: Parallel, data: Path, out: Path, strategy: str = "ddp", resume: bool = False, stop: int = 0) -> Any:
    """Train; with `stop`, the last process gets SIGTERM while it does this step."""
    if parallel.rank == parallel.size - 1 and stop:
        step = Trainer.step

        def asked(self: Trainer, number: int, micro_batches: list) -> StepResult:
            if number == stop:
                for _ in range(1 if parallel.size == 1 else 2):  # once by the scheduler, once by torchrun
                    os.kill(os.getpid(), signal.SIGTERM)
            return step(self, number, micro_batches)

        Trainer.step = asked  # type: ignore[method-assign]
    recipe = tiny(data, FAMILY, **{**QUICK, "parallel.strategy": strategy})
    return vars(train(recipe, out, resume=resume, parallel=parallel))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(tiny(data, FAMILY, **QUICK), out)
    return out


@pytest.fixture(scope="module")
def sharded(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes, sharded, that SIGTERM to one of them ended after step 3."""
    out = tmp_path_factory.mktemp("sharded") / "run"
    results = run(2, go, data, out, "fsdp", False, 3)
    assert [(result["step"], result["stopped_by"]) for result in results] == [(3, "SIGTERM")] * 2
    return out


@pytest.mark.parametrize(
    ("first", "second"), [((2, "ddp"), (1, "ddp")), ((1, "ddp"), (2, "ddp")), ((2, "ddp"), (4, "fsdp"))]
)
def test_resumed_by_another_number_of_processes(
    first: tuple[int, str], second: tuple[int, str], data: Path, alone: Path, tmp_path: Path
) -> None:
    """The second half is that of a run that was never interrupted, and so is every evaluation: each window is scored
    once, however many processes divide them."""
    for (size, strategy), resume in ((first, False), (second, True)):
        results = run(size, go, data, tmp_path / "run", strategy, resume, 0 if resume else 3)
        assert {result["stopped_by"] for result in results} == {None if resume else "SIGTERM"}
    assert_like(tmp_path / "run", alone)
    assert_clean(tmp_path / "run")
    starts = record(tmp_path / "run", "start") + record(tmp_path / "run", "resume")
    assert [line["processes"] for line in starts] == [first[0], second[0]]
    assert len(record(tmp_path / "run", "stop")) == 2


@pytest.mark.parametrize(("size", "strategy"), [(4, "fsdp"), (1, "ddp")])
def test_shards_are_resumed_by_more_processes_and_by_one(
    size: int, strategy: str, data: Path, sharded: Path, alone: Path, tmp_path: Path
) -> None:
    shutil.copytree(sharded, tmp_path / "run")
    run(size, go, data, tmp_path / "run", strategy, True)
    assert_like(tmp_path / "run", alone)


def asked_at_meeting(parallel: Parallel, data: Path, out: Path, number: int) -> Any:
    """Train; the last process gets SIGTERM when the processes have just heard of each other after step `number`."""
    agree, count = Parallel.agree, 0

    def asked(self: Parallel, name: str | None) -> str | None:
        nonlocal count
        found, count = agree(self, name), count + 1
        if self.rank == self.size - 1 and count == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    Parallel.agree = asked  # type: ignore[method-assign]
    return vars(train(tiny(data, FAMILY, **QUICK), out, parallel=parallel))


@pytest.mark.parametrize(("number", "expected"), [(2, (3, "SIGTERM")), (6, (6, None))])
def test_a_signal_while_processes_meet_is_not_lost(
    number: int, expected: tuple[int, str | None], data: Path, tmp_path: Path
) -> None:
    """Most of a fast process's time passes there. The next step is the last one; after the last step nothing is left to
    stop, and all processes still do the same."""
    results = run(2, asked_at_meeting, data, tmp_path / "run", number)
    assert [(result["step"], result["stopped_by"]) for result in results] == [expected] * 2
    assert_clean(tmp_path / "run")


def low(parallel: Parallel, data: Path, out: Path) -> Any:
    changes = {"parallel.strategy": "fsdp", "training.precision": "bfloat16_weights", "training.steps": 3}
    return vars(train(tiny(data, FAMILY, **QUICK, **changes), out, parallel=parallel))


def test_sharded_weights_are_evaluated_in_float32(data: Path, tmp_path: Path) -> None:
    """Whatever the steps compute in: the recorded validation loss is that of the saved weights."""
    loss = run(2, low, data, tmp_path / "run")[0]["loss"]
    assert len(record(tmp_path / "run", "step")) == 3
    prepared, model = PreparedData.open(data), hrmlm.load(RunDirectory(tmp_path / "run").newest().path)
    report = evaluate_ids(model, prepared.split("valid")[:100], prepared.tokenizer, window=16)
    assert report.nats_per_token == pytest.approx(loss, rel=1e-5)


def test_shards_are_a_checkpoint_like_any(sharded: Path, data: Path, tmp_path: Path) -> None:
    """No prefix of a wrapper, each tensor once, no file but JSON and tensors; every reader takes it as it is."""
    checkpoint = RunDirectory(sharded).newest()
    model = hrmlm.load(sharded)
    assert checkpoint.weights.is_dir()
    assert {file.suffix for file in checkpoint.path.rglob("*") if file.is_file()} == {".json", ".safetensors"}
    stored = read_tensors(checkpoint.weights)
    saved = model.state_dict()
    assert stored.keys() == saved.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())
    values = sum(tensor.numel() for tensor in stored.values())
    bytes_on_disk = sum(entry["bytes"] for name, entry in checkpoint.files.items() if name.startswith("model/"))
    assert 4 * values < bytes_on_disk < 4 * values + 2 * 16_000  # two headers
    with pytest.raises(SystemExit) as end:
        main(["evaluate", str(sharded), "--data", str(data), "--window", "16", "--json"])
    assert end.value.code == 0


def test_export_is_one_file_with_the_same_weights(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one"
    with pytest.raises(SystemExit) as end:
        main(["export", str(sharded), "--out", str(out)])
    assert end.value.code == 0
    assert str(out / WEIGHTS) in capsys.readouterr().out
    exported, source = open_checkpoint(out), RunDirectory(sharded).newest()
    assert set(exported.files) == {WEIGHTS, "tokenizer.json"}
    ours, theirs = read_tensors(exported.weights), read_tensors(source.weights)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (exported.step, exported.model) == (source.step, source.model)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(hrmlm.load(out)(tokens).logits, hrmlm.load(sharded)(tokens).logits)


@pytest.mark.parametrize("damage", ["missing", "changed", "one too many", "outside"])
def test_a_damaged_shard_is_one_clear_error(
    damage: str, sharded: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And an older checkpoint of the run is used in its place."""
    shutil.copytree(sharded, tmp_path / "run")
    newest = RunDirectory(tmp_path / "run").checkpoint_path(3)
    assert yaml.safe_load((newest / "checkpoint.json").read_text())["format"] == SHARDED_FORMAT
    shard = sorted((newest / "model").iterdir())[1]
    content = bytearray(shard.read_bytes())
    if damage == "missing":
        shard.unlink()
    elif damage == "changed":
        content[-1] ^= 1
        shard.write_bytes(content)
    elif damage == "one too many":
        shard.with_name("shard-00003-model-00001-of-00001.safetensors").write_bytes(content)
    else:
        from hrmlm.checkpoint import write_manifest

        manifest = yaml.safe_load((newest / "checkpoint.json").read_text())
        manifest["files"]["../../recipe.yaml"] = manifest["files"].pop("tokenizer.json")
        write_manifest(newest, manifest)
    with pytest.raises(UserError, match="step-00000003"):
        open_checkpoint(newest)
    assert RunDirectory(tmp_path / "run").newest().step == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def on_a_full_disk(recipe: str, out: str) -> None:
    """The command, where the disk of the last process is full."""
    if os.environ["RANK"] == "1":

        def full(self: Any, *arguments: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        torch.distributed.checkpoint.HuggingFaceStorageWriter.write_data = full  # type: ignore[method-assign]
    main(["train", recipe, "--out", out])


def test_a_full_disk_is_one_clear_error(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where it is another process's shard that cannot be written; nothing half is left."""
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(settings(data, FAMILY, **QUICK, **{"parallel.strategy": "fsdp"})))
    assert codes(start(2, on_a_full_disk, str(tmp_path / "r.yaml"), str(tmp_path / "run"))) == [2, 0]
    told = capfd.readouterr().err
    assert "cannot be written: [Errno 28] No space left on device" in told
    assert "Traceback" not in told
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def one_dies(recipe: Path, out: Path, number: signal.Signals) -> None:
    if os.environ["RANK"] == "1":
        kill_in_backward(4, 0, number)
    main(["train", str(recipe), "--out", str(out)])


@pytest.mark.parametrize(
    ("strategy", "number"), [("ddp", signal.SIGKILL), ("fsdp", signal.SIGKILL), ("ddp", signal.SIGSTOP)]
)
def test_a_lost_process_ends_the_others_and_the_run_goes_on_later(
    strategy: str,
    number: signal.Signals,
    data: Path,
    alone: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One that is killed is noticed at once, one that hangs (stopped) after parallel.timeout."""
    timeout = 4.0 if number == signal.SIGSTOP else 100.0
    changes = {**QUICK, "parallel.strategy": strategy, "parallel.timeout": timeout}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(settings(data, FAMILY, **changes)))
    out = tmp_path / "run"
    first, second = start(2, one_dies, tmp_path / "r.yaml", out, number)
    wait_for(lambda: steps_done(out) >= 3, 100)
    began = time.monotonic()
    first.join()
    assert time.monotonic() - began < 50
    second.kill()
    assert codes([first, second]) == [1, -signal.SIGKILL]
    errors = [line for line in capfd.readouterr().err.splitlines() if "error" in line.lower()]
    assert len(errors) == 1
    assert "another process of the run ended" in errors[0]
    assert RunDirectory(out).newest().step == 3
    run(2, go, data, out, strategy, True)
    assert_like(out, alone)


def command(*arguments: str) -> None:
    main(["train", *arguments])


def other_for_the_second(recipe: str, out: str, other: str) -> None:
    main(["train", recipe, "--out", out, *([other] if os.environ["RANK"] == "1" else [])])


def test_bad_input_is_told_once(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whichever process finds it: all end, one of them with the code of an error."""
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(settings(data, FAMILY, **QUICK)))
    recipe, out = str(tmp_path / "r.yaml"), tmp_path / "run"
    cases = [
        (start(2, command, recipe, "optimizer.lr=no", "--out", str(out)), [2, 0], "optimizer.lr"),
        (start(2, command, recipe, "--resume", "--out", str(out)), [2, 0], "without --resume"),
        (start(2, command, recipe, "--nonsense"), [2, 0], "nonsense"),
        (start(2, other_for_the_second, recipe, str(out), "data.path=nowhere"), [0, 2], "nowhere"),
        (start(2, other_for_the_second, recipe, str(out), "training.device=warp"), [0, 2], "warp"),
        (start(2, other_for_the_second, recipe, str(out), "optimizer.lr=0.1"), [2, 0], "different recipes"),
    ]
    for processes, expected, _ in cases:
        assert codes(processes) == expected
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == len(cases)
    for _, _, told in cases:
        assert sum(told in line for line in errors) == 1
    assert not out.exists()


def scarce(parallel: Parallel, data: Path, out: Path) -> Any:
    """One row per step, and two windows to evaluate, for all processes together."""
    changes = {"training.batch_size": 1, "training.eval_tokens": 20, "training.eval_every": 2}
    return vars(train(tiny(data, "universal-halting", **{**QUICK, **changes}), out, parallel=parallel))


def test_fewer_rows_and_windows_than_processes(data: Path, tmp_path: Path) -> None:
    run(1, scarce, data, tmp_path / "one")
    run(3, scarce, data, tmp_path / "three")
    assert_like(tmp_path / "three", tmp_path / "one")
    for ours, theirs in zip(record(tmp_path / "three"), record(tmp_path / "one"), strict=True):
        assert ours["steps_share"] == theirs["steps_share"]


@pytest.mark.parametrize("form", ["plain", "compiled", "ddp", "fsdp"])
def test_a_checkpoint_loads_however_it_was_made(
    form: str, data: Path, alone: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights saved in one way and trained on in all others: the same names, the same logits."""
    monkeypatch.setattr(torch.nn.Module, "compile", _eager(torch.nn.Module.compile))
    source = sharded if form == "fsdp" else tmp_path / form
    if form == "ddp":
        run(2, go, data, source)
    elif form != "fsdp":
        recipe = tiny(data, FAMILY, **{**QUICK, "training.steps": 1, "training.compile": form == "compiled"})
        train(recipe, source)
    model = hrmlm.load(source)
    assert not [name for name, _ in model.named_parameters() if re.search("module|_orig_mod|next_part", name)]
    assert set(read_tensors(RunDirectory(source).newest().weights)) == set(state(alone)) & set(model.state_dict())
    tokens = torch.tensor([[1, 2, 3, 4]])
    expected = model(tokens).logits
    for target in ("plain", "compiled", "ddp", "fsdp"):
        size = 2 if target in ("ddp", "fsdp") else 1
        for logits in run(size, _logits, source, data, target, tokens):
            torch.testing.assert_close(torch.tensor(logits), expected, rtol=0, atol=1e-6 if target == "compiled" else 0)


def _eager(real: Any) -> Any:
    return lambda module, *arguments, **options: real(module, *arguments, **{**options, "backend": "eager"})


def _logits(parallel: Parallel, source: Path, data: Path, target: str, tokens: torch.Tensor) -> Any:
    """What a trainer's model makes of tokens, in evaluation mode."""
    parallel.configure(60, "cpu")
    strategy = target if target == "fsdp" else "ddp"
    recipe = tiny(data, FAMILY, **{"parallel.strategy": strategy, "training.compile": target == "compiled"})
    trainer = Trainer(recipe, hrmlm.load(source), lambda a, b: [], parallel=parallel)
    with trainer.engine.whole(), torch.no_grad():
        return trainer.model.eval()(tokens).logits.tolist()


def test_torchrun(data: Path, tmp_path: Path) -> None:
    """The command of the docs: one voice, and the files of a run of one process."""
    changes = {**QUICK, "training.steps": 2}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(settings(data, FAMILY, **changes)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "hrmlm", "train", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "run"), "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["step"] == 2
    assert done.stderr.count("validation") == 1
    assert [line["processes"] for line in record(tmp_path / "run", "start")] == [2]
    train(tiny(data, FAMILY, **changes), tmp_path / "alone")
    assert_like(tmp_path / "run", tmp_path / "alone")
