"""Cutting a long text where a byte-level tokenizer would cut it anyway.

A pre-tokenizer splits text into words, and byte-level BPE never merges across two words. So a text may be cut at any
place that is a word boundary whatever stands before and after it. For the expressions in SAFE_PATTERNS two kinds of
place are such boundaries:

- after a single newline that stands between two non-space characters;
- before a single space that stands between two non-space characters.

In both, the word on the left ends without looking at what comes next, and no alternative of the expression can begin on
the left and end on the right.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

PIECE = 1 << 16
"""Characters of a piece: large enough to cost nothing, small enough to share among processor cores."""

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SAFE_PATTERNS = frozenset(
    {
        GPT2_PATTERN,
        _HEAD + r"\p{N}{1,3}" + _TAIL,  # cl100k and what derives from it
        _HEAD + r"\p{N}" + _TAIL,  # the same with single digits
    }
)

_CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")
_WINDOW = 1 << 12


def splits_safely(pre_tokenizer: dict[str, Any] | None, added_texts: Iterable[str] = ()) -> bool:
    """Whether the places described above are word boundaries of this pre-tokenizer (as in tokenizer.json).

    added_texts: texts of added tokens that are matched in ordinary text. One that can cover a cut makes all unsafe.
    """
    if any(_covers_cut(text) for text in added_texts):
        return False
    steps = pre_tokenizer_steps(pre_tokenizer)
    # Behind the byte mapping a space is a visible character, so a regular expression there means something else.
    if not steps or any(step["type"] == "ByteLevel" for step in steps[:-1]):
        return False
    if not all(step["type"] in ("ByteLevel", "Digits") or _is_safe_split(step) for step in steps):
        return False
    last = steps[-1]
    uses_gpt2 = last["type"] == "ByteLevel" and last.get("use_regex", True)
    return uses_gpt2 or any(step["type"] == "Split" for step in steps)


def _is_safe_split(step: dict[str, Any]) -> bool:
    return (
        step["type"] == "Split"
        and step["behavior"] == "Isolated"
        and not step.get("invert", False)
        and step["pattern"].get("Regex") in SAFE_PATTERNS
    )


def pre_tokenizer_steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer in order, with nested sequences opened."""
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for part in pre_tokenizer["pretokenizers"] for step in pre_tokenizer_steps(part)]
    return [pre_tokenizer]


def _covers_cut(text: str) -> bool:
    """Whether an added token, amid other characters, can hold characters on both sides of a cut."""
    return any(1 < match.start() < 1 + len(text) for match in _CUT.finditer(f"x{text}x"))


def last_cut(text: str) -> int:
    """The last safe place to cut `text`, as an index between 1 and len(text) - 1; 0 if there is none."""
    end = len(text)
    while end > 1:
        start = max(0, end - _WINDOW)
        matches = _CUT.finditer(text, start, min(len(text), end + 2))  # looks back beyond start by itself
        places = [match.start() for match in matches if 0 < match.start() < len(text)]
        if places:
            return places[-1]
        end = start
    return 0


def cut(parts: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """The text that `parts` make together, in pieces of about `size` characters that end at safe places.

    Memory: a few pieces; a stretch without any safe place stays one piece, however long it is.
    """
    waiting: list[str] = []
    length, enough = 0, size
    for part in parts:
        for start in range(0, len(part), size):
            waiting.append(part[start : start + size])
            length += len(waiting[-1])
            if length < enough:
                continue
            text = "".join(waiting)
            place = last_cut(text)
            if place:
                yield text[:place]
            waiting, length = [text[place:]], len(text) - place
            enough = size if place else 2 * length  # doubled, or searching again and again would take quadratic time
            enough = max(enough, length + 1)
    if length:
        yield "".join(waiting)
