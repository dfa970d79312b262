"""Texts that go on later: a state that was saved and restored is as if nothing had happened."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrmlm.checkpoint import WEIGHTS, open_checkpoint, save_checkpoint
from hrmlm.cli import main
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.inference import generate
from hrmlm.inference.states import HEADER, ContinuedText, TextState
from hrmlm.models import LanguageModel
from hrmlm.models.memory import MemoryState
from tests.families import FAMILIES
from tests.inference.helpers import ANY, BYTES, END, greedy, say, small_model

MEMORY = [name for name in FAMILIES if isinstance(small_model(name).new_cache(1, 1), MemoryState)]
each_memory = pytest.mark.parametrize("family", MEMORY)


def go_on(model: LanguageModel, text: TextState, prompt: str, count: int, **options: Any) -> list[int]:
    continued = ContinuedText(model, BYTES, prompt, greedy(count, **options), text)
    return [event.id for event in continued.run()]


@each_memory
@settings(max_examples=5, deadline=None, derandomize=True)
@given(counts=st.lists(st.integers(0, 15), min_size=2, max_size=4))
def test_saved_and_restored_is_uninterrupted(family: str, counts: list[int], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("state") / "text.state"
    model = small_model(family)
    whole = generate(model, BYTES, "hello", greedy(sum(counts)))[0].ids
    text, ids = TextState.new(model), []
    for number, count in enumerate(counts):
        ids += go_on(model, text, "" if number else "hello", count)
        text.save(path, BYTES, "these weights")
        text = TextState.load(path, model, BYTES, "these weights")
    assert ids == whole
    assert text.tokens + len(text.waiting) == len("hello") + len(ids)


@each_memory
def test_a_prompt_may_follow_and_is_read_behind_all_before(family: str) -> None:
    model = small_model(family)
    text = TextState.new(model)
    first = go_on(model, text, "one", 7)
    second = go_on(model, text, "two", 7)
    whole = [*BYTES.encode("one"), *first, *BYTES.encode("two")]
    assert second == generate(model, BYTES, [whole], greedy(7))[0].ids


def test_an_end_mark_is_read_before_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(MEMORY[0])
    text = TextState.new(model)
    say(monkeypatch, [*BYTES.encode("ab"), END])
    assert go_on(model, text, "x", 20) == [*BYTES.encode("ab"), END]
    assert text.waiting == [END]
    monkeypatch.undo()
    expected = generate(model, BYTES, [[*BYTES.encode("xab"), END, *BYTES.encode("new")]], greedy(5))[0].ids
    assert go_on(model, text, "new", 5) == expected


def test_an_empty_beginning_is_a_new_document() -> None:
    model = small_model(MEMORY[0])
    assert go_on(model, TextState.new(model), "", 6) == generate(model, BYTES, "", greedy(6))[0].ids


def test_only_one_row_of_a_model_with_a_state() -> None:
    with pytest.raises(UserError, match="no state of constant size"):
        TextState.new(small_model(ANY))
    model = small_model(MEMORY[0])
    with pytest.raises(UserError, match="leave --no-cache out"):
        go_on(model, TextState.new(model), "a", 1, cache=False)


# Files


@pytest.fixture
def saved(tmp_path: Path) -> tuple[LanguageModel, Path]:
    model = small_model(MEMORY[0])
    text = TextState.new(model)
    go_on(model, text, "hello", 9)
    text.save(tmp_path / "text.state", BYTES, "aaaa")
    return model, tmp_path / "text.state"


def rewrite(path: Path, facts: Any = None, **tensors: Any) -> None:
    """Write the file anew with some facts and tensors changed (None: left out)."""
    with safetensors.safe_open(path, framework="pt") as stored:
        old = json.loads(stored.metadata()[HEADER])
        kept = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    kept = {name: tensor for name, tensor in {**kept, **tensors}.items() if tensor is not None}
    metadata = {HEADER: json.dumps({**old, **facts} if isinstance(facts, dict | None) and (facts or {}) != {} else old)}
    path.write_bytes(safetensors.torch.save(kept, metadata=metadata))


def refused(model: LanguageModel, path: Path, message: str, **options: Any) -> None:
    with pytest.raises(UserError, match=message) as caught:
        TextState.load(path, model, options.pop("tokenizer", BYTES), "aaaa", **options)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_whole_file_loads(saved: tuple[LanguageModel, Path]) -> None:
    model, path = saved
    assert TextState.load(path, model, BYTES, "aaaa").tokens == 13


def test_missing_and_foreign_files(saved: tuple[LanguageModel, Path], tmp_path: Path) -> None:
    model, _ = saved
    refused(model, tmp_path / "nowhere", "does not exist")
    refused(model, tmp_path, "directory")
    for content in (b"", b"not a tensor file at all", b"\xff" * 100):
        (tmp_path / "other").write_bytes(content)
        refused(model, tmp_path / "other", "damaged or no state file")
    (tmp_path / "plain").write_bytes(safetensors.torch.save({"weight": torch.ones(2)}))
    refused(model, tmp_path / "plain", "does not say what it belongs to")


def test_a_cut_file(saved: tuple[LanguageModel, Path]) -> None:
    model, path = saved
    content = path.read_bytes()
    for length in (4, 200, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        refused(model, path, "damaged or no state file")


def test_files_of_others(saved: tuple[LanguageModel, Path]) -> None:
    model, path = saved
    refused(small_model(MEMORY[0], segment=6), path, "does not fit the model: keys is")
    refused(small_model(MEMORY[0], slots=[2, 4]), path, r"memory is \(1, 5, 32\)")
    other = Tokenizer.train(["the cat sat on the mat. " * 20], 257)
    refused(model, path, "tokenizer", tokenizer=other)
    refused(model, path, "written at depth 3 and depth 2", depth=2)
    rewrite(path, {"weights": "bbbb"})
    refused(model, path, "other weights")
    rewrite(path, {"format": 99})
    refused(model, path, "format 99")


def test_damaged_values(saved: tuple[LanguageModel, Path]) -> None:
    model, path = saved
    content = path.read_bytes()
    for change, message in (
        ({"memory": None}, "missing memory"),
        ({"more": torch.ones(1)}, "unknown more"),
        ({"memory": torch.full((1, 5, 32), torch.nan)}, "memory holds impossible"),
        ({"lengths": torch.tensor([-1])}, "lengths holds impossible"),
        ({"lengths": torch.tensor([1.0])}, "lengths is"),
    ):
        path.write_bytes(content)
        rewrite(path, **change)
        refused(model, path, message)
    for waiting in ("no list", [257], [-1], [0.5], None):
        path.write_bytes(content)
        rewrite(path, {"waiting": waiting})
        refused(model, path, "waiting ids")


def test_a_failed_write_leaves_the_old_file(saved: tuple[LanguageModel, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = saved
    text, content = TextState.load(path, model, BYTES), path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        text.save(path, BYTES)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


# The command


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, small_model(MEMORY[0]), tokenizer=BYTES)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_the_command_goes_on(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "text.state"
    common = ("generate", checkpoint, "--temperature", 0, "--json")
    _, out, _ = run(capsys, *common, "--prompt", "ab", "--max-new-tokens", 20)
    whole = json.loads(out)[0]["ids"]
    ids = []
    for prompt in (("--prompt", "ab"), ()):
        code, out, _ = run(capsys, *common, *prompt, "--max-new-tokens", 10, "--state", state)
        assert code == 0
        ids += json.loads(out)[0]["ids"]
    assert ids == whole
    weights = open_checkpoint(checkpoint).files[WEIGHTS]["sha256"]
    assert TextState.load(state, small_model(MEMORY[0]), BYTES, weights).tokens == 21
    plain = tmp_path / "plain.state"
    code, out, _ = run(capsys, *common[:-1], "--prompt", "ab", "--max-new-tokens", 5, "--state", plain)
    assert (code, out) == (0, "ab" + BYTES.decode(whole[:5]) + "\n")


def test_mistakes_of_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, new = tmp_path / "bad.state", tmp_path / "new.state"
    bad.write_bytes(b"nothing")
    half = tmp_path / "half.state"
    TextState.new(small_model(MEMORY[0]).to(torch.bfloat16)).save(half, BYTES)
    plain = tmp_path / "transformer"
    save_checkpoint(plain, small_model(ANY), tokenizer=BYTES)
    for arguments, message in (
        ((checkpoint, "--state", bad), "damaged or no state file"),
        ((checkpoint, "--state", new), f"no prompt, and {new} does not exist"),
        ((checkpoint, "--state", half), "was written in bfloat16 and the model is in float32"),
        ((checkpoint, "--state", new, "--prompt", "a", "--prompt", "b"), "2 prompts with --state"),
        ((checkpoint, "--state", new, "--prompt", "a", "--no-cache"), "leave --no-cache out"),
        ((checkpoint, "--state", new, "--prompt", "a", "--show-depth"), "exclude each other"),
        ((checkpoint, "--state", tmp_path / "none" / "x.state", "--prompt", "a"), "create it first"),
        ((plain, "--state", new, "--prompt", "a"), "no state of constant size"),
    ):
        code, out, err = run(capsys, "generate", *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert message in err
        assert err.count("\n") == 1
    assert not new.exists()


def test_twenty_thousand_tokens_need_no_more_than_two_hundred() -> None:
    """Bytes of the state, and what the engine holds besides the ids: the same after every token."""
    model = small_model(MEMORY[0])
    text = TextState.new(model)
    size = text.state.bytes
    continued = ContinuedText(model, BYTES, "x", greedy(400), text)
    for event in continued.run():
        assert text.state.bytes == size
        assert continued.engine._decoder.cache is text.state
        last = event
    assert last.finish_reason == "length"
    assert text.tokens == 400 > 6 * model.config.context
