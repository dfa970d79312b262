"""Learned depth on the command line: evaluate, generate, probe, import (R35, R41)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hrmlm.checkpoint import save_checkpoint
from hrmlm.cli import main
from tests.inference.helpers import BYTES, small_model

Capture = pytest.CaptureFixture[str]
TEXT = "A few words for the model to read. " * 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text and checkpoints: `fish` stops by itself, `whole` decides for a whole sequence, `fixed` does neither."""
    directory = tmp_path_factory.mktemp("depth")
    (directory / "text.txt").write_text(TEXT)
    for name, family, changes in (
        ("fish", "cosmicfish", {}),
        ("whole", "cosmicfish", {"halting": "sequence"}),
        ("fixed", "universal", {}),
    ):
        save_checkpoint(directory / name, small_model(family, **changes), tokenizer=BYTES)
    return directory


def call(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code if isinstance(stop.value.code, int) else 0


def answer(capsys: Capture, *arguments: Any) -> Any:
    """The JSON that a call prints."""
    capsys.readouterr()
    assert call(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: Capture, *arguments: Any) -> str:
    """The one line of a call that ends with exit code 2 and prints nothing else."""
    capsys.readouterr()
    assert call(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


def test_evaluate(place: Path, capsys: Capture) -> None:
    data = ("--data", place / "text.txt")
    trained = answer(capsys, "evaluate", place / "fish", *data)
    early = answer(capsys, "evaluate", place / "fish", *data, "--halt-threshold", 0.3)
    fixed = answer(capsys, "evaluate", place / "fish", *data, "--depth", 1)
    assert 1 == fixed["steps"]["mean"] <= early["steps"]["mean"] < trained["steps"]["mean"]
    assert (early["halt_threshold"], fixed["halting"]) == (0.3, "fixed")
    assert answer(capsys, "evaluate", place / "fixed", *data)["steps"] is None
    for settings, told in (
        (("--depth", 0), "depth 0 is not possible"),
        (("--halt-threshold", 2), "above 0 and at most 1"),
        (("--depth", 1, "--halt-threshold", 0.5), "exclude each other"),
    ):
        assert told in refused(capsys, "evaluate", place / "fish", *data, *settings)
    assert "does not learn" in refused(capsys, "evaluate", place / "fixed", *data, "--halt-threshold", 0.5)


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_more_depth_than_trained_is_warned_of(place: Path, capsys: Capture, command: str) -> None:
    arguments = {
        "evaluate": ["--data", place / "text.txt"],
        "generate": ["--prompt", "x", "--max-new-tokens", 2],
    }[command]
    assert call(command, place / "fish", *arguments, "--depth", 6) == 0
    assert "warning: depth 6 is beyond the 4 the model was trained at\n" in capsys.readouterr().err


def test_generate(place: Path, capsys: Capture) -> None:
    settings = ("generate", place / "fish", "--prompt", "hello", "--max-new-tokens", 6, "--temperature", 0, "--seed", 1)
    (row,) = answer(capsys, *settings)
    assert len(row["steps"]) == 6
    assert answer(capsys, *settings, "--show-depth") == answer(capsys, *settings)
    assert answer(capsys, *settings, "--depth", 2)[0]["steps"] == [2] * 6
    assert sum(answer(capsys, *settings, "--halt-threshold", 0.2)[0]["steps"]) < sum(row["steps"])
    assert answer(capsys, "generate", place / "fixed", "--prompt", "x", "--max-new-tokens", 2)[0]["steps"] == [4, 4]
    assert "depth 0 is not possible" in refused(capsys, *settings, "--depth", 0)


def test_show_depth_without_a_terminal(place: Path, capsys: Capture) -> None:
    settings = ("generate", place / "fish", "--max-new-tokens", 5, "--temperature", 0)
    one, two = (answer(capsys, *settings, "--prompt", prompt)[0] for prompt in ("hello", "x"))
    expected = [f"{r['prompt']}{r['text']}\nsteps: {' '.join(map(str, r['steps']))} (mean " for r in (one, two)]
    assert call(*settings, "--prompt", "hello", "--show-depth") == 0
    assert capsys.readouterr().out.startswith(expected[0])
    assert call(*settings, "--prompt", "hello", "--prompt", "x", "--show-depth") == 0
    output = capsys.readouterr().out
    assert output.startswith(expected[0])
    assert f"tokens)\n\n{expected[1]}" in output
    assert "does not decide its depth" in refused(capsys, "generate", place / "fixed", "--prompt", "x", "--show-depth")


def test_a_model_that_cannot_be_cached(place: Path, capsys: Capture) -> None:
    settings = ("generate", place / "whole", "--prompt", "hello", "--max-new-tokens", 3)
    assert "--no-cache" in refused(capsys, *settings)
    assert len(answer(capsys, *settings, "--no-cache")[0]["steps"]) == 3


def test_probe_depth(place: Path, capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = ("--data", place / "text.txt", "--tokens", 60, "--seconds", 0)
    settings = ("probe", "depth", place / "fish", *data, "--thresholds", "0.3,0.9", "--depths", "1..2,4")
    result = answer(capsys, *settings, "--out", tmp_path / "out")
    names = ["as trained", "threshold 0.3", "threshold 0.9", "depth 1", "depth 2", "depth 4"]
    assert [point["name"] for point in result["points"]] == names
    assert result["tokens"] == result["first_tokens"] == 60
    assert result["data_path"] == str(place / "text.txt")
    assert json.loads((tmp_path / "out" / "depth.json").read_text()) == result
    assert (tmp_path / "out" / "depth.png").stat().st_size > 1000
    assert call(*settings) == 0
    output = capsys.readouterr().out
    assert "threshold 0.9" in output
    assert "accepted" in output
    fixed = answer(capsys, "probe", "depth", place / "fixed", *data, "--exits", "")
    assert [point["mean_steps"] for point in fixed["points"]] == [4, *range(1, 9)]
    assert fixed["points"][0]["agreement"] is None
    assert fixed["points"][4]["agreement"] == {"positions": 60, "greedy": 1.0, "acceptance": pytest.approx(1.0)}
    assert fixed["points"][1]["agreement"]["greedy"] < 1
    assert call("probe", "depth", place / "fish", *data, "--thresholds", "", "--depths", "5") == 0
    assert "warning: depth 5 is beyond" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["--depths", "1,x"], "--depths '1,x' is not a list of numbers"),
        (["--thresholds", "0.5..0.9"], "--thresholds '0.5..0.9' is not a list"),
        (["--depths", "0"], "depth 0 is not possible"),
        (["--thresholds", "1.5"], "above 0 and at most 1"),
        (["--tokens", "0"], "tokens"),
        (["--split", "none", "--data", "/nowhere"], "/nowhere"),
        (["--seconds", "nan"], "seconds"),
        (["--seconds", "inf"], "inf seconds"),
    ],
)
def test_bad_settings_of_the_probe(place: Path, capsys: Capture, settings: list[str], told: str) -> None:
    assert told in refused(capsys, "probe", "depth", place / "fish", "--data", place / "text.txt", *settings)


