"""Texts that break careless code, and tokenizers to try them with."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from hrmlm.data.tokenizer import Tokenizer

HARD_TEXTS = [
    "",
    " ",
    "plain words, and a number 1234.",
    "emoji 😀 and a family 👨‍👩‍👧‍👦, flags 🇫🇷",
    "漢字かな交じり文。한국어도",
    "e\u0301 a\u0308\u0323 Ünïcödé naïve",
    "  leading, trailing and   inner spaces   ",
    "\ttabs\t\tand\r\nCRLF\r\rCR\n\n\nblank lines\n",
    "\ufeffBOM first, nul \x00 and \x1c separators \x85 \u2028 \u180e x\x1cy",
    "quoted <|endoftext|> and <|endoftext|><|endoftext|>",
    "it's we'll I'd 'S x\n's y\n't",
]


@cache
def small_bpe() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat and the dog ate the cat's 1234 words\n" * 3, *HARD_TEXTS], 400)


@cache
def gpt2(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json that is accepted, with some of its parts replaced."""
    return json.loads(small_bpe()._backend.to_str()) | changes  # type: ignore[attr-defined]


def write_tokenizer(directory: Path, content: dict[str, Any]) -> Path:
    file = directory / "tokenizer.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def corpus(path: Path, texts: list[str]) -> str:
    """A .jsonl file of these texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)
