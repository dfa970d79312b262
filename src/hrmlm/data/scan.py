"""The first reading of a corpus: a fingerprint and a size for every document, and who goes into which split."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from hrmlm.data.formats import Part
from hrmlm.data.meta import SourceMeta
from hrmlm.data.sources import Source
from hrmlm.errors import UserError

_DIGEST = 16


@dataclass(frozen=True)
class Scan:
    """Of N documents, in order. digests_N2: two uint64 words each, equal for equal texts. sizes_N: int64 bytes."""

    digests_N2: np.ndarray
    sizes_N: np.ndarray
    sources: tuple[SourceMeta, ...]


def scan(sources: Iterable[Source], split: str | None, seed: int, advance: Callable[[int], None]) -> Scan:
    """Read every document once. Memory: 24 bytes a document.

    seed: goes into the digests, so that sorting by them gives a shuffled order that depends on texts and seed only.
    advance: called with numbers of bytes as they are read.
    """
    digests, sizes = bytearray(), array("q")
    metas = []
    for source in sources:
        before = len(sizes)
        for digest, size in _documents(source.parts(), seed, advance):
            digests += digest
            sizes.append(size)
        metas.append(
            SourceMeta(
                source=source.given,
                split=split,
                files=len(source.files),
                documents=len(sizes) - before,
                bytes=sum(sizes[before:]),
                skipped_empty=source.skipped_empty,
                skipped_files=source.skipped_files,
            )
        )
    digests_N2 = np.frombuffer(bytes(digests), dtype=">u8").reshape(-1, 2).astype(np.uint64)
    return Scan(digests_N2, np.array(sizes, dtype=np.int64), tuple(metas))


def _documents(parts: Iterable[Part], seed: int, advance: Callable[[int], None]) -> Iterator[tuple[bytes, int]]:
    key = str(seed).encode()[:64]
    digest, size = hashlib.blake2b(digest_size=_DIGEST, key=key), 0
    for text, last in parts:
        data = text.encode()
        digest.update(data)
        size += len(data)
        advance(len(data))
        if last:
            yield digest.digest(), size
            digest, size = hashlib.blake2b(digest_size=_DIGEST, key=key), 0


def choose_valid(found: Scan, fraction: float) -> np.ndarray:
    """bool (N,): which documents make the validation split.

    Distinct texts are taken in the order of their digests until they hold `fraction` of all bytes; one that would bring
    the split above twice its size is passed over. If that leaves none, the shortest text is taken. Both splits are
    never empty, and equal documents always stay together.

    Raises: UserError if there are not two different documents.
    """
    order_N = np.lexsort((found.digests_N2[:, 1], found.digests_N2[:, 0]))
    sorted_N2 = found.digests_N2[order_N]
    group_N = np.concatenate([[0], np.cumsum((sorted_N2[1:] != sorted_N2[:-1]).any(axis=1))])
    sizes_G = np.bincount(group_N, weights=found.sizes_N[order_N]).astype(np.int64)
    _refuse_single(len(order_N), len(sizes_G))
    chosen_G = np.zeros(len(sizes_G), dtype=bool)
    chosen_G[_groups_for(sizes_G, fraction * sizes_G.sum())] = True
    valid_N = np.empty(len(order_N), dtype=bool)
    valid_N[order_N] = chosen_G[group_N]
    return valid_N


def _groups_for(sizes_G: np.ndarray, target: float) -> list[int]:
    chosen: list[int] = []
    total = 0
    for group, size in enumerate(sizes_G.tolist()):
        if total >= target or len(chosen) == len(sizes_G) - 1:
            break
        if total + size <= 2 * target:
            chosen.append(group)
            total += size
    return chosen or [int(sizes_G.argmin())]


def _refuse_single(documents: int, distinct: int) -> None:
    if distinct < 2:
        what = "is one document" if documents == 1 else f"is the same document {documents} times"
        raise UserError(
            f"the corpus {what}, so no part of it can be kept for validation; give another file with --valid, "
            "or cut text files into documents with --separator"
        )


def count_shared(found: Scan, train: Scan) -> int:
    """How many documents of `found` also stand in `train`, word for word (both scanned with the same seed)."""
    known = set(map(bytes, train.digests_N2))
    return sum(bytes(digest) in known for digest in found.digests_N2)
