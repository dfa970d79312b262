"""Counting the words that token ids stand for."""

import codecs
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hrmlm.data.tokenizer import Tokenizer

_CHUNK = 1 << 18  # ids decoded at a time


def count_words(tokenizer: "Tokenizer", ids: NDArray[np.integer]) -> int:
    """Whitespace-separated words (as of `str.split`) of the text of `ids`; end-of-text marks separate words too."""
    newline = tokenizer.encode("\n")[0]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    words, inside = 0, False
    for start in range(0, len(ids), _CHUNK):
        part = np.asarray(ids[start : start + _CHUNK])
        part = np.where(tokenizer.token_bytes[part] == 0, newline, part)
        text = decoder.decode(tokenizer.decode_bytes(part.tolist()), final=start + _CHUNK >= len(ids))
        if text:
            words += len(text.split()) - (inside and not text[0].isspace())
            inside = not text[-1].isspace()
    return words
