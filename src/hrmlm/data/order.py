"""A shuffled order that needs no memory: which window comes at which place, computed from the place alone."""

import hashlib

import numpy as np

_ROUNDS = 6


def hash_words(*values: int, count: int) -> np.ndarray:
    """uint64 (count,): words that look random and depend on the integers `values` only."""
    text = ",".join(map(str, values)).encode()
    words = [hashlib.blake2b(text, digest_size=8, salt=n.to_bytes(8, "little")).digest() for n in range(count)]
    return np.frombuffer(b"".join(words), dtype="<u8")


def permute(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """int64: where a seeded permutation of 0 .. size - 1 sends `places`.

    A balanced Feistel network permutes a power of four that is at least `size`; a value that leaves the range is sent
    through again until it is inside (cycle walking), on average less than four times.
    """
    assert 0 < size < 2**62
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = hash_words(seed, epoch, count=_ROUNDS)
    values = _feistel(places.astype(np.uint64), bits, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], bits, keys)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """One pass of the network over numbers of 2 * bits bits."""
    mask = np.uint64((1 << bits) - 1)
    left, right = values >> np.uint64(bits), values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << np.uint64(bits)) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread every bit over the word (the finalizer of MurmurHash3, public domain)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))
