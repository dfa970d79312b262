"""What may change between the parts of a run, which value wins, and that it is told (R15, R16)."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from hrmlm.checkpoint import MANIFEST, OPTIMIZER, open_checkpoint, save_checkpoint, write_manifest
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.models import build_model
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import train
from tests.training.helpers import Listener, Stop, StopAfter, record, tiny

DECAY = {"schedule.kind": "cosine", "schedule.min_ratio": 0.0, "schedule.warmup": 5, "training.batch_size": 1}
QUIET = {"training.eval_every": 0, "training.save_every": 0}


def test_extended_run_learns_on(data: Path, tmp_path: Path) -> None:
    """50 steps of cosine down to 0, then 100: the schedule of the long run applies from step 51."""
    out, listener = tmp_path / "run", Listener()
    train(tiny(data, "transformer", **DECAY, **QUIET, **{"training.steps": 50}), out)
    assert record(out)[-1]["lr"] == 0
    train(tiny(data, "transformer", **DECAY, **QUIET, **{"training.steps": 100}), out, resume=True, reporter=listener)
    rates = [line["lr"] for line in record(out)]
    assert len(rates) == 100
    for step in range(51, 101):
        expected = 3e-3 * (1 + math.cos(math.pi * (step - 5) / 95)) / 2
        assert rates[step - 1] == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert rates[50] > 1e-3
    told = " / ".join(listener.notes)
    assert "training.steps: 50 in the checkpoint, 100 given now" in told
    assert "learning rate follows the new schedule from step 51 on" in told


def test_changed_rate_is_announced_and_used(data: Path, tmp_path: Path) -> None:
    out, listener = tmp_path / "run", Listener()
    with pytest.raises(Stop):
        train(tiny(data), out, reporter=StopAfter(4))
    changed = tiny(data, **{"optimizer.lr": 1e-4, "schedule.warmup": 0, "schedule.min_ratio": 1.0})
    train(changed, out, resume=True, reporter=listener)
    assert [line["lr"] for line in record(out)[3:]] == [1e-4] * 3
    told = " / ".join(listener.notes)
    assert "optimizer.lr: 0.003 in the checkpoint, 0.0001 given now; the value given now is used" in told
    assert record(out, "resume")[0]["changes"]["optimizer.lr"] == [0.003, 0.0001]


@pytest.mark.parametrize(
    ("key", "new", "old"),
    [
        ("model.d_model", 64, 32),
        ("model.dropout", 0.5, None),
        ("data.window", 8, 16),
        ("training.batch_size", 3, 2),
        ("training.accumulation", 2, 1),
        ("training.seed", 7, 0),
    ],
)
def test_what_the_run_is_made_of_cannot_change(key: str, new: Any, old: Any, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stop):
        train(tiny(data), out, reporter=StopAfter(3))
    before = sorted((path, path.read_bytes()) for path in out.rglob("*") if path.is_file())
    with pytest.raises(UserError) as error:
        train(tiny(data, **{key: new}), out, resume=True)
    assert f"{key} (was {old!r}, now {new!r})" in str(error.value)
    assert "training.init_from=" in str(error.value)
    assert sorted((path, path.read_bytes()) for path in out.rglob("*") if path.is_file()) == before
    train(tiny(data), out, resume=True)  # in the same process: the lock was let go


def test_what_does_not_touch_the_result_may_change(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stop):
        train(tiny(data), out, reporter=StopAfter(3))
    train(tiny(data, **{"training.keep": 5, "training.save_every": 1, "data.workers": 1}), out, resume=True)
    assert len(RunDirectory(out).checkpoints()) == 5


def test_fewer_steps_than_done(data: Path, tmp_path: Path) -> None:
    train(tiny(data, **QUIET), tmp_path / "run")
    with pytest.raises(UserError, match=r"training.steps=4 but the run has done 6 steps"):
        train(tiny(data, **{"training.steps": 4}), tmp_path / "run", resume=True)


def test_data_changed_since_the_start(data: Path, other_data: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        train(tiny(data), tmp_path / "run", reporter=StopAfter(3))
    with pytest.raises(UserError) as error:
        train(tiny(other_data), tmp_path / "run", resume=True)
    for place in (data, other_data):
        assert json.loads((place / "meta.json").read_text())["fingerprint"] in str(error.value)


def test_moved_data_are_the_same_data(data: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        train(tiny(data), tmp_path / "run", reporter=StopAfter(3))
    shutil.copytree(data, tmp_path / "elsewhere")
    assert train(tiny(tmp_path / "elsewhere"), tmp_path / "run", resume=True).step == 6


def test_an_id_changed_in_place_is_noticed(data: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(data, tmp_path / "copy")
    with pytest.raises(Stop):
        train(tiny(copy), tmp_path / "run", reporter=StopAfter(3))
    content = bytearray((copy / "train.bin").read_bytes())
    content[0] ^= 1
    (copy / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"train\.bin was changed"):
        train(tiny(copy), tmp_path / "run", resume=True)


def test_weights_only_cannot_be_resumed_and_names_the_alternative(data: Path, tmp_path: Path) -> None:
    recipe, out = tiny(data, **QUIET), tmp_path / "run"
    train(recipe, out)
    newest = RunDirectory(out).checkpoint_path(6)
    manifest = json.loads((newest / MANIFEST).read_text())
    manifest["training"] = None
    del manifest["files"][OPTIMIZER]
    write_manifest(newest, manifest)
    (newest / OPTIMIZER).unlink()
    with pytest.raises(UserError, match=r"holds weights only.*training.init_from="):
        train(recipe, out, resume=True)
    started = tiny(data, **QUIET, **{"training.init_from": str(newest)})
    listener = Listener()
    train(started, tmp_path / "new", reporter=listener)
    assert f"weights from {newest}" in listener.notes
    first, other = record(tmp_path / "new")[0]["loss"], record(out)[0]["loss"]
    assert first < other, "the new run starts from trained weights"


def test_start_from_weights_of_another_tokenizer_or_shape(data: Path, tmp_path: Path) -> None:
    recipe = tiny(data)
    model = build_model({**recipe.model, "vocab_size": 300})
    save_checkpoint(tmp_path / "foreign", model, tokenizer=Tokenizer.train(["a b c"], 300))
    with pytest.raises(UserError, match="tokenizer"):
        train(tiny(data, **{"training.init_from": str(tmp_path / "foreign")}), tmp_path / "run")
    save_checkpoint(tmp_path / "shape", build_model({**recipe.model, "vocab_size": 257, "d_model": 64}))
    with pytest.raises(UserError, match=r"embedding.weight has shape \(257, 64\)"):
        train(tiny(data, **{"training.init_from": str(tmp_path / "shape")}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_checkpoint_says_what_it_was_trained_on(data: Path, tmp_path: Path) -> None:
    train(tiny(data, **QUIET), tmp_path / "run")
    checkpoint = open_checkpoint(RunDirectory(tmp_path / "run").checkpoint_path(6))
    meta = json.loads((data / "meta.json").read_text())
    assert checkpoint.data_fingerprint == meta["fingerprint"]
    assert checkpoint.tokenizer_fingerprint == meta["tokenizer"]["fingerprint"]
    assert checkpoint.training is not None
    assert checkpoint.training["recipe"]["optimizer"]["lr"] == 3e-3