def test_import(shared: Path, capsys: Capture, tmp_path: Path) -> None:
    fixture = shared / "fixtures" / "cosmicfish" / "gqa-small"
    files = ("--weights", f"{fixture}.weights.safetensors", "--config", f"{fixture}.json")
    facts = answer(capsys, "import", "cosmicfish", *files, "--out", tmp_path / "fish")
    assert facts["model"]["halting"] == "sequence"
    assert "no tokenizer" in refused(capsys, "generate", tmp_path / "fish", "--prompt", "x")
    assert call("info", tmp_path / "fish") == 0
    assert f"{facts['parameters']:,}" in capsys.readouterr().out
    assert "exists" in refused(capsys, "import", "cosmicfish", *files, "--out", tmp_path / "fish")
    assert "unknown format 'cosmicfis', did you mean 'cosmicfish'?" in refused(
        capsys, "import", "cosmicfis", *files, "--out", tmp_path / "new"
    )
    missing = ("--weights", "/nowhere.safetensors", *files[2:])
    assert "/nowhere.safetensors" in refused(capsys, "import", "cosmicfish", *missing, "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_probe_of_a_file_whose_name_looks_like_markup(place: Path, tmp_path: Path, capsys: Capture) -> None:
    text = tmp_path / "a [" / "red] ü" / "text.txt"
    text.parent.mkdir(parents=True)
    text.write_text(TEXT)
    capsys.readouterr()
    assert (
        call("probe", "depth", place / "fish", "--data", text, "--thresholds", "", "--depths", "1", "--seconds", 0) == 0
    )
    assert "depth 1" in capsys.readouterr().out


def test_json_of_a_probe_is_json_on_a_terminal_without_umlauts(place: Path, tmp_path: Path) -> None:
    text = tmp_path / "ü.txt"
    text.write_text(TEXT)
    command = [sys.executable, "-m", "hrmlm", "probe", "depth", place / "fish", "--data", text, "--json"]
    done = subprocess.run(
        [*command, "--thresholds", "", "--depths", "1", "--seconds", "0"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["data_path"] == str(text)


def test_exit_policies(place: Path, capsys: Capture) -> None:
    data = ("--data", place / "text.txt")
    full = answer(capsys, "evaluate", place / "fixed", *data)
    early = answer(capsys, "evaluate", place / "fixed", *data, "--exit", "change:0.6")
    assert (full["exit"], early["exit"], early["halting"]) == (None, "change:0.6", "change")
    assert 1 <= early["steps"]["mean"] < 4
    generation = ("generate", place / "fixed", "--prompt", "hello", "--max-new-tokens", 6, "--temperature", 0)
    (row,) = answer(capsys, *generation, "--exit", "kl:1e9")
    assert row["steps"] == [1] * 6
    assert call(*generation, "--exit", "kl:1e9", "--show-depth") == 0
    assert "steps: 1 1 1 1 1 1 (mean 1.00 over 6 tokens)" in capsys.readouterr().out
    assert call(*generation, "--exit", "cycles:6") == 0
    assert "warning: depth 6 is beyond the 4" in capsys.readouterr().err
    for command in (("evaluate", place / "fixed", *data), generation):
        assert "exclude each other" in refused(capsys, *command, "--exit", "kl:1", "--depth", 2)
        assert "such as change:0.1" in refused(capsys, *command, "--exit", "change")
    probe = ("probe", "depth", place / "fixed", *data, "--tokens", 30, "--depths", "", "--seconds", 0)
    assert "unknown exit policy 'x'" in refused(capsys, *probe, "--exits", "change:1,x")
    names = [point["name"] for point in answer(capsys, *probe, "--exit", "change:1,kl:0.5")["points"]]
    assert names == ["as trained", "change:1", "kl:0.5"]


def test_probe_depth_measures_speed(place: Path, capsys: Capture) -> None:
    settings = (
        "probe",
        "depth",
        place / "fixed",
        "--data",
        place / "text.txt",
        "--tokens",
        30,
        "--exits",
        "change:0.1",
    )
    points = answer(capsys, *settings, "--depths", "1", "--seconds", 0.01)["points"]
    assert len(points) == 3
    assert all(point["speed"]["tokens_per_second"] > 0 for point in points)
    assert points[2]["speed"]["cycles"] == 1
    points = answer(capsys, *settings, "--depths", "1", "--seconds", 0)["points"]
    assert [point["speed"] for point in points] == [None] * 3
    whole = ("probe", "depth", place / "whole", *settings[3:7], "--depths", "1", "--seconds", 0.01)
    assert [point["speed"] for point in answer(capsys, *whole)["points"]] == [None] * 2, "it has no cache"


@pytest.mark.parametrize(
    ("depths", "told"),
    [
        ("5..1", "--depths 5..1: a range goes from the smaller number to the larger one"),
        ("1..100000000000", "more than 1000 numbers"),
        (f"1..{10**30}", "more than 1000 numbers"),
        ("1..600,1..600", "more than 1000 numbers"),
    ],
)
def test_ranges_that_make_no_sense(place: Path, capsys: Capture, depths: str, told: str) -> None:
    settings = ("probe", "depth", place / "fixed", "--data", place / "text.txt", "--depths", depths)
    assert told in refused(capsys, *settings)


@pytest.mark.parametrize("command", ["depth", "cache"])
def test_out_is_refused_before_the_work(
    place: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("hrmlm.checkpoint.load_model", lambda source: pytest.fail("worked"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        settings = ("probe", command, place / "fixed", "--data", place / "text.txt", "--out", out)
        assert f"{tmp_path / 'file'} is a file; give a directory" in refused(capsys, *settings)
    monkeypatch.setattr("hrmlm.evaluation.picture.os", SimpleNamespace(access=lambda *asked: False, W_OK=2, X_OK=1))
    assert "may not be written to" in refused(capsys, *settings[:-1], tmp_path / "new" / "er")


def test_cache_policies(place: Path, capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    generation = ("generate", place / "fixed", "--prompt", "hello", "--max-new-tokens", 9, "--temperature", 0)
    rows = {
        name: answer(capsys, *generation, "--cache-policy", name)[0] for name in ("full", "first", "last", "every:2")
    }
    assert rows["full"]["ids"] == answer(capsys, *generation)[0]["ids"]
    assert len({tuple(row["logprobs"]) for row in rows.values()}) == 4
    assert "without effect" in refused(capsys, *generation, "--cache-policy", "first", "--no-cache")
    assert "did you mean 'first'" in refused(capsys, *generation, "--cache-policy", "firs")
    probe = ("--data", place / "text.txt", "--tokens", 60, "--window", 16, "--seconds", 0.01)
    result = answer(capsys, "probe", "cache", place / "fixed", *probe, "--out", tmp_path / "out")
    assert [point["policy"] for point in result["points"]] == ["full", "every:2", "first", "last"]
    assert json.loads((tmp_path / "out" / "cache.json").read_text()) == result
    assert (tmp_path / "out" / "cache.png").stat().st_size > 1000
    assert call("probe", "cache", place / "fixed", *probe, "--policies", "first", "--depth", 3) == 0
    assert "full (exact)" in capsys.readouterr().out
    deep = answer(capsys, "probe", "cache", place / "fish", *probe, "--depth", 2)
    assert [point["policy"] for point in deep["points"]] == ["full", "first", "last"]
    assert "give a depth" in refused(capsys, "probe", "cache", place / "fish", *probe, "--policies", "first")
