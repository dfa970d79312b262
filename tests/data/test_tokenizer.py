"""Reports R01, R05, R08, R26 and R46: nothing is lost, invented or miscounted between text and ids."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrmlm.data.checks import byte_alphabet
from hrmlm.data.tokenizer import END_OF_TEXT, TextStream, Tokenizer
from hrmlm.errors import UserError

from .examples import HARD_TEXTS, gpt2, small_bpe, tokenizer_json, write_tokenizer


@pytest.fixture(params=["bytes", "bpe", "gpt2"])
def tokenizer(request) -> Tokenizer:
    if request.param == "gpt2":
        return gpt2(request.getfixturevalue("shared") / "data" / "gpt2")
    return Tokenizer.bytes() if request.param == "bytes" else small_bpe()


def _check_lossless(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.end_of_text not in ids
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_hard_texts_survive(tokenizer):
    for text in HARD_TEXTS:
        _check_lossless(tokenizer, text)
    assert tokenizer.encode_batch(HARD_TEXTS) == [tokenizer.encode(text) for text in HARD_TEXTS]


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_survives(text):
    _check_lossless(small_bpe(), text)
    _check_lossless(Tokenizer.bytes(), text)


@given(st.lists(st.integers(0, 256)))
@settings(max_examples=200, deadline=None)
def test_streamed_text_equals_whole_text_for_any_ids(ids):
    stream = TextStream(Tokenizer.bytes())
    assert "".join(map(stream.push, ids)) + stream.finish() == Tokenizer.bytes().decode(ids)


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_stream_that_stops_inside_a_character(kept):
    tokenizer, stream = Tokenizer.bytes(), TextStream(Tokenizer.bytes())
    shown = "".join(map(stream.push, tokenizer.encode("😀")[:kept]))
    assert shown == ("😀" if kept == 4 else "")
    assert stream.finish() == ("" if kept == 4 else "\ufffd")


def test_invalid_byte_does_not_hold_the_stream_back():
    stream = TextStream(Tokenizer.bytes())
    assert stream.push(0xFF) == "\ufffd"
    assert stream.push(0xF0) == ""
    assert stream.push(ord("a")) == "\ufffda"


def test_bytes_that_are_not_utf8():
    raw = b"\xff\x00ok\xf0\x9f"
    assert Tokenizer.bytes().decode_bytes(Tokenizer.bytes().encode(raw)) == raw
    with pytest.raises(UserError, match="byte 0"):
        small_bpe().encode(raw)
    assert small_bpe().encode("é".encode()) == small_bpe().encode("é")


@pytest.mark.parametrize("bad", [-1, 257, 10**9])
def test_id_without_text_is_refused(bad):
    with pytest.raises(UserError, match=f"id {bad} .* 0 to 256"):
        Tokenizer.bytes().decode([bad])


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"character 1 .*surrogate"):
        tokenizer.encode("a\ud83d")


def test_end_mark_is_shown_only_on_request(tokenizer):
    ids = [*tokenizer.encode("a"), tokenizer.end_of_text]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, show_end=True) == f"a{END_OF_TEXT}"
    assert tokenizer.token_bytes[tokenizer.end_of_text] == 0


def test_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert (again.fingerprint, again.vocab_size) == (tokenizer.fingerprint, tokenizer.vocab_size)
    assert again.encode_batch(HARD_TEXTS) == tokenizer.encode_batch(HARD_TEXTS)


def test_training_is_repeatable_and_keeps_all_bytes():
    texts = ["one two three, one two", "two three"]
    first, second = Tokenizer.train(texts, 270), Tokenizer.train(texts, 270)
    assert first.fingerprint == second.fingerprint != small_bpe().fingerprint
    assert first.vocab_size <= 270
    assert first.end_of_text == first.vocab_size - 1
    _check_lossless(first, "日本語, never seen in training")


def test_vocabulary_too_small_for_the_bytes():
    assert Tokenizer.train(["abc"], 257).vocab_size == 257
    with pytest.raises(UserError, match=r"256 .*257"):
        Tokenizer.train(["abc"], 256)


def test_tokenizer_without_end_mark_gets_one(tmp_path):
    content = tokenizer_json(added_tokens=[])
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, content))
    assert tokenizer.end_mark_added
    assert tokenizer.end_of_text == len(content["model"]["vocab"]) == tokenizer.vocab_size - 1
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert not again.end_mark_added
    assert again.fingerprint == tokenizer.fingerprint


def test_ordinary_added_tokens_count_as_text_and_special_ones_do_not(tmp_path):
    content = tokenizer_json()
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    first = content["added_tokens"][0]["id"] + 1
    content["added_tokens"] += [
        {"id": first, "content": "two  spaces", "special": False, **common},
        {"id": first + 1, "content": "<|user|>", "special": True, **common},
    ]
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, content))
    assert first in tokenizer.encode("has two  spaces")
    _check_lossless(tokenizer, "has two  spaces <|user|> x<|user|>")
    assert first + 1 not in tokenizer.encode("<|user|>")
    assert tokenizer.token_bytes[first : first + 2].tolist() == [len("two  spaces"), 0]


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LOSSY = {
    "not BPE": {"model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}},
    "normalizes text .Lowercase": {"normalizer": {"type": "Lowercase"}},
    "space in front": {"pre_tokenizer": _BYTE_LEVEL | {"add_prefix_space": True}},
    "Whitespace can drop": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, _BYTE_LEVEL]}
    },
    "not byte-level": {"pre_tokenizer": None},
    "have no token": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},
    "at random": {"model": tokenizer_json()["model"] | {"dropout": 0.1}},
    "has no `model`": {"model": None},
}


@pytest.mark.parametrize("reason", _LOSSY)
def test_tokenizers_that_lose_text_are_refused_with_the_reason(reason, tmp_path):
    file = write_tokenizer(tmp_path, tokenizer_json(**_LOSSY[reason]))
    with pytest.raises(UserError, match=reason):
        Tokenizer.load(file)


def test_tokenizer_whose_words_are_special_tokens_is_refused(tmp_path):
    """With whole words looked up first, a document could write the end mark itself."""
    content = tokenizer_json(pre_tokenizer=_BYTE_LEVEL | {"use_regex": False})
    content["model"] |= {"ignore_merges": True}
    content["model"]["vocab"][END_OF_TEXT] = content["added_tokens"][0]["id"]
    with pytest.raises(UserError, match="turns ordinary text into special tokens"):
        Tokenizer.load(write_tokenizer(tmp_path, content))


def test_files_that_are_no_tokenizer(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        Tokenizer.load(tmp_path)
    for content in ("{", "[]", json.dumps(tokenizer_json(model={"type": "BPE", "vocab": 3}))):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError):
            Tokenizer.load(tmp_path)


def test_gpt2_ids_are_the_published_ones(shared):
    tokenizer = gpt2(shared / "data" / "gpt2")
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.end_of_text == 50256
    assert not tokenizer.end_mark_added


def test_byte_alphabet_is_the_library_s():
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(byte_alphabet()) == sorted(ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
