"""Whether prepared data are what their meta.json says: every byte, where that can be afforded, and then only once."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hrmlm.data.progress import byte_bar
from hrmlm.data.tokens import PreparedData
from hrmlm.errors import UserError
from hrmlm.files import read_json, write_json

Mode = Literal["auto", "always", "never"]

LARGEST = 16 << 30
"""Bytes that "auto" reads at most; a processor core hashes about 1 GB per second."""

_SHOWN = 1 << 30  # from here on a progress bar
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Seal:
    """A file whose content was found right, and how it looked at that time. Paths may change."""

    sha256: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Verified:
    """seals: of all files known to be right. unread: bytes of files whose content was not compared."""

    seals: tuple[Seal, ...]
    unread: int

    def write(self, path: str | Path) -> None:
        """Remember what was found right, for `verify`."""
        write_json(path, [vars(seal) for seal in self.seals])


def verify(data: Sequence[PreparedData], mode: Mode = "auto", known: Path | None = None) -> Verified:
    """Compare the files of prepared directories with their recorded SHA-256. Sizes were checked when they were opened.

    mode: "always" reads every byte; "auto" leaves out files that have not been touched since they were found right, and
    reads the others if they have at most LARGEST bytes together; "never" reads nothing. known: file written by
    `Verified.write` earlier.

    Raises: UserError naming the file that differs.
    """
    seals = _read_seals(known) if mode != "always" else frozenset()
    files = {path: sha256 for item in data for path, sha256 in _files(item)}
    looks = {path: _seal(path, sha256) for path, sha256 in files.items()}
    unknown = {path: seal for path, seal in looks.items() if seal not in seals}
    size = sum(seal.size for seal in unknown.values())
    if mode == "never" or (mode == "auto" and size > LARGEST):
        return Verified(tuple(sorted(seals & set(looks.values()), key=lambda seal: seal.sha256)), size)
    with byte_bar("checking the data", size, size > _SHOWN) as advance:
        for path, seal in unknown.items():
            digest = hashlib.sha256()
            with open(path, "rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
                    advance(len(block))
            if digest.hexdigest() != seal.sha256:
                raise UserError(
                    f"{path} was changed: its SHA-256 is {digest.hexdigest()}, recorded is {seal.sha256}; put the "
                    "file back or run hrmlm prepare again"
                )
    return Verified(tuple(looks.values()), 0)


def _files(data: PreparedData) -> Iterable[tuple[Path, str]]:
    for name, split in data.meta.splits.items():
        for file in split.files(name):
            yield data.path / file.name, file.sha256


def _seal(path: Path, sha256: str) -> Seal:
    found = path.stat()
    return Seal(sha256, found.st_size, found.st_mtime_ns)


def _read_seals(path: Path | None) -> frozenset[Seal]:
    """The seals of a file; none where it is missing or damaged, which only costs another reading."""
    if path is None:
        return frozenset()
    try:
        items: Any = read_json(path)
        return frozenset(Seal(str(i["sha256"]), int(i["size"]), int(i["mtime_ns"])) for i in items)
    except (UserError, KeyError, TypeError, ValueError):
        return frozenset()
