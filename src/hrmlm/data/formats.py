"""Documents of one file, read as a stream: .txt, .jsonl (both also .gz and .zst) and .parquet."""

import codecs
import gzip
import importlib
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hrmlm.errors import UserError

BLOCK = 1 << 20

Part = tuple[str, bool]
"""Some text of a document, and whether the document ends with it. The text may be empty."""

FORMATS = (".txt", ".txt.gz", ".txt.zst", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@dataclass(frozen=True)
class ReadOptions:
    """field: the key of .jsonl or column of .parquet that holds the text. separator: cuts .txt into documents."""

    field: str = "text"
    separator: str | None = None


def format_of(path: Path) -> str | None:
    """The entry of FORMATS that the file's name ends with, or None."""
    return next((suffix for suffix in FORMATS if path.name.lower().endswith(suffix)), None)


def optional_package(name: str, purpose: str) -> Any:
    """Import a package of the `data` extra. Raises: UserError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{purpose} needs the package {name}: pip install 'hrmlm[data]'") from None


def read_parts(path: Path, options: ReadOptions, name: str | None = None) -> Iterator[Part]:
    """The documents of one file, in order, in parts. name: what to call the file in messages.

    Memory: one block of .txt, one line of .jsonl, one batch of rows of .parquet.
    Raises: UserError naming file and place for bytes that are not UTF-8, lines that are not JSON, missing fields and
    damaged compression.
    """
    name = name or str(path)
    kind = format_of(path)
    assert kind is not None, path
    try:
        if kind == ".parquet":
            yield from _parquet_parts(path, name, options.field)
        elif kind.startswith(".jsonl"):
            yield from _jsonl_parts(blocks(path, name), name, options.field)
        else:
            yield from text_parts(decoded(blocks(path, name), name), options.separator)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from None


def blocks(path: Path, name: str) -> Iterator[bytes]:
    """The content of a file, decompressed if its name says so, in blocks of about a megabyte."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        yield from _zstd_blocks(path, name)
        return
    try:
        with gzip.open(path) if suffix == ".gz" else open(path, "rb") as file:
            while block := file.read(BLOCK):
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{name} is damaged or cut short: {error}") from None


def _zstd_blocks(path: Path, name: str) -> Iterator[bytes]:
    """Frames one after the other. (The library's own reader takes a frame that was cut short for a finished one.)"""
    zstandard = optional_package("zstandard", name)
    frame = None
    try:
        with open(path, "rb") as file:
            while packed := file.read(BLOCK // 8):
                while packed:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(packed)
                    packed = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise UserError(f"{name} is damaged: {error}") from None
    if frame is not None:
        raise UserError(f"{name} is cut short: its last frame has no end")


def decoded(raw: Iterable[bytes], name: str) -> Iterator[str]:
    """The text of UTF-8 blocks, every character kept (byte order marks and carriage returns too).

    Raises: UserError with the offset of the first bad byte, counted after decompression.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    for block in _then(raw, b""):
        pending = len(decoder.getstate()[0])
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _invalid(name, read - pending + error.start) from None
        read += len(block)


def _then(raw: Iterable[bytes], last: bytes) -> Iterator[bytes]:
    yield from (block for block in raw if block)
    yield last


def _invalid(name: str, offset: int) -> UserError:
    return UserError(f"{name} is not UTF-8: invalid byte at offset {offset}; convert it first (for example with iconv)")


def text_parts(texts: Iterable[str], separator: str | None) -> Iterator[Part]:
    """One document, or several where `separator` cuts it. The separator itself belongs to none."""
    if not separator:
        yield from ((text, False) for text in texts)
        yield "", True
        return
    rest, first, inside = "", True, False
    for text in texts:
        *documents, rest = (rest + text).split(separator)
        for document in documents:
            yield document, True
            first = inside = False
        sure = len(rest) - len(separator) + 1  # a separator may have begun behind this
        if sure > BLOCK:
            yield rest[:sure], False
            rest, inside = rest[sure:], True
    if rest or first or inside:  # nothing after a separator at the end is no document
        yield rest, True


def _lines(raw: Iterable[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Number (from 1), byte offset and content of each line; only newlines end a line."""
    number, offset = 1, 0
    waiting: list[bytes] = []
    for block in raw:
        *ends, rest = block.split(b"\n")
        for end in ends:
            line = b"".join([*waiting, end])
            yield number, offset, line
            number, offset, waiting = number + 1, offset + len(line) + 1, []
        waiting.append(rest)
    yield number, offset, b"".join(waiting)


def _jsonl_parts(raw: Iterable[bytes], name: str, field: str) -> Iterator[Part]:
    for number, offset, line in _lines(raw):
        if number == 1 and line.startswith(codecs.BOM_UTF8):  # a mark of the file, not of a text
            line, offset = line[3:], 3
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise _invalid(where, offset + error.start) from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise UserError(f"{where} is not a JSON object but {str(value)[:40]!r}; expected {{{field!r}: text}}")
        yield _text_of(value, field, where), True


def _text_of(row: dict[str, Any], field: str, where: str) -> str:
    """The text of a row, checked. Raises: UserError naming the place."""
    if field not in row:
        raise UserError(
            f"{where} has no field {field!r} but {', '.join(map(repr, row)) or 'none'}; choose with --field"
        )
    text = row[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: field {field!r} is not text but {str(text)[:40]!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: character {error.start} of the text is half a surrogate pair") from None
    return text


def row_parts(rows: Iterable[dict[str, Any]], field: str, name: str) -> Iterator[Part]:
    """One document per row."""
    for number, row in enumerate(rows, 1):
        yield _text_of(row, field, f"{name}, row {number}"), True


def _parquet_parts(path: Path, name: str, field: str) -> Iterator[Part]:
    parquet = optional_package("pyarrow.parquet", name)
    arrow = importlib.import_module("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                raise UserError(f"{name} has no column {field!r} but {', '.join(columns)}; choose with --field")
            batches = file.iter_batches(batch_size=256, columns=[field])
            yield from row_parts(({field: text} for batch in batches for text in _strings(batch[0])), field, name)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{name} cannot be read as parquet: {str(error).splitlines()[0]}") from None


def _strings(column: Any) -> Iterator[Any]:
    return (value.as_py() for value in column)
