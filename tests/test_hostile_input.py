"""Input that nobody gives on purpose, and some that somebody does: one line on standard error, and no traceback."""

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import hrmlm
from hrmlm.checkpoint import MANIFEST, OPTIMIZER, WEIGHTS, _describe, write_manifest
from hrmlm.errors import UserError
from hrmlm.training.recipe import load_recipe
from hrmlm.training.run import RunDirectory
from tests.test_cli import Capture, call, refused
from tests.training.conftest import prepared
from tests.training.helpers import settings

NESTED, HUGE = "[" * 100_000, '{"a": ' + "9" * 5000 + "}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with prepared data, a recipe r.yaml and a run of 2 steps."""
    directory = tmp_path_factory.mktemp("hostile")
    data = prepared(directory, 60)
    (directory / "r.yaml").write_text(yaml.safe_dump(settings(data, **{"training.steps": 2, "model.context": 32})))
    call("train", directory / "r.yaml", "--out", directory / "run")
    return directory


def copied(place: Path, to: Path) -> Path:
    """A copy of the run, and the path of its checkpoint."""
    shutil.copytree(place / "run", to)
    return RunDirectory(to).checkpoints()[0]


def change_manifest(checkpoint: Path, **training: Any) -> None:
    """Set values of `training`, and make the hashes agree with the files as they are."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["training"].update(training)
    manifest["files"] = {name: _describe(checkpoint / name) for name in manifest["files"]}
    write_manifest(checkpoint, manifest)


@pytest.mark.parametrize("content", [NESTED, HUGE])
def test_json_beyond_all_bounds(content: str, place: Path, tmp_path: Path, capsys: Capture) -> None:
    checkpoint = copied(place, tmp_path / "run")
    (checkpoint / MANIFEST).write_text(content)
    assert "cannot be read as JSON" in refused(capsys, "info", checkpoint)
    (tmp_path / "t.json").write_text(content)
    arguments = ("prepare", place / "r.yaml", "--tokenizer", tmp_path / "t.json", "--out", tmp_path / "out")
    assert "t.json cannot be read as JSON" in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("added", "told"),
    [
        ("x: 2024-13-45\n", "month must be in"),
        ("x: !!int y\n", "invalid literal"),
        ("x: " + "[" * 1000, "recursion"),
        ("training: {steps: 1}\n", "'training' stands twice"),
        ("optimizer: {lr: 0.1, lr: 0.2}\n", "'lr' stands twice"),
    ],
)
def test_bad_yaml(added: str, told: str, place: Path, tmp_path: Path, capsys: Capture) -> None:
    text = (place / "r.yaml").read_text()
    if added.startswith("optimizer"):
        text = yaml.safe_dump({k: v for k, v in yaml.safe_load(text).items() if k != "optimizer"})
    (tmp_path / "bad.yaml").write_text(text + added)
    assert told in refused(capsys, "train", tmp_path / "bad.yaml", "--out", tmp_path / "out")


def test_merged_keys_of_yaml_are_no_duplicates(place: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((place / "r.yaml").read_text())
    model = yaml.safe_dump({"model": recipe["model"]})
    (tmp_path / "m.yaml").write_text(model + "schedule: {<<: {warmup: 3}, warmup: 4}\n")
    assert load_recipe(str(tmp_path / "m.yaml")).schedule.warmup == 4


def test_bad_override_value(place: Path, capsys: Capture) -> None:
    assert "not valid YAML" in refused(capsys, "train", place / "r.yaml", "data.path=2024-13-45")


def test_recipe_that_is_valid_only_with_its_overrides(place: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((place / "r.yaml").read_text())
    recipe["data"]["window"] = 2 * recipe["model"]["context"]
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(recipe))
    change = f"model.context={recipe['data']['window']}"
    assert call("train", tmp_path / "w.yaml", change, "training.steps=1", "--out", tmp_path / "out") == 0


@pytest.mark.parametrize("size", ["model.d_model=1" + "0" * zeros for zeros in (12, 30)])
def test_sizes_beyond_the_memory(size: str, place: Path, tmp_path: Path, capsys: Capture) -> None:
    refused(capsys, "train", place / "r.yaml", size, "model.n_heads=1", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_device_that_computes_nothing(place: Path, tmp_path: Path, capsys: Capture) -> None:
    message = refused(capsys, "train", place / "r.yaml", "training.device=meta", "--out", tmp_path / "out")
    assert "'meta' cannot be used" in message


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"step": "x"}', '{"step": 1e400}', '{"step": -1}', NESTED])
def test_damaged_best_json(content: str, place: Path, tmp_path: Path, capsys: Capture) -> None:
    copied(place, tmp_path / "run")
    (tmp_path / "run" / "best.json").write_text(content)
    assert call("generate", tmp_path / "run", "--prompt", "a", "--max-new-tokens", "1") == 0
    assert "best.json is damaged" in capsys.readouterr().err
    assert call("train", place / "r.yaml", "training.steps=3", "--out", tmp_path / "run", "--resume") == 0


@pytest.mark.parametrize(
    "values",
    [{"step": "x"}, {"step": -3}, {"step": 1.5}, {"tokens": "x"}, {"best_loss": "x"}, {"last_evaluation": [1]}],
)
def test_damaged_training_position(values: dict, place: Path, tmp_path: Path, capsys: Capture) -> None:
    change_manifest(copied(place, tmp_path / "run"), **values)
    capsys.readouterr()
    assert call("train", place / "r.yaml", "training.steps=3", "--out", tmp_path / "run", "--resume") == 2
    assert "Traceback" not in capsys.readouterr().err


def drop(state: dict) -> None:
    state.pop(next(name for name in state if name.endswith("exp_avg")))


def rename(state: dict) -> None:
    state["nobody::exp_avg"] = torch.zeros(3)


def shrink(state: dict) -> None:
    state[next(name for name in state if name.endswith("exp_avg"))] = torch.zeros(3)


@pytest.mark.parametrize(("change", "told"), [(drop, "missing"), (rename, "unknown n"), (shrink, "shape (3,)")])
def test_optimizer_state_of_another_model(change: Any, told: str, place: Path, tmp_path: Path, capsys: Capture) -> None:
    """The fused kernel would read and write beyond the end of a tensor that is too short."""
    checkpoint = copied(place, tmp_path / "run")
    state = load_file(checkpoint / OPTIMIZER)
    change(state)
    save_file(state, checkpoint / OPTIMIZER)
    change_manifest(checkpoint)
    assert told in refused(capsys, "train", place / "r.yaml", "training.steps=3", "--out", tmp_path / "run", "--resume")


def test_junk_in_the_record(place: Path, tmp_path: Path) -> None:
    copied(place, tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe\n[1]\nnull\n"x"\n{"step": "q", "event": "step"}\n' + NESTED.encode() + b"\n")
    assert call("train", place / "r.yaml", "training.steps=3", "--out", tmp_path / "run", "--resume") == 0


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(number: float, place: Path, tmp_path: Path, capsys: Capture) -> None:
    checkpoint = copied(place, tmp_path / "run")
    weights = load_file(checkpoint / WEIGHTS)
    weights["embedding.weight"][:] = number
    save_file(weights, checkpoint / WEIGHTS)
    change_manifest(checkpoint)
    (tmp_path / "text.txt").write_text("some words")
    for data in (tmp_path / "text.txt", place / "data"):
        assert "not finite" in refused(capsys, "evaluate", checkpoint, "--data", data, "--json")


def test_enormous_batch_of_windows(place: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words")
    assert call("evaluate", place / "run", "--data", tmp_path / "text.txt", "--batch-size", 10**20) == 0


def test_names_that_look_like_markup(place: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "[").mkdir()
    for name in ("b].txt", "a[red]x.txt"):
        text = tmp_path / "[" / name
        text.write_text("one two three\n\nfour five")
        out = tmp_path / f"[bold]{name[0]}" / "[" / "x]"
        assert call("prepare", text, "--tokenizer", "bytes", "--separator", r"\n\n", "--out", out) == 0
        assert call("evaluate", place / "run", "--data", text) == 0
    shutil.copy(place / "r.yaml", tmp_path / "[" / "b].yaml")
    assert call("info", tmp_path / "[" / "b].yaml") == 0
    capsys.readouterr()
    assert call("train", tmp_path / "[" / "b].yaml", "training.steps=1", "--out", tmp_path / "[red]q") == 0
    assert "[red]q: step 1" in capsys.readouterr().err


def test_file_name_that_is_not_utf8(place: Path, tmp_path: Path, capsys: Capture) -> None:
    text = os.fsencode(tmp_path) + b"/inv\xff.txt"
    with open(text, "w") as file:
        file.write("one two three\n\nfour five")
    out = tmp_path / "out"
    arguments = ["prepare", os.fsdecode(text), "--tokenizer", "bytes", "--separator", r"\n\n", "--out", out, "--json"]
    assert call(*arguments) == 0
    source = json.loads(capsys.readouterr().out)["sources"][0]["source"]
    assert source == json.loads((out / "meta.json").read_text())["sources"][0]["source"] == os.fsdecode(text)


def test_terminal_without_the_characters(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(*arguments: str) -> str:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        assert call("generate", place / "run", "--prompt", "é😀", "--max-new-tokens", "0", *arguments) == 0
        sys.stdout.flush()
        return raw.getvalue().decode("ascii")

    assert json.loads(printed("--json"))[0]["prompt"] == "é😀"
    assert printed() == "\\xe9\\U0001f600\n"


def test_sources_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    out = tmp_path / "out"
    os.mkfifo(tmp_path / "pipe.txt")
    assert "not a regular file" in refused(capsys, "prepare", tmp_path / "pipe.txt", "--out", out)
    assert "not a regular file" in refused(capsys, "prepare", tmp_path, "--out", out)
    assert "empty text" in refused(capsys, "prepare", "", "--out", out)
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in refused(capsys, "prepare", "-", "--out", out)


@pytest.mark.parametrize("size", [10**15, 10**20])
def test_vocabulary_beyond_the_memory(size: int, place: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.txt").write_text("one two\n\nthree")
    arguments = ("prepare", tmp_path / "a.txt", "--separator", r"\n\n", "--out", tmp_path / "out")
    assert "too large" in refused(capsys, *arguments, "--vocab-size", size)
    call(*arguments, "--vocab-size", 300)
    tokenizer = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["ab"] = 2_000_000_000
    (tmp_path / "t.json").write_text(json.dumps(tokenizer))
    message = refused(capsys, *arguments[:-1], tmp_path / "out2", "--tokenizer", tmp_path / "t.json")
    assert "has the id 2000000000" in message


@pytest.mark.parametrize("exists", [True, False])
def test_output_through_a_link(exists: bool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two\n\nthree")
    if exists:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    arguments = ["--separator", r"\n\n", "--tokenizer", "bytes", "--out", tmp_path / "link"]
    assert call("prepare", tmp_path / "a.txt", *arguments) == 0
    assert (tmp_path / "real" / "meta.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "link", "real"]


def test_file_of_prompts(place: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "p").write_bytes(b"")
    assert "no prompt" in refused(capsys, "generate", place / "run", "--prompts", tmp_path / "p")
    (tmp_path / "p").write_bytes(b"a\r\n\r\nb\r\n")
    assert call("generate", place / "run", "--prompts", tmp_path / "p", "--max-new-tokens", "1", "--json") == 0
    assert [row["prompt"] for row in json.loads(capsys.readouterr().out)] == ["a", "", "b"]


@pytest.mark.parametrize("prompt", [1.5, None, ["a"], [1.5], [None]])
def test_prompts_of_wrong_types(prompt: Any, place: Path) -> None:
    with pytest.raises(UserError):
        hrmlm.generate(place / "run", [prompt], max_new_tokens=1)


def test_ids_of_any_whole_type(place: Path) -> None:
    ids = torch.tensor([[1, 2]])
    assert hrmlm.generate(place / "run", ids, max_new_tokens=1)[0].prompt_ids == [1, 2]
