"""Which tokenizer.json files keep every byte of every text, and the bytes that their ids stand for."""

from typing import Any

import numpy as np

from hrmlm.data.pieces import pre_tokenizer_steps
from hrmlm.errors import UserError

_LOSSLESS_STEPS = ("ByteLevel", "Split", "Digits", "Punctuation", "UnicodeScripts", "FixedLength")


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's visible character for each of the 256 bytes.

    Source: GPT-2 (Radford et al. 2019): printable Latin-1 stands for itself, the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def check_lossless(parts: dict[str, Any], where: str) -> None:
    """Raise UserError with the reason if a tokenizer (the parsed tokenizer.json) can lose or change bytes."""
    reason = _reason(parts)
    if reason:
        raise UserError(
            f"{where} would not give texts back exactly: {reason}; use a byte-level BPE tokenizer or `bytes`"
        )


def _reason(parts: dict[str, Any]) -> str | None:
    model = parts["model"]
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not BPE"
    if model.get("dropout"):
        return f"its merges are dropped at random (dropout {model['dropout']})"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "it adds marks to parts of words"
    return _reason_normalizer(parts.get("normalizer")) or _reason_steps(parts) or _reason_tokens(parts)


def _reason_normalizer(normalizer: dict[str, Any] | None) -> str | None:
    if normalizer is None or (normalizer["type"] == "Sequence" and not normalizer["normalizers"]):
        return None
    return f"it normalizes text ({normalizer['type']})"


def _reason_steps(parts: dict[str, Any]) -> str | None:
    steps = pre_tokenizer_steps(parts.get("pre_tokenizer"))
    for step in steps:
        if step["type"] not in _LOSSLESS_STEPS or step.get("behavior") == "Removed":
            return f"its pre-tokenizer {step['type']} can drop or change characters"
        if step.get("add_prefix_space"):
            return "it adds a space in front of a text"
    if sum(step["type"] == "ByteLevel" for step in steps) != 1:
        return "its pre-tokenizer is not byte-level"
    return None


def _reason_tokens(parts: dict[str, Any]) -> str | None:
    missing = sum(character not in parts["model"]["vocab"] for character in byte_alphabet())
    if missing:
        return f"{missing} of the 256 bytes have no token"
    for token in parts["added_tokens"]:
        if not token["special"] and (token["lstrip"] or token["rstrip"]):
            return f"its added token {token['content']!r} swallows spaces"
    return None


def bytes_of_ids(parts: dict[str, Any]) -> list[bytes]:
    """The bytes that each id stands for: b"" for special tokens and for ids without a token."""
    alphabet = byte_alphabet()
    highest = max([*parts["model"]["vocab"].values(), *(token["id"] for token in parts["added_tokens"])])
    table = [b""] * (highest + 1)
    for token, index in parts["model"]["vocab"].items():
        try:
            table[index] = bytes([alphabet[character] for character in token])
        except KeyError:  # not in the byte alphabet, so no text leads to it
            table[index] = token.encode()
    for token in parts["added_tokens"]:
        table[token["id"]] = b"" if token["special"] else token["content"].encode()
    return table


def lengths(table: list[bytes]) -> np.ndarray:
    """int64 (len(table),): number of bytes of each entry."""
    return np.fromiter(map(len, table), dtype=np.int64, count=len(table))
