"""The command line: bad input is one line on standard error and exit code 2, and nothing is left half-written."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import hrmlm
from hrmlm.cli import main
from hrmlm.data.prepare import prepare
from hrmlm.inference.show import visible
from hrmlm.training.run import RunDirectory
from tests.training.conftest import prepared
from tests.training.helpers import environment, settings, truncate_weights

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with prepared data, a recipe r.yaml and a run of 2 steps."""
    directory = tmp_path_factory.mktemp("cli")
    data = prepared(directory, 60)
    changes = {"training.steps": 2, "model.context": 64}
    (directory / "r.yaml").write_text(yaml.safe_dump(settings(data, **changes)))
    call("train", directory / "r.yaml", "--out", directory / "run")
    return directory


def call(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    code = stop.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


def refused(capsys: Capture, *arguments: Any) -> str:
    """The message of a call that must end with exit code 2 and print nothing else."""
    capsys.readouterr()
    code, output = call(*arguments), capsys.readouterr()
    assert code == 2, output
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1, output.err
    return output.err


def snapshot(directory: Path) -> list[tuple[Path, bytes]]:
    return sorted((path, path.read_bytes()) for path in directory.rglob("*") if path.is_file())


def test_bad_sources(place: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    out = tmp_path / "out"
    assert "nowhere.txt" in refused(capsys, "prepare", tmp_path / "nowhere.txt", "--out", out)
    assert "empty.txt" in refused(capsys, "prepare", tmp_path / "empty.txt", "--out", out)
    message = refused(capsys, "prepare", tmp_path / "latin.txt", "--valid", tmp_path / "latin.txt", "--out", out)
    assert "latin.txt" in message
    assert "offset 3" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "latin.txt"]
    before = snapshot(place / "data")
    assert "exists already" in refused(capsys, "prepare", place / "corpus.txt", "--out", place / "data")
    assert snapshot(place / "data") == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["training.steps=0"], "training.steps"),
        (["training.stepz=5"], "did you mean 'steps'?"),
        (["model.d_model=33"], "d_model 33"),
        (["model.context=5000", "data.window=5000"], "too few for a window of 5000"),
        (["data.path=/nowhere/data"], "/nowhere/data"),
        (["data.path=null"], "data.path is not set"),
        (["model.vocab_size=100"], "vocabulary of 257"),
        (["training.init_from=/nowhere"], "/nowhere does not exist"),
        (["training.device=warp"], "'warp'"),
        (["--resume"], "does not exist; start the run without --resume"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_training(arguments: list[str], told: str, place: Path, tmp_path: Path, capsys: Capture) -> None:
    assert told in refused(capsys, "train", place / "r.yaml", *arguments, "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_bad_recipes(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "bad.yaml").write_text("model: [")
    assert "bad.yaml" in refused(capsys, "train", tmp_path / "bad.yaml", "--out", tmp_path / "out")
    assert "nowhere.yaml does not exist" in refused(capsys, "train", "nowhere.yaml", "--out", tmp_path / "out")
    assert "did you mean 'transformer-l2'" in refused(capsys, "info", "transfomer-l2")
    assert "data.path is not set" in refused(capsys, "train", "transformer-l2", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_existing_run(place: Path, capsys: Capture) -> None:
    before = snapshot(place / "run")
    assert "--resume" in refused(capsys, "train", place / "r.yaml", "--out", place / "run")
    assert "model.d_model (was 32, now 64)" in refused(
        capsys, "train", place / "r.yaml", "model.d_model=64", "--out", place / "run", "--resume"
    )
    assert snapshot(place / "run") == before


@pytest.mark.parametrize("command", [["evaluate", "--data"], ["generate", "--prompt", "x"], ["info"]])
def test_bad_checkpoints(command: list[str], place: Path, tmp_path: Path, capsys: Capture) -> None:
    name, *rest = command
    rest = [*rest, str(place / "corpus.txt")] if name == "evaluate" else rest
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text("{}")
    assert "foreign" in refused(capsys, name, tmp_path / "foreign", *rest)
    assert "nowhere" in refused(capsys, name, tmp_path / "nowhere", *rest)
    import shutil

    newest = RunDirectory(place / "run").checkpoints()[0]
    shutil.copytree(newest, tmp_path / "cut")
    truncate_weights(tmp_path / "cut")
    assert "damaged" in refused(capsys, name, tmp_path / "cut", *rest)


def test_wrong_tokenizer_for_a_checkpoint(place: Path, tmp_path: Path, capsys: Capture) -> None:
    source = str(place / "corpus.txt")
    prepare([source], tmp_path / "bpe", tokenizer="bpe", vocab_size=270, separator="\n\n")
    message = refused(capsys, "evaluate", place / "run", "--data", tmp_path / "bpe")
    for directory in (place / "data", tmp_path / "bpe"):
        assert json.loads((directory / "meta.json").read_text())["tokenizer"]["fingerprint"] in message
    recipe, out = place / "r.yaml", tmp_path / "out"
    arguments = [f"data.path={tmp_path / 'bpe'}", f"training.init_from={place / 'run'}"]
    assert "tokenizer" in refused(capsys, "train", recipe, *arguments, "--out", out)
    assert not out.exists()


def test_bad_texts_and_options(place: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").touch()
    run = place / "run"
    message = refused(capsys, "evaluate", run, "--data", tmp_path / "latin.txt")
    assert "latin.txt" in message
    assert "byte 3" in message
    assert "empty.txt" in refused(capsys, "evaluate", run, "--data", tmp_path / "empty.txt")
    assert "nowhere" in refused(capsys, "evaluate", run, "--data", tmp_path / "nowhere.txt")
    assert "test" in refused(capsys, "evaluate", run, "--data", place / "data", "--split", "test")
    assert "window" in refused(capsys, "evaluate", run, "--data", place / "data", "--window", "65")
    assert "depth" in refused(capsys, "evaluate", run, "--data", place / "data", "--depth", "0")
    assert "temperature" in refused(capsys, "generate", run, "--prompt", "x", "--temperature", "-1")
    assert "--prompt" in refused(capsys, "generate", run)
    message = refused(capsys, "generate", run, "--prompt", "x" * 65)
    assert "65" in message
    assert "64" in message
    assert "latin.txt" in refused(capsys, "generate", run, "--prompts", tmp_path / "latin.txt")


def test_train_speaks_json(place: Path, tmp_path: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert call("train", place / "r.yaml", "training.batch_size=16", "--out", tmp_path / "run", "--json") == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (result["step"], result["stopped_by"]) == (2, None)
    assert "warning: " in output.err  # 8 times the tokens per step, the same rate
    assert "optimizer.lr=0.003" in output.err


def test_fresh_interpreter(place: Path, tmp_path: Path) -> None:
    """The real thing once: exit code, one line, no traceback, and the default directory is not made."""
    done = subprocess.run(
        [sys.executable, "-m", "hrmlm", "train", str(place / "r.yaml"), "training.stepz=3"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: recipe.training.stepz: unknown key, did you mean 'steps'?\n"
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hrmlm", "study", "list"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment(), timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert not stop.value.code
    assert capsys.readouterr().out == f"hrmlm {hrmlm.__version__}\n"


def test_generated_text_cannot_command_the_terminal() -> None:
    assert visible("a\x1b[31mb\r\x9b\x7f\tü\n") == "a\\x1b[31mb\\r\\x9b\\x7f\tü\n"


COMMANDS = ["", "prepare", "info", "train", "evaluate", "generate", "import", "probe", "probe depth", "demo"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_text_is_shown_whole(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert not stop.value.code
    assert "Options" in capsys.readouterr().out
