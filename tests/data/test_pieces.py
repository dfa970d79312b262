"""Cut texts get the same ids as whole ones: found by search, and on real corpora."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hrmlm.data.pieces import SAFE_PATTERNS, cut, last_cut, splits_safely
from hrmlm.data.tokenizer import Tokenizer

from .examples import HARD_TEXTS, gpt2, small_bpe, tokenizer_json, write_tokenizer

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_DIGITS = {"type": "Digits", "individual_digits": True}
# Characters at which the regular expressions decide something.
_TEXTS = st.text(st.sampled_from("ab1é漢'sST .,/\n\n\n  \t\r\x1c\x85\u180e\u2028\u3000😀\u0301"), max_size=60)


def _split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: dict) -> dict:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_STEPS = [_sequence(_split(pattern), _BYTE_LEVEL) for pattern in sorted(SAFE_PATTERNS)]
_STEPS.append(_sequence(_DIGITS, _BYTE_LEVEL | {"use_regex": True}))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> list[Tokenizer]:
    directory = tmp_path_factory.mktemp("tokenizers")
    found = [small_bpe()]
    for step in _STEPS:
        found.append(Tokenizer.load(write_tokenizer(directory, tokenizer_json(pre_tokenizer=step))))
    assert all(tokenizer.cuts_safely for tokenizer in found)
    return found


@given(st.lists(_TEXTS | st.text(max_size=20), max_size=4), st.integers(1, 30))
@settings(max_examples=120, deadline=None)
@example(HARD_TEXTS, 5)
def test_pieces_have_the_ids_of_the_whole(tokenizers, parts, size):
    whole = "".join(parts)
    found = list(cut(parts, size))
    assert "".join(found) == whole
    for tokenizer in tokenizers:
        joined = [token for ids in tokenizer.encode_batch(found) for token in ids]
        assert joined == tokenizer.encode_batch([whole])[0]


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [word for word, _ in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]  # type: ignore[attr-defined]


@given(_TEXTS)
@settings(max_examples=120, deadline=None)
def test_words_of_pieces_are_the_words_of_the_whole(tokenizers, whole):
    """Stronger than equal ids, which a tokenizer with few merges gives too easily."""
    found = list(cut([whole], 4))
    for tokenizer in tokenizers:
        assert [word for piece in found for word in _words(tokenizer, piece)] == _words(tokenizer, whole)


@pytest.mark.parametrize("file", ["tinyshakespeare/input.txt", "wikitext-2/valid.txt", "tinystories/stories_a.jsonl"])
def test_real_corpora_in_pieces(shared, file):
    with open(shared / "data" / file, encoding="utf-8", newline="") as opened:
        text = opened.read()[:150_000]
    tokenizer = gpt2(shared / "data" / "gpt2")
    found = list(cut([text], 1_000))
    assert len(found) > 100
    joined = [token for ids in tokenizer.encode_batch(found) for token in ids]
    assert joined == tokenizer.encode_batch([text])[0]


def test_long_texts_are_cut_and_joined_by_encode():
    text = "the cat sat on the mat. " * 25_000
    assert small_bpe().encode(text) == small_bpe().encode_batch([text])[0]


def test_text_without_a_safe_place_stays_whole():
    assert last_cut("x" * 10_000 + "\n\n" + "y" * 10_000) == 0
    assert list(cut(["x" * 1000] * 50, 100)) == ["x" * 50_000]


def test_cut_far_from_the_end_is_found():
    assert last_cut("x" * 5000 + "\n" + "y" * 20_000) == 5001
    assert last_cut("x" * 5000 + " " + "y" * 4096) == 5000


@pytest.mark.parametrize(
    "step",
    [
        None,
        _BYTE_LEVEL,  # one word, however long
        _sequence(_BYTE_LEVEL, _split(sorted(SAFE_PATTERNS)[0])),
        _sequence(_split(r"\n."), _BYTE_LEVEL),
        _sequence(_split(sorted(SAFE_PATTERNS)[0]) | {"behavior": "MergedWithPrevious"}, _BYTE_LEVEL),
    ],
)
def test_unknown_pre_tokenizers_are_never_cut(step):
    assert not splits_safely(step)


def test_added_tokens_that_can_cover_a_cut_forbid_cutting():
    step = _BYTE_LEVEL | {"use_regex": True}
    assert splits_safely(step, ["  ", "\n\n", " y", "y\n", "word"])
    assert not splits_safely(step, ["a b"])
    assert not splits_safely(step, ["a\nb"])
    assert not splits_safely(step, ["b "])
    assert not splits_safely(step, ["\nb"])
