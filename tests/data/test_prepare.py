"""Reports R01, R03 and R05, the split, and a prepared directory that is whole or not there."""

import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hrmlm.data.checks import byte_alphabet
from hrmlm.data.prepare import prepare
from hrmlm.data.tokenizer import END_OF_TEXT, Tokenizer
from hrmlm.data.tokens import PreparedData
from hrmlm.data.verify import verify
from hrmlm.errors import UserError

from .examples import HARD_TEXTS, corpus, small_bpe, tokenizer_json, write_tokenizer

_TEXTS = [text for text in HARD_TEXTS if text]


def _documents(data: PreparedData, split: str) -> list[bytes]:
    ids = data.split(split)[:]
    ends = np.flatnonzero(ids == data.tokenizer.end_of_text)
    assert ends[-1] == len(ids) - 1
    starts = [0, *(ends[:-1] + 1)]
    return [data.tokenizer.decode_bytes(ids[start:end]) for start, end in zip(starts, ends, strict=True)]


def _check(data: PreparedData, texts: list[str]) -> None:
    """What must hold for any corpus divided into train and valid."""
    train, valid = _documents(data, "train"), _documents(data, "valid")
    assert sorted(train + valid) == sorted(text.encode() for text in texts)
    assert train
    assert valid
    assert not set(train) & set(valid)
    for name, documents in (("train", train), ("valid", valid)):
        split = data.meta.splits[name]
        assert split.documents == len(documents)
        assert split.bytes == sum(map(len, documents)) == data.tokenizer.token_bytes[data.split(name)[:]].sum()
        assert split.tokens == len(data.split(name))
    verify([data])


@pytest.mark.parametrize("kind", ["bpe", "bytes", "file"])
def test_every_byte_and_document_comes_back(kind, tmp_path):
    small_bpe().save(tmp_path)
    tokenizer = str(tmp_path / "tokenizer.json") if kind == "file" else kind
    meta = prepare([corpus(tmp_path / "a.jsonl", _TEXTS)], tmp_path / "out", tokenizer=tokenizer, vocab_size=300)
    data = PreparedData.open(tmp_path / "out")
    assert data.meta == meta
    _check(data, _TEXTS)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "meta.json",
        "tokenizer.json",
        "train.bin",
        "valid.bin",
    ]


