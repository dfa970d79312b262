"""The study of a memory: levels, distances, long documents; against plain forward passes and counts by hand."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hrmlm.checkpoint import save_checkpoint
from hrmlm.cli import main
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.evaluation import memory as study
from hrmlm.evaluation.memory import MemoryProbe, distances, long_documents, probe_memory, show, write
from hrmlm.models import LanguageModel
from tests.families import FAMILIES
from tests.models.helpers import build, lively_model

MEMORY = [name for name in FAMILIES if build(name).carries_state]
END = 63


def stream(*lengths: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate([[*rng.integers(0, END, n), END] for n in lengths]).astype(np.uint16)


def nats(model: LanguageModel, document: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(document)
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0]
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").double().numpy()


def probe(model: LanguageModel, ids: np.ndarray, **settings: int) -> MemoryProbe:
    return probe_memory(model, ids, END, **{"window": 2 * model.config.segment, "length": 1000, **settings})


@pytest.mark.parametrize("name", MEMORY)
def test_losses_are_those_of_plain_forward_passes(name: str) -> None:
    """Carried: one call per document. Reset: one call per window. Whatever the batches."""
    model = lively_model(name)
    window = 2 * model.config.segment
    ids = stream(37, 5, 24, 61)
    documents = long_documents(ids, END, window, 1000, 10_000)
    assert [len(document) for document in documents] == [38, 25, 62], "an end mark in front, the short one left out"
    whole = np.concatenate([nats(model, document) for document in documents])
    parts = [
        np.concatenate([nats(model, d[s : s + window + 1]) for s in range(0, len(d) - 1, window)]) for d in documents
    ]
    result = probe(model, ids)
    assert result.tokens == len(whole) == sum(group.tokens for group in result.positions)
    assert sum(group.tokens for group in result.distances) == len(whole)
    for values, kind in ((whole, "carried"), (np.concatenate(parts), "reset")):
        mean = sum(getattr(group, kind) * group.tokens for group in result.positions) / len(whole)
        assert mean == pytest.approx(float(values.mean()), abs=1e-4)
    assert result.positions[0].carried == pytest.approx(result.positions[0].reset, abs=1e-4), (
        "the first window is the same"
    )
    assert result.positions[1].carried != pytest.approx(result.positions[1].reset, abs=1e-3)
    for batch_size in (1, 2):
        other = probe(model, ids, batch_size=batch_size)
        for a, b in zip(other.positions, result.positions, strict=True):
            assert (a.start, a.end, a.tokens) == (b.start, b.end, b.tokens)
            assert a.carried == pytest.approx(b.carried, abs=1e-4)


def test_nothing_carried_is_every_segment_alone() -> None:
    model = lively_model(MEMORY[0])
    C = model.config.segment
    ids = stream(48)
    (document,) = long_documents(ids, END, 2 * C, 1000, 10_000)
    alone = np.concatenate([nats(model, document[s : s + C + 1]) for s in range(0, len(document) - 1, C)])
    result = probe(model, ids)
    mean = sum(group.none * group.tokens for group in result.distances) / result.tokens
    assert mean == pytest.approx(float(alone.mean()), abs=1e-4)
    same = next(group for group in result.distances if group.name == "1")
    assert len(same.levels) == 2
    assert len({same.carried, same.none, *same.levels}) == 4, "each level alone is a case of its own"


def test_levels_are_what_the_model_does() -> None:
    model = lively_model(MEMORY[0])
    with torch.no_grad():
        for bias, value in zip(model.memory.gate_biases, (-30.0, 30.0), strict=True):
            bias.fill_(value)
        model.memory.read_bias.copy_(torch.tensor([50.0, 50.0, 0.0, 0.0]))
    result = probe(model, stream(48))
    coarse, fine = result.levels
    assert (coarse.slots, fine.slots) == (2, 3)
    assert coarse.gate < 0.01 < 0.99 < fine.gate
    assert coarse.read_share == pytest.approx(1, abs=1e-4)
    assert coarse.read_share + fine.read_share == pytest.approx(1, abs=1e-5)
    start = model.memory.start.detach()[:2]
    assert coarse.norm == pytest.approx(float(start.square().mean().sqrt()) * 32**0.5, rel=1e-2), "it never changes"


@given(st.lists(st.integers(0, 5), min_size=2, max_size=40), st.integers(1, 7))
def test_distances_by_hand(ids: list[int], segment: int) -> None:
    found = distances(np.array(ids), segment)
    for place in range(len(ids) - 1):
        earlier = [i for i in range(place + 1) if ids[i] == ids[place + 1]]
        expected = place // segment - earlier[-1] // segment if earlier else -1
        assert found[place] == expected


def test_long_texts_are_cut() -> None:
    ids = stream(50)
    assert [len(d) for d in long_documents(ids, END, 10, 20, 10_000)] == [21, 21], "and what is left is too short"
    assert [len(d) for d in long_documents(ids, END, 9, 20, 10_000)] == [21, 21, 11]
    assert [len(d) for d in long_documents(ids, END, 10, 20, 35)] == [21, 16]
    for document in long_documents(ids, END, 9, 20, 10_000):
        assert document[0] == END


def test_table_picture_and_json(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = probe(lively_model(MEMORY[0]), stream(40, 60))
    console = Console(file=io.StringIO(), width=100)
    show(result, console)
    text = console.file.getvalue()
    for words in (
        "Levels",
        "Distance in segments",
        "Long documents",
        "never before",
        "Carrying the memory",
        "read share",
    ):
        assert words in text
    assert write(result, tmp_path / "new").read_bytes().startswith(b"\x89PNG")
    values = json.loads((tmp_path / "new" / "memory.json").read_text())
    assert values == json.loads(json.dumps(result.to_dict()))
    assert values["gain_beyond_window"] == pytest.approx(result.beyond[0])


def test_one_document_tells_no_error() -> None:
    """A standard error of one document does not exist: null in JSON, and no verdict."""
    result = probe(lively_model(MEMORY[0]), stream(60))
    console = Console(file=io.StringIO(), width=100)
    show(result, console)
    assert "cannot be judged from one document" in " ".join(console.file.getvalue().split())
    assert "NaN" not in json.dumps(result.to_dict())
    assert result.to_dict()["gain_error"] is None


def test_the_error_beyond_the_window_is_that_of_documents() -> None:
    """Ratio of sums over documents, each one observation; a last window that one document reaches changes nothing."""
    model, lengths = lively_model(MEMORY[0]), (15, 18, 25, 47)
    result = probe(model, stream(*lengths))
    assert np.isnan(result.positions[-1].error), "only one document is so long"
    totals, counts = [], []
    for document in long_documents(stream(*lengths), END, 10, 1000, 10_000):
        parts = [nats(model, document[start : start + 11]) for start in range(0, len(document) - 1, 10)]
        totals.append((np.concatenate(parts) - nats(model, document))[10:].sum())
        counts.append(len(document) - 11)
    gain = sum(totals) / sum(counts)
    error = sum((total - count * gain) ** 2 for total, count in zip(totals, counts, strict=True)) ** 0.5 / sum(counts)
    assert result.later.tokens == sum(counts)
    assert result.beyond == pytest.approx((gain, error), rel=1e-3)
    console = Console(file=io.StringIO(), width=100)
    show(result, console)
    assert "cannot be judged" not in console.file.getvalue()


def test_mistakes() -> None:
    model, ids = build(MEMORY[0]), stream(40)
    with pytest.raises(UserError, match="no memory to look into"):
        probe_memory(build("transformer"), ids, END)
    with pytest.raises(UserError, match="window 7 must be a multiple of the model's segment, 5; give --window 5"):
        probe(model, ids, window=7)
    with pytest.raises(UserError, match="length 10 must exceed the window, 10"):
        probe(model, ids, length=10)
    with pytest.raises(UserError, match="batch size 0 must be at least 1"):
        probe(model, ids, batch_size=0)
    with pytest.raises(UserError, match="no document longer than the window of 40 tokens"):
        probe(model, ids, window=40)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert not caught.value.code
    return capsys.readouterr().out


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.bytes()
    save_checkpoint(tmp_path / "model", build(MEMORY[0], vocab_size=257), tokenizer=tokenizer)
    (tmp_path / "text.txt").write_text("a long text of some length, " * 10)
    arguments = ["probe", "memory", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt"), "--window", "20"]
    out = run(capsys, *arguments, "--json")
    assert json.loads(out)["documents"] == 1
    assert json.loads(out)["tokens"] == 280
    out = run(capsys, *arguments)
    assert "Long documents" in out
    assert study.FURTHEST[-1] == 16
