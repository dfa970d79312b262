"""Checkpoints hold nothing that runs code, and nothing that would is ever opened as such (R19)."""

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hrmlm
from hrmlm.checkpoint import MANIFEST, WEIGHTS, save_checkpoint, write_manifest
from hrmlm.cli import main
from hrmlm.data.prepare import prepare
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.models import build_model
from tests.families import FAMILIES
from tests.test_checkpoint import ANY, TOKENS, saved
from tests.training.helpers import environment


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.marker,))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    (directory / "a.txt").write_text("some words and more " * 20)
    prepare([str(directory / "a.txt")], directory / "data", tokenizer="bytes", valid=[str(directory / "a.txt")])
    return directory


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    output = capsys.readouterr()
    assert stop.value.code == 2, output
    lines = output.err.strip().splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1, output
    return lines[-1]


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "state.pkl", WEIGHTS])
def test_pickle_is_never_run(
    name: str, protocol: int, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pickle instead of a checkpoint, inside a checkpoint directory, or in the place of the weights."""
    marker = tmp_path / "marker"
    bomb = pickle.dumps(Bomb(marker), protocol=protocol)
    alone = tmp_path / name
    alone.write_bytes(bomb)
    inside = tmp_path / "run" / "checkpoints" / "step-00000001"
    saved(inside, vocab_size=257)
    (inside / name).write_bytes(bomb)
    manifest = json.loads((inside / MANIFEST).read_text())
    if name == WEIGHTS:  # a forger gets the sizes and hashes right
        manifest["files"][WEIGHTS] = {"bytes": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}
        write_manifest(inside, manifest)
    else:
        (inside / MANIFEST).unlink()
    (tmp_path / "run" / ".lock").touch()
    changes = "model.d_model=32 model.n_heads=2 model.context=16 model.vocab_size=257 training.device=cpu"
    recipe = ["train", "transformer-l2", *changes.split(), f"data.path={text / 'data'}"]
    for path in (alone, inside):
        with pytest.raises(UserError):
            hrmlm.load(path)
        refused(["evaluate", str(path), "--data", str(text / "a.txt")], capsys)
        refused(["generate", str(path), "--prompt", "x"], capsys)
        told = refused([*recipe, f"training.init_from={path}", "--out", str(tmp_path / "new")], capsys)
        assert str(path) in told
    refused(["info", str(alone)], capsys)
    assert "checkpoint" in refused([*recipe, "--out", str(tmp_path / "run"), "--resume"], capsys)
    refused(["prepare", str(alone), "--out", str(tmp_path / "prepared")], capsys)
    assert not marker.exists()
    assert not (tmp_path / "new").exists()


def test_everything_written_is_json_or_safetensors(tmp_path: Path) -> None:
    model = build_model({**FAMILIES[ANY], "vocab_size": 257})
    state = {"x": torch.zeros(2), "step": torch.tensor(3.0)}
    save_checkpoint(tmp_path / "c", model, tokenizer=Tokenizer.bytes(), optimizer_state=state, training=None)
    for path in (tmp_path / "c").iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            load_file(path)


def test_loads_in_a_new_process_without_unpickling(tmp_path: Path) -> None:
    model = saved(tmp_path / "c")
    code = (
        "import sys, pickle, torch, hrmlm\n"
        "def refuse(*a, **k): raise SystemExit('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = torch.load = refuse\n"
        "logits = hrmlm.load(sys.argv[1])(torch.arange(12).view(2, 6)).logits\n"
        "print(logits.double().sum().item().hex())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c")],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert done.stdout.strip() == model(TOKENS).logits.double().sum().item().hex(), done.stderr
