"""From documents to files of ids."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np

from hrmlm.data import pieces
from hrmlm.data.formats import Part
from hrmlm.data.meta import ShardMeta, SplitMeta, dtype_for, shard_name
from hrmlm.data.tokenizer import Tokenizer

_BATCH = 1 << 21  # characters encoded at once: enough for many cores, and small in memory
_BATCH_TEXTS = 1 << 14


def in_pieces(parts: Iterable[Part], cuts_safely: bool, size: int = pieces.PIECE) -> Iterator[Part]:
    """The same documents in parts that can be encoded one by one; whole where the tokenizer does not allow cutting."""
    parts = iter(parts)
    for text, last in parts:
        if last and len(text) <= size:
            yield text, True
            continue
        document = _document(text, last, parts)
        if cuts_safely:
            yield from ((piece, False) for piece in pieces.cut(document, size))
            yield "", True
        else:
            yield "".join(document), True


def _document(text: str, last: bool, parts: Iterator[Part]) -> Iterator[str]:
    """Texts of the document that begins with `text`, taken from `parts` up to its end."""
    yield text
    while not last:
        text, last = next(parts)
        yield text


class _IdWriter:
    """Writes the ids of a split: into one file or, with `shard_tokens`, into files of so many and one of the rest."""

    def __init__(self, directory: Path, split: str, shard_tokens: int | None) -> None:
        self._directory, self._split, self._shard_tokens = directory, split, shard_tokens
        self._all = hashlib.sha256()
        self._files: list[tuple[int, str]] = []
        self._next()

    def _next(self) -> None:
        """Begin a file."""
        name = shard_name(self._split, len(self._files)) if self._shard_tokens else f"{self._split}.bin"
        self._file = open(self._directory / name, "wb")  # noqa: SIM115  closed by close()
        self._digest, self._tokens = hashlib.sha256(), 0

    def write(self, ids: np.ndarray) -> None:
        """Append ids, in the type they have on disk."""
        while len(ids):
            if self._tokens == self._shard_tokens:
                self.close()
                self._next()
            room = len(ids) if self._shard_tokens is None else self._shard_tokens - self._tokens
            part, ids = ids[:room], ids[room:]
            data = part.tobytes()
            self._file.write(data)
            self._digest.update(data)
            self._all.update(data)
            self._tokens += len(part)

    def close(self) -> None:
        """Finish the file."""
        self._file.close()
        self._files.append((self._tokens, self._digest.hexdigest()))

    @property
    def sha256(self) -> str:
        """Of all ids that were written."""
        return self._all.hexdigest()

    @property
    def shards(self) -> tuple[ShardMeta, ...]:
        """The files that were finished, where there may be several."""
        files = self._files if self._shard_tokens else []
        return tuple(ShardMeta(tokens=tokens, sha256=sha256) for tokens, sha256 in files)


class SplitWriter:
    """Encodes one split into its .bin files. Use as a context manager; `meta` tells the result after it ended."""

    def __init__(
        self,
        directory: Path,
        split: str,
        tokenizer: Tokenizer,
        advance: Callable[[int], None],
        shard_tokens: int | None = None,
    ) -> None:
        self._writer = _IdWriter(directory, split, shard_tokens)
        self._tokenizer = tokenizer
        self._advance = advance
        self._dtype = np.dtype(dtype_for(tokenizer.vocab_size)).newbyteorder("<")
        self._parts: list[Part] = []
        self._waiting = 0
        self.documents = self.tokens = self.bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self._flush()
        finally:
            self._writer.close()

    def add(self, text: str, last: bool) -> None:
        """Append a part of a document; `last` ends the document with an end mark."""
        self._parts.append((text, last))
        self._waiting += len(text)
        if self._waiting >= _BATCH or len(self._parts) >= _BATCH_TEXTS:
            self._flush()

    def _flush(self) -> None:
        if not self._parts:
            return
        end = np.array([self._tokenizer.end_of_text], dtype=np.uint32)
        arrays = self._tokenizer.encode_arrays([text for text, _ in self._parts])
        ends = [end if last else end[:0] for _, last in self._parts]
        ids = np.concatenate(list(chain.from_iterable(zip(arrays, ends, strict=True))))
        self._writer.write(ids.astype(self._dtype))
        size = int(self._tokenizer.token_bytes[ids].sum())
        self.documents += sum(last for _, last in self._parts)
        self.tokens += len(ids)
        self.bytes += size
        self._advance(size)
        self._parts, self._waiting = [], 0

    def meta(self, shared_with_train: int = 0) -> SplitMeta:
        """Counts and digest of what was written."""
        return SplitMeta(
            documents=self.documents,
            tokens=self.tokens,
            bytes=self.bytes,
            sha256=self._writer.sha256,
            shared_with_train=shared_with_train,
            shards=self._writer.shards,
        )
