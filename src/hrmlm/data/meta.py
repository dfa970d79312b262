"""What a prepared directory says about itself: meta.json."""

import hashlib
import json
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from hrmlm.config import StrictConfig
from hrmlm.errors import UserError
from hrmlm.files import read_json, write_json

FORMAT = 1
FILE_NAME = "meta.json"


class TokenizerMeta(StrictConfig):
    """kind: "bpe" or "bytes". end_mark_added: the end mark was appended to a tokenizer.json that had none."""

    kind: Literal["bpe", "bytes"]
    fingerprint: str
    trained: bool
    end_mark_added: bool


class SourceMeta(StrictConfig):
    """One source as it was given, and what it held.

    skipped_empty: documents without any text; skipped_files: files of `python-stdlib` that are not UTF-8.
    """

    source: str
    split: str | None = Field(description="the split it was given for; None if it was divided by `rule`")
    files: int
    documents: int
    bytes: int
    skipped_empty: int
    skipped_files: int


class SplitRule(StrictConfig):
    """How documents were divided: `valid_fraction` and `seed` are None where files were given instead."""

    rule: str
    valid_fraction: float | None
    seed: int | None


class ShardMeta(StrictConfig):
    """One of several files of a split."""

    tokens: int = Field(ge=1)
    sha256: str


class IdFile(NamedTuple):
    """A file of ids: its name in the directory, and what must be in it."""

    name: str
    tokens: int
    sha256: str


class SplitMeta(StrictConfig):
    """tokens: with one end mark per document. bytes: of the original text in UTF-8. sha256: of all ids in order, in
    however many files. shards: the files, in order, where there may be several; else empty.

    shared_with_train: documents that also stand in the training split word for word (only with files given).
    """

    documents: int
    tokens: int
    bytes: int
    sha256: str
    shared_with_train: int = 0
    shards: tuple[ShardMeta, ...] = ()

    @model_validator(mode="after")
    def _check_shards(self) -> Self:
        held = sum(shard.tokens for shard in self.shards)
        if self.shards and held != self.tokens:
            raise ValueError(f"the shards hold {held} tokens instead of {self.tokens}")
        return self

    def files(self, split: str) -> list[IdFile]:
        """The files of the split of this name, in order."""
        if not self.shards:
            return [IdFile(f"{split}.bin", self.tokens, self.sha256)]
        return [IdFile(shard_name(split, n), shard.tokens, shard.sha256) for n, shard in enumerate(self.shards)]


class Meta(StrictConfig):
    """Everything in meta.json. `fingerprint` identifies ids and tokenizer together, in however many files they are."""

    format: int = FORMAT
    hrmlm: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    end_of_text: int
    tokenizer: TokenizerMeta
    field: str
    separator: str | None
    sources: tuple[SourceMeta, ...]
    split_rule: SplitRule
    splits: dict[str, SplitMeta]
    warnings: tuple[str, ...] = ()
    fingerprint: str = ""

    @property
    def numpy_dtype(self) -> np.dtype:
        """Type of the ids in the .bin files, little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    def sealed(self) -> Self:
        """The same with its fingerprint: 16 hexadecimal characters of a SHA-256."""
        splits = {name: split.sha256 for name, split in sorted(self.splits.items())}
        content = [self.format, self.dtype, self.tokenizer.fingerprint, self.end_of_text, splits]
        return self.replace(fingerprint=hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16])

    def write(self, directory: str | Path) -> None:
        """Write meta.json; the last file of a prepared directory."""
        write_json(Path(directory) / FILE_NAME, self.model_dump())

    @classmethod
    def read(cls, directory: str | Path) -> Self:
        """Read meta.json. Raises: UserError if there is none, or it is of an unknown format."""
        directory = Path(directory)
        file = directory / FILE_NAME
        if not file.is_file():
            what = "is no prepared data: it has no meta.json" if directory.is_dir() else "is not a directory"
            raise UserError(f"{directory} {what}; make it with `hrmlm prepare SOURCE --out {directory}`")
        content = read_json(file)
        version = content.get("format") if isinstance(content, dict) else None
        if version != FORMAT:
            raise UserError(f"{file} has format {version!r}, this version of hrmlm reads {FORMAT}; prepare it again")
        return cls.parse(content, str(file))


def shard_name(split: str, number: int) -> str:
    """Name of a file of a split that is divided over several."""
    return f"{split}-{number:05d}.bin"


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest type that holds ids 0 to vocab_size - 1."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"
