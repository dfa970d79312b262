"""Prepared data that are damaged, foreign or not there: one line that says so."""

import json
from pathlib import Path

import pytest

from hrmlm.data.prepare import prepare
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.data.tokens import PreparedData
from hrmlm.data.verify import verify
from hrmlm.errors import UserError

from .examples import corpus, small_bpe


@pytest.fixture
def prepared(tmp_path) -> Path:
    prepare([corpus(tmp_path / "a.jsonl", ["one", "two", "three"])], tmp_path / "out", tokenizer="bytes")
    return tmp_path / "out"


def test_opening_what_is_no_prepared_data(prepared, tmp_path):
    with pytest.raises(UserError, match=r"is not a directory; make it with"):
        PreparedData.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no meta\.json"):
        PreparedData.open(tmp_path)
    with pytest.raises(UserError, match=r"no split 'test'; it has train, valid"):
        PreparedData.open(prepared).split("test")


def test_opening_damaged_data(prepared):
    whole = (prepared / "train.bin").read_bytes()
    (prepared / "train.bin").write_bytes(whole[:-1])
    with pytest.raises(UserError, match=rf"train\.bin has {len(whole) - 1} bytes instead of {len(whole)}"):
        PreparedData.open(prepared)
    (prepared / "train.bin").write_bytes(b"\x01" + whole[1:])
    with pytest.raises(UserError, match=r"train\.bin was changed"):
        verify([PreparedData.open(prepared)])
    (prepared / "train.bin").unlink()
    with pytest.raises(UserError, match=r"train\.bin is missing"):
        PreparedData.open(prepared)


def test_opening_with_another_tokenizer(prepared):
    small_bpe().save(prepared)
    with pytest.raises(UserError, match=rf"{small_bpe().fingerprint}.*{Tokenizer.bytes().fingerprint}"):
        PreparedData.open(prepared)
    (prepared / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="does not exist"):
        PreparedData.open(prepared)


def test_opening_another_format(prepared):
    meta = json.loads((prepared / "meta.json").read_text())
    for content, message in (
        (meta | {"format": 2}, "has format 2"),
        ({"x": 1}, "has format None"),
        ([], "has format None"),
        (meta | {"dtype": "int8"}, "dtype"),
        (meta | {"new": 1}, "unknown key"),
    ):
        (prepared / "meta.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            PreparedData.open(prepared)
    (prepared / "meta.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        PreparedData.open(prepared)
