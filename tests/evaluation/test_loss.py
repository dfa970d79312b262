"""Reports on text: ratios of one total, exact bytes, marks apart, everything to repeat them (R25-R27, R31)."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hrmlm.data.prepare import prepare
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.data.tokens import PreparedData
from hrmlm.errors import UserError
from hrmlm.evaluation.loss import LossReport, evaluate_data, evaluate_file, evaluate_ids, show
from hrmlm.evaluation.words import count_words
from hrmlm.models import build_model
from tests.families import FAMILIES

TEXT = "  Wörter, слова and 言葉 👩‍👩‍👧 \t tabs\r\n\nnew  lines é e\u0301\u00a0end  " * 3
BYTES = Tokenizer.bytes()
BPE = Tokenizer.train([TEXT, "some more words, some more text " * 5], 300)
tokenizers = pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])


def model_for(tokenizer: Tokenizer, uniform: bool = False, **changes: Any) -> torch.nn.Module:
    model = build_model({**FAMILIES["transformer"], "vocab_size": tokenizer.vocab_size, **changes})
    with torch.no_grad():
        model.embedding.weight.mul_(0.0 if uniform else 10.0)
    return model


@tokenizers
def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(tokenizer: Tokenizer) -> None:
    report = evaluate_ids(model_for(tokenizer, uniform=True), tokenizer.encode(TEXT), tokenizer, window=16)
    assert report.perplexity == pytest.approx(tokenizer.vocab_size, rel=1e-6)


@tokenizers
def test_all_ratios_come_from_one_total(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    report = evaluate_ids(model_for(tokenizer), ids, tokenizer, window=16, stride=5)
    assert (report.tokens, report.bytes, report.words) == (len(ids), len(TEXT.encode()), len(TEXT.split()))
    values = report.to_dict()
    assert values["perplexity"] == pytest.approx(math.exp(values["total_nats"] / values["tokens"]), rel=1e-9)
    assert values["word_perplexity"] == pytest.approx(math.exp(values["total_nats"] / values["words"]), rel=1e-9)
    assert values["bits_per_byte"] == pytest.approx(values["total_nats"] / (math.log(2) * values["bytes"]), rel=1e-9)
    assert values["nats_per_token"] == pytest.approx(values["total_nats"] / values["tokens"], rel=1e-9)


@tokenizers
def test_bytes_do_not_depend_on_the_window(tokenizer: Tokenizer) -> None:
    model, ids = model_for(tokenizer, context=1024), tokenizer.encode(TEXT)
    for window in (16, 64, 1024):
        assert evaluate_ids(model, ids, tokenizer, window=window).bytes == len(TEXT.encode())


def test_bytes_that_are_not_utf8_count_too() -> None:
    report = evaluate_ids(model_for(BYTES), BYTES.encode(b"\xff\xfe ok \xf0\x9f"), BYTES)
    assert (report.bytes, report.words) == (8, 3)


def test_end_marks_stand_apart() -> None:
    model, ids = model_for(BYTES), BYTES.encode(TEXT)
    reports = [evaluate_ids(model, ids + [BYTES.end_of_text] * k, BYTES) for k in (0, 1, 5)]
    assert [report.end_marks.count for report in reports] == [0, 1, 5]
    assert reports[2].end_marks.nats > reports[1].end_marks.nats > reports[0].end_marks.nats == 0.0
    for report in reports:
        assert report.bits_per_byte == pytest.approx(reports[0].bits_per_byte, rel=1e-6)
        assert "end-of-text marks inside the stream are scored apart" in report.rule


@pytest.mark.parametrize("count", [0, 3])
def test_nothing_to_score_is_undefined_and_said(count: int) -> None:
    report = evaluate_ids(model_for(BYTES), [BYTES.end_of_text] * count, BYTES)
    assert report.bits_per_byte is report.perplexity is report.nats_per_token is report.word_perplexity is None
    assert report.end_marks.count == count
    assert "undefined" in report.notes[0]
    assert "undefined" in shown(report)
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_perplexity_beyond_all_numbers_is_no_crash() -> None:
    report = evaluate_ids(model_for(BYTES), BYTES.encode("x" * 2000), BYTES)
    assert report.words == 1
    assert report.word_perplexity is None
    assert "word perplexity is too large" in report.notes[0]


def test_the_first_token_is_scored_after_an_end_mark() -> None:
    model = model_for(BYTES)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([[BYTES.end_of_text]])).logits[0, 0]
    report = evaluate_ids(model, [65], BYTES)
    assert report.total_nats == pytest.approx(-float(logits.log_softmax(-1)[65]), rel=1e-6)


def test_padded_vocabulary_has_no_share() -> None:
    model = model_for(BYTES, uniform=True, vocab_size=320, used_vocab=257)
    assert evaluate_ids(model, BYTES.encode(TEXT), BYTES).perplexity == pytest.approx(257, rel=1e-6)
    with pytest.raises(UserError, match="token id 300 is outside the tokenizer's vocabulary of 257"):
        evaluate_ids(model, [300], BYTES)


def test_the_report_repeats_the_number(tmp_path: Path) -> None:
    """R31: the settings in the report, applied again, give the same report; versions, precision and depth are there."""
    model = build_model({**FAMILIES["hrm_lm"], "vocab_size": 257})
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    first = evaluate_file(model, file, BYTES, window=32, stride=8, depth=1, checkpoint="runs/x").to_dict()
    settings = {key: first[key] for key in ("window", "stride", "batch_size", "depth", "checkpoint")}
    assert evaluate_file(model, Path(first["data_path"]), BYTES, **settings).to_dict() == first
    assert first["schedule"] == [item.name for item in model.schedule(1)]
    assert (first["precision"], first["device"]) == ("float32", "cpu")
    assert first["tokenizer"] == BYTES.fingerprint
    assert first["hrmlm_version"]
    assert first["torch_version"] == torch.__version__
    json.dumps(first, allow_nan=False)


def test_autocast_is_recorded() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert evaluate_ids(model_for(BYTES), [65], BYTES).precision == "float32, autocast bfloat16"


def test_prepared_data_and_its_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first words\nof a text\n" * 4)
    (tmp_path / "v.txt").write_text("other words")
    prepare([str(tmp_path / "a.txt")], tmp_path / "data", tokenizer="bytes", valid=[str(tmp_path / "v.txt")])
    data = PreparedData.open(tmp_path / "data")
    report = evaluate_data(model_for(BYTES), data, "valid", data_path=str(tmp_path / "data"))
    assert (report.tokens, report.bytes, report.words, report.end_marks.count) == (11, 11, 2, 1)
    assert (report.data, report.split) == (data.meta.fingerprint, "valid")
    text_alone = evaluate_file(model_for(BYTES), tmp_path / "v.txt", BYTES)
    assert text_alone.bytes == report.bytes
    with pytest.raises(UserError, match="no split 'test'"):
        evaluate_data(model_for(BYTES), data, "test")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"", "is empty"), (b"ok \xff", "invalid UTF-8 at byte 3")]
)
def test_bad_files_are_refused_by_name(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=rf"text\.txt.*{message}"):
        evaluate_file(model_for(BYTES), file, BYTES)


@tokenizers
def test_a_long_file_is_encoded_in_pieces_without_a_trace(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file, text = tmp_path / "text.txt", TEXT * 5
    file.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hrmlm.data.pieces.cut.__defaults__", (40,))
        report = evaluate_file(model_for(tokenizer), file, tokenizer)
    whole = evaluate_ids(model_for(tokenizer, uniform=True), tokenizer.encode(text), tokenizer)
    assert (report.tokens, report.bytes, report.words) == (whole.tokens, whole.bytes, whole.words)


@given(st.lists(st.text(st.sampled_from("aé言 \n\t\u00a0\u2003"), max_size=12), max_size=5), st.integers(1, 7))
def test_words_are_those_of_the_documents_wherever_the_chunks_end(documents: list[str], chunk: int) -> None:
    ids = [token for text in documents for token in [*BYTES.encode(text), BYTES.end_of_text]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hrmlm.evaluation.words._CHUNK", chunk)
        assert count_words(BYTES, np.array(ids, dtype=np.int64)) == sum(len(text.split()) for text in documents)


def test_the_table_tells_the_numbers_and_the_rule() -> None:
    text = shown(evaluate_ids(model_for(BPE), [*BPE.encode(TEXT), BPE.end_of_text], BPE, data_path="my data"))
    for words in (
        "my data",
        "bits per byte",
        "perplexity (per token)",
        "end-of-text marks (apart)",
        "stride 64",
        "rule:",
    ):
        assert words in text


def shown(report: LossReport) -> str:
    console = Console(record=True, width=300, file=SimpleNamespace(write=lambda text: None, flush=lambda: None))
    show(report, console)
    return console.export_text()
