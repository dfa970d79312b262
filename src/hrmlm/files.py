"""Writing so that a kill at any moment leaves either the old file or the new one, and reading JSON."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hrmlm.errors import UserError

_PARTIAL = ".partial-"


def _sync(path: Path) -> None:
    """Ask the operating system to put a file or a directory entry on the disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: str | Path, content: str | bytes, sync: bool = True) -> None:
    """Replace `path` by `content` in one step; readers see the old content or the new, never a part.

    sync: wait until it is on the disk; without that only a kill is survived, not a power cut.

    Raises: OSError where the disk refuses; then the old file is untouched and no temporary file stays.
    """
    path = Path(path)
    partial = path.with_name(f"{_PARTIAL}{os.getpid()}-{path.name}")
    data = content.encode() if isinstance(content, str) else content
    try:
        with open(partial, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        _sync(path.parent)


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # A file name that is not UTF-8 comes in halves of surrogate pairs; written as \udcXX they are JSON like any other.
    write_atomic(path, text.encode(errors="backslashreplace"))


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """A new directory that appears under its name only when it is complete.

    Yields a temporary sibling to write into; when the block ends normally, its files are synced and it is renamed to
    `path`. When the block raises, it is removed. Left-overs of killed processes are removed on the next call.

    Raises: UserError if `path` exists and is not an empty directory.
    """
    path = Path(os.path.realpath(path)) if Path(path).is_symlink() else Path(path)
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partials(path.parent)
    partial = path.parent / f"{_PARTIAL}{os.getpid()}-{path.name}"
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process that had our number, as in a restarted container
    partial.mkdir()
    try:
        yield partial
        for file in partial.rglob("*"):
            _sync(file)
        _sync(partial)
        if path.exists():
            path.rmdir()  # empty, as checked above
        os.replace(partial, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_partials(directory: Path, exclusive: bool = False) -> None:
    """Remove temporary files and directories in `directory` whose writing process is no longer alive.

    exclusive: nobody else may be writing there, so all of them are left over (process numbers are used again).
    """
    for partial in directory.glob(f"{_PARTIAL}*"):
        owner = partial.name.removeprefix(_PARTIAL).split("-")[0]
        if exclusive or (owner.isdigit() and int(owner) != os.getpid() and not _alive(int(owner))):
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def refuse_existing(path: str | Path) -> None:
    """Raise UserError if `path` is a file or a directory with content: nothing is overwritten unasked."""
    path = Path(path)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"{path} exists already; choose another --out or remove it first")


def read_text(path: str | Path) -> str:
    """The content of a UTF-8 text file, line ends untouched. Raises: UserError naming the file (and byte offset)."""
    try:
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: invalid UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. Raises UserError if it is missing, unreadable or not JSON."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers or nesting beyond all bounds
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