@given(
    st.lists(st.sampled_from(["a", "b", "b" * 90, "longer text\n"]) | st.text(min_size=1, max_size=50), max_size=20),
    st.floats(0.001, 0.999),
    st.integers(0, 5),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_split_of_any_corpus(tmp_path_factory, texts, fraction, seed):
    directory = tmp_path_factory.mktemp("split")
    source = corpus(directory / "a.jsonl", texts)
    out = directory / "out"
    if len(set(texts)) < 2:
        with pytest.raises(UserError, match=r"one document|same document|is empty|holds no text"):
            prepare([source], out, tokenizer="bytes", valid_fraction=fraction, seed=seed)
        assert sorted(directory.iterdir()) == [directory / "a.jsonl"]
    else:
        prepare([source], out, tokenizer="bytes", valid_fraction=fraction, seed=seed)
        _check(PreparedData.open(out), texts)


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_tiny_corpus_and_tiny_fraction(count, tmp_path):
    texts = [f"document {number}" for number in range(count)]
    source = corpus(tmp_path / "a.jsonl", texts)
    if count == 1:
        with pytest.raises(UserError, match=r"one document.*--valid.*--separator"):
            prepare([source], tmp_path / "out", tokenizer="bytes", valid_fraction=0.01)
    else:
        meta = prepare([source], tmp_path / "out", tokenizer="bytes", valid_fraction=0.01)
        _check(PreparedData.open(tmp_path / "out"), texts)
        assert meta.splits["valid"].documents == 1
        assert "instead of 1.0%" in meta.warnings[0]


def test_split_has_the_asked_size_depends_on_the_seed_and_not_on_the_order(tmp_path):
    texts = [f"{number} " * (number % 7 + 1) for number in range(2000)]
    chosen = []
    for name, order, seed in (("a", texts, 0), ("b", texts[::-1], 0), ("c", texts, 1)):
        source = corpus(tmp_path / f"{name}.jsonl", order)
        prepare([source], tmp_path / name, tokenizer="bytes", valid_fraction=0.1, seed=seed)
        data = PreparedData.open(tmp_path / name)
        chosen.append(sorted(_documents(data, "valid")))
        total = sum(split.bytes for split in data.meta.splits.values())
        assert 0.1 <= data.meta.splits["valid"].bytes / total < 0.11
    assert chosen[0] == chosen[1] != chosen[2]


def test_one_huge_document_does_not_take_the_validation_split(tmp_path):
    texts = ["x" * 100_000, *[f"small {number}" for number in range(300)]]
    for seed in range(4):
        meta = prepare(
            [corpus(tmp_path / "a.jsonl", texts)],
            tmp_path / str(seed),
            tokenizer="bytes",
            valid_fraction=0.02,
            seed=seed,
        )
        assert meta.splits["valid"].bytes < 5000


def test_same_input_gives_the_same_files(tmp_path):
    source = corpus(tmp_path / "a.jsonl", _TEXTS)
    first = prepare([source], tmp_path / "1", vocab_size=300)
    second = prepare([source], tmp_path / "2", vocab_size=300)
    assert first == second
    assert first.fingerprint != prepare([source], tmp_path / "3", vocab_size=270).fingerprint


def test_ids_beyond_16_bits_survive(tmp_path):
    alphabet = list(byte_alphabet())
    pairs = sorted(product(alphabet, repeat=2), key=lambda pair: "".join(pair).isascii() and "".join(pair).isalpha())
    quads = [("AA", a + b) for a, b in pairs[256 + len(pairs) + 1 - 70_000 :]]
    merges = [*pairs, *quads]
    vocab = {token: number for number, token in enumerate([*alphabet, *map("".join, merges), END_OF_TEXT])}
    pre_tokenizer = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = tokenizer_json()["model"] | {"vocab": vocab, "merges": merges}
    mark = tokenizer_json()["added_tokens"][0] | {"id": 69_999}
    file = write_tokenizer(tmp_path, tokenizer_json(model=model, pre_tokenizer=pre_tokenizer, added_tokens=[mark]))
    tokenizer = Tokenizer.load(file)
    wanted = [0, 65_535, 65_536, 69_998]
    texts = [tokenizer.decode([token]) for token in wanted]
    assert tokenizer.encode_batch(texts) == [[token] for token in wanted]
    train = corpus(tmp_path / "a.jsonl", texts)
    meta = prepare([train], tmp_path / "out", tokenizer=str(file), valid=[corpus(tmp_path / "b.jsonl", ["v"])])
    assert (meta.dtype, meta.vocab_size) == ("uint32", 70_000)
    data = PreparedData.open(tmp_path / "out")
    assert data.split("train")[:].tolist() == [id_ for token in wanted for id_ in (token, 69_999)]
    with pytest.raises(UserError, match=r"70000 ids, but the model has only 60000"):
        data.check_vocab(60_000)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_smallest_type_that_holds_every_id(vocab_size, dtype):
    from hrmlm.data.meta import dtype_for

    assert dtype_for(vocab_size) == dtype
    assert np.iinfo(dtype).max >= vocab_size - 1


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_quoted_end_marks_stay_text(kind, tmp_path):
    texts = ["before", f"quotes {END_OF_TEXT} and {END_OF_TEXT}.", "after"]
    source, valid = corpus(tmp_path / "a.jsonl", texts), corpus(tmp_path / "b.jsonl", ["valid"])
    prepare([source], tmp_path / "out", tokenizer=kind, vocab_size=280, valid=[valid])
    data = PreparedData.open(tmp_path / "out")
    assert (data.split("train")[:] == data.tokenizer.end_of_text).sum() == 3
    assert _documents(data, "train") == [text.encode() for text in texts]


def test_given_splits_are_kept_and_shared_documents_reported(tmp_path):
    train = corpus(tmp_path / "train.jsonl", ["one", "two", "three", "two"])
    valid = corpus(tmp_path / "valid.jsonl", ["two", "four"])
    test = corpus(tmp_path / "test.jsonl", ["five"])
    meta = prepare([train], tmp_path / "out", tokenizer="bytes", valid=[valid], test=[test])
    data = PreparedData.open(tmp_path / "out")
    assert _documents(data, "train") == [b"one", b"two", b"three", b"two"]
    assert _documents(data, "valid") == [b"two", b"four"]
    assert _documents(data, "test") == [b"five"]
    assert meta.splits["valid"].shared_with_train == 1
    assert meta.warnings == ("1 of 2 documents of valid also stand in train",)
    assert [source.split for source in meta.sources] == ["train", "valid", "test"]


def test_one_document_with_given_validation(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"only one\r\n")
    (tmp_path / "v.txt").write_bytes(b"another")
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes", valid=[str(tmp_path / "v.txt")])
    assert _documents(PreparedData.open(tmp_path / "out"), "train") == [b"only one\r\n"]


def test_given_test_split_beside_a_divided_corpus(tmp_path):
    texts = [f"text {number}" for number in range(50)]
    meta = prepare(
        [corpus(tmp_path / "a.jsonl", texts)],
        tmp_path / "out",
        tokenizer="bytes",
        test=[corpus(tmp_path / "t.jsonl", texts[:10])],
    )
    data = PreparedData.open(tmp_path / "out")
    shared = set(_documents(data, "test")) & set(_documents(data, "train"))
    assert meta.splits["test"].shared_with_train == len(shared) > 0


def test_separator_makes_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n\n\nthree\n\n")
    meta = prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="bytes", separator="\n\n")
    _check(PreparedData.open(tmp_path / "out"), ["one", "two", "three"])
    assert meta.sources[0].skipped_empty == 1


