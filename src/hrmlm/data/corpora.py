"""What a run reads: one prepared corpus, or several mixed by weight."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from hrmlm.data.mixture import MixedWindows, shares
from hrmlm.data.order import hash_words
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.data.tokens import PreparedData, TokenWindows
from hrmlm.errors import UserError


@dataclass(frozen=True)
class Usage:
    """What a run has read of a corpus. share: of its tokens so far; epochs: how often it has gone through it."""

    path: str
    tokens: int
    share: float
    epochs: float


class Corpora:
    """Prepared directories made with one tokenizer, and the share of each in the tokens of a run. Use `open`."""

    def __init__(self, parts: Sequence[PreparedData], weights: Sequence[Fraction]) -> None:
        self.parts, self.weights = tuple(parts), tuple(weights)

    @classmethod
    def open(cls, paths: Sequence[str | Path], weights: Sequence[float]) -> "Corpora":
        """Open prepared directories. weights: of each, on any scale.

        Raises: UserError for one that is not whole, or tokenizers that differ.
        """
        parts = [PreparedData.open(path) for path in paths]
        first = parts[0].tokenizer.fingerprint
        for part in parts[1:]:
            if part.tokenizer.fingerprint != first:
                raise UserError(
                    f"{part.path} was prepared with tokenizer {part.tokenizer.fingerprint} and {parts[0].path} with "
                    f"{first}: corpora are mixed of one tokenizer; prepare it again with --tokenizer "
                    f"{parts[0].path}/tokenizer.json"
                )
        return cls(parts, shares(weights))

    @property
    def tokenizer(self) -> Tokenizer:
        """That of all corpora."""
        return self.parts[0].tokenizer

    @property
    def name(self) -> str:
        """For messages."""
        return " and ".join(str(part.path) for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """Identifies ids, tokenizer and shares together, wherever the directories are: 16 hexadecimal characters."""
        if len(self.parts) == 1:
            return self.parts[0].meta.fingerprint
        content = [[part.meta.fingerprint, str(weight)] for part, weight in zip(self.parts, self.weights, strict=True)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def windows(self, window: int, batch_size: int, seed: int) -> TokenWindows | MixedWindows:
        """The training batches. Raises: UserError for a corpus too small for a window, or a share too small."""
        if len(self.parts) == 1:
            return TokenWindows(self.parts[0].split("train"), window, batch_size, seed)
        parts = []
        for number, part in enumerate(self.parts):
            own_seed = int(hash_words(seed, number, count=1)[0])
            try:
                parts.append(TokenWindows(part.split("train"), window, batch_size, own_seed))
            except UserError as error:
                raise UserError(f"{part.path}: {error}") from None
        return MixedWindows(parts, self.weights, seed)

    def valid_ids(self, tokens: int | None) -> dict[str, np.ndarray]:
        """The first ids of the split "valid" of each corpus, by the name of its directory.

        tokens: so many together, in the shares of the corpora where their splits are long enough (None: all).
        """
        found: dict[str, np.ndarray] = {}
        for number, (part, weight) in enumerate(zip(self.parts, self.weights, strict=True)):
            name, ids = part.path.resolve().name, part.split("valid")
            while name in found:  # "a-2" may be another directory's own name
                name += f"-{number}"
            found[name] = ids[: None if tokens is None else max(1, round(tokens * weight))]
        return found

    def usage(self, windows: TokenWindows | MixedWindows, total: int) -> list[Usage]:
        """What the first `total` windows read of each corpus."""
        trained = windows.parts if isinstance(windows, MixedWindows) else [windows]
        return [
            Usage(str(part.path), count * windows.window, count / max(1, total), count / own.windows_per_epoch)
            for part, own, count in zip(self.parts, trained, windows.counts(total), strict=True)
        ]
