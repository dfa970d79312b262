"""Text to ids and back without losing a byte: byte-level BPE, or the bytes themselves."""

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hrmlm.data import checks, pieces
from hrmlm.errors import UserError
from hrmlm.files import read_json, write_atomic

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_BYTES_TYPE = "hrmlm-bytes"
FILE_NAME = "tokenizer.json"
MAX_VOCAB = 1 << 24
"""Ids of a tokenizer: far above any that is used, and a table of them still fits into memory."""
RawBytes = bytes  # inside the class, `bytes` is its own constructor


class Tokenizer(ABC):
    """What every tokenizer of this library does. Build one with `train`, `load` or `bytes`.

    vocab_size: number of ids, the end mark included. end_of_text: the id that follows every document.
    end_mark_added: True if the tokenizer.json had no end mark and got one as its last id.
    fingerprint: 16 hexadecimal characters of the SHA-256 of everything that decides which ids a text gets.
    token_bytes: int64 (vocab_size,), bytes of text that each id stands for; 0 for special ids. Summed over the ids of
    a text, it is the length of the text in UTF-8, exactly.
    """

    def __init__(self, table: list[bytes], end_of_text: int, fingerprint: str, end_mark_added: bool = False) -> None:
        self._table = table
        self.vocab_size = len(table)
        self.end_of_text = end_of_text
        self.fingerprint = fingerprint
        self.end_mark_added = end_mark_added
        self.token_bytes = checks.lengths(table)
        self.cuts_safely = True
        """Whether `pieces.cut` gives pieces whose ids, joined, are the ids of the whole text."""

    @staticmethod
    def bytes() -> "ByteTokenizer":
        """Ids 0 to 255 are the bytes, 256 is the end of a text."""
        return ByteTokenizer()

    @staticmethod
    def train(texts: Iterable[str], vocab_size: int) -> "BpeTokenizer":
        """Byte-level BPE of at most `vocab_size` ids (fewer if the texts have fewer pairs worth merging).

        The alphabet is always all 256 bytes, so every text can be encoded; pairs seen once are not merged; the end
        mark is the last id. The same texts in the same order give the same tokenizer.

        Raises: UserError if vocab_size is below 257.
        """
        if vocab_size < 257:
            raise UserError(f"vocabulary size {vocab_size} is too small: 256 bytes and the end mark need at least 257")
        if vocab_size > MAX_VOCAB:
            raise UserError(f"vocabulary size {vocab_size} is too large: at most {MAX_VOCAB:,}")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            min_frequency=2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        backend.add_special_tokens([END_OF_TEXT])
        return BpeTokenizer(backend, "the trained tokenizer")

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json (or the directory that holds one), of this library or of the `tokenizers` library.

        Raises: UserError if it is missing, damaged, or not lossless (with the reason).
        """
        path = Path(path)
        file = path / FILE_NAME if path.is_dir() else path
        content = read_json(file)
        if isinstance(content, dict) and content.get("type") == _BYTES_TYPE:
            return ByteTokenizer()
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise UserError(f"{file} is not a tokenizer.json: it has no `model`")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise UserError(f"{file} cannot be read as a tokenizer: {error}") from None
        return BpeTokenizer(backend, str(file))

    @abstractmethod
    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json` into an existing directory, atomically; `load` gives an equal tokenizer back."""

    @abstractmethod
    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text as uint32 arrays, on all cores. Text that looks like a special token stays text."""

    def encode(self, text: str | RawBytes) -> list[int]:
        """Ids of one text; never special ids, whatever the text says.

        Raises: UserError if `text` is bytes that are not UTF-8 (the bytes tokenizer takes any), or a str with half of
        a surrogate pair, which no bytes stand for.
        """
        if not isinstance(text, str):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise UserError(f"invalid UTF-8 at byte {error.start}; only the `bytes` tokenizer takes it") from None
        parts = list(pieces.cut([text])) if self.cuts_safely and len(text) > 2 * pieces.PIECE else [text]
        return [token for array in self.encode_arrays(parts) for token in array.tolist()]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Ids of each text, on all cores."""
        return [array.tolist() for array in self.encode_arrays(list(texts))]

    def decode_bytes(self, ids: Iterable[int]) -> RawBytes:
        """The bytes that the ids stand for; special ids give none.

        Raises: UserError for an id outside 0 .. vocab_size - 1.
        """
        return b"".join([self._piece(token) for token in ids])

    def decode(self, ids: Iterable[int], show_end: bool = False) -> str:
        """The text of the ids, with U+FFFD for bytes that are not UTF-8. show_end: write end marks as END_OF_TEXT."""
        mark = END_OF_TEXT.encode() if show_end else b""
        parts = [mark if token == self.end_of_text else self._piece(token) for token in ids]
        return b"".join(parts).decode(errors="replace")

    def _piece(self, token: int) -> RawBytes:
        if not 0 <= token < self.vocab_size:
            raise UserError(f"id {token} is outside this tokenizer's vocabulary, 0 to {self.vocab_size - 1}")
        return self._table[token]


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of the text in UTF-8; 256 is the end of a text."""

    def __init__(self) -> None:
        super().__init__([bytes([byte]) for byte in range(256)] + [b""], 256, _digest({"type": _BYTES_TYPE}))

    def save(self, directory: str | Path) -> None:
        """See Tokenizer."""
        write_atomic(Path(directory) / FILE_NAME, json.dumps({"type": _BYTES_TYPE}) + "\n")

    def encode(self, text: str | RawBytes) -> list[int]:
        """See Tokenizer."""
        return list(text if not isinstance(text, str) else _utf8(text))

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See Tokenizer."""
        return [np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.uint32) for text in texts]