def test_long_documents_get_the_ids_of_the_whole_text(tmp_path, monkeypatch):
    monkeypatch.setattr("hrmlm.data.encode._BATCH", 50_000)
    text = "".join(f"line {number} of\ta long document, it's 😀\n" * 3 + "\n" for number in range(3000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "v.txt").write_text("v")
    small_bpe().save(tmp_path)
    tokenizer = str(tmp_path / "tokenizer.json")
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer=tokenizer, valid=[str(tmp_path / "v.txt")])
    expected = [*small_bpe().encode_batch([text])[0], small_bpe().end_of_text]
    assert PreparedData.open(tmp_path / "out").split("train")[:].tolist() == expected


def test_standard_input_is_spooled_and_the_copy_removed(tmp_path):
    code = "from hrmlm.data.prepare import prepare; prepare(['-'], 'out', tokenizer='bytes', separator='|')"
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], input=b"one|two|three", cwd=tmp_path, env=environment, check=True)
    _check(PreparedData.open(tmp_path / "out"), ["one", "two", "three"])
    assert not (tmp_path / "out" / "spool").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"valid_fraction": 0.0}, "valid fraction 0.0"),
        ({"valid_fraction": 1.0}, "valid fraction 1.0"),
        ({"valid_fraction": float("nan")}, "valid fraction nan"),
        ({"vocab_size": 100}, "vocabulary size 100 is too small"),
        ({"tokenizer": "wordpiece"}, "neither `bpe` nor `bytes`"),
        ({"separator": ""}, "separator is empty"),
        ({"valid": ["nowhere.txt"]}, "unknown source 'nowhere.txt'"),
        ({"field": "body"}, "has no field 'body'"),
    ],
)
def test_mistakes_leave_nothing_behind(options, message, tmp_path):
    source = corpus(tmp_path / "a.jsonl", ["one", "two"])
    with pytest.raises(UserError, match=message):
        prepare([source], tmp_path / "sub" / "out", **options)
    assert not list(tmp_path.glob("sub/*"))


def test_existing_output_is_never_overwritten(tmp_path):
    source = corpus(tmp_path / "a.jsonl", ["one", "two"])
    (tmp_path / "out").mkdir()
    prepare([source], tmp_path / "out", tokenizer="bytes")
    with pytest.raises(UserError, match="exists already"):
        prepare([source], tmp_path / "out", tokenizer="bytes")


def test_sources_that_change_in_between_are_noticed(tmp_path, monkeypatch):
    source = tmp_path / "a.jsonl"
    for later in (["one", "two", "three"], ["one"], ["one", "twofold"]):
        corpus(source, ["one", "two"])
        from hrmlm.data import prepare as module

        original = module.choose_valid

        def changed(*arguments, later=later, original=original):
            corpus(source, later)
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(module, "choose_valid", changed)
            with pytest.raises(UserError, match="changed while they were read"):
                prepare([str(source)], tmp_path / "out", tokenizer="bytes")
        assert not (tmp_path / "out").exists()


def test_vocabulary_that_stays_small_is_told(tmp_path):
    meta = prepare([corpus(tmp_path / "a.jsonl", ["one", "two"])], tmp_path / "out", vocab_size=8192)
    assert f"gives only {meta.vocab_size} ids instead of 8192" in meta.warnings[-1]