class BpeTokenizer(Tokenizer):
    """Byte-level BPE, run by the `tokenizers` library."""

    def __init__(self, backend: tokenizers.Tokenizer, where: str) -> None:
        highest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
        if highest >= MAX_VOCAB:
            raise UserError(f"{where} has the id {highest}, and ids up to {MAX_VOCAB - 1} can be used")
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # text that spells a special token is encoded like any other text
        parts = json.loads(backend.to_str())
        checks.check_lossless(parts, where)
        end_of_text, added = _end_mark(backend, where)
        if added:
            parts = json.loads(backend.to_str())
        table = checks.bytes_of_ids(parts)
        super().__init__(table, end_of_text, _digest(_what_decides_ids(parts, end_of_text)), added)
        matched = [token["content"] for token in parts["added_tokens"] if not token["special"]]
        self.cuts_safely = pieces.splits_safely(parts["pre_tokenizer"], matched)
        self._backend = backend
        spelled = [token["content"] for token in parts["added_tokens"] if token["special"]]
        special = {token["id"] for token in parts["added_tokens"] if token["special"]}
        if special & {token for ids in self.encode_batch(spelled) for token in ids}:
            raise UserError(f"{where} turns ordinary text into special tokens; use another tokenizer or `bytes`")

    def save(self, directory: str | Path) -> None:
        """See Tokenizer."""
        write_atomic(Path(directory) / FILE_NAME, self._backend.to_str())

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See Tokenizer."""
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                _utf8(text)
            raise
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


class TextStream:
    """Text of ids that arrive one by one: a character comes out when its last byte is there, never in halves."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that this id completes (often none); U+FFFD for bytes that can no longer become one."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """What is left of an unfinished character, as U+FFFD, or nothing. The stream then starts anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _end_mark(backend: tokenizers.Tokenizer, where: str) -> tuple[int, bool]:
    """The id of the end mark, and whether it had to be added to the tokenizer."""
    special = {token.content: index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    for name in _END_NAMES:
        if name in special:
            return special[name], False
    vocab = backend.get_vocab(with_added_tokens=True)
    backend.add_special_tokens([END_OF_TEXT])
    end_of_text = backend.token_to_id(END_OF_TEXT)
    assert end_of_text is not None, "just added"
    if END_OF_TEXT not in vocab and end_of_text in vocab.values():
        raise UserError(f"{where} has gaps in its ids, so that no end mark can be added; give it {END_OF_TEXT!r} first")
    return end_of_text, True


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"character {error.start} of the text is half a surrogate pair: it has no UTF-8") from None


def _what_decides_ids(parts: dict[str, Any], end_of_text: int) -> dict[str, Any]:
    """The parts of a tokenizer.json that decide ids, in a form that does not depend on who wrote the file."""
    model = parts["model"]
    steps = pieces.pre_tokenizer_steps(parts["pre_tokenizer"])
    return {
        "vocab": sorted(model["vocab"].items(), key=lambda item: item[1]),
        "merges": model["merges"],
        "ignore_merges": bool(model.get("ignore_merges")),
        "split": [{key: step[key] for key in sorted(step) if key != "trim_offsets"} for step in steps],
        "added": sorted([token["id"], token["content"], token["special"]] for token in parts["added_tokens"]),
        "end": end_of_text,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()[:16]
