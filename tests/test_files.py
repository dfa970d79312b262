"""Atomic writing: the old or the new, never a part, and nothing left lying about."""

import errno
import json
import os
from pathlib import Path

import pytest

from hrmlm import files
from hrmlm.errors import UserError
from hrmlm.files import atomic_directory, read_json, read_text, refuse_existing, remove_partials, write_atomic

DEAD = 999_999_999  # no process has this number


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_write_atomic(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", "old")
    write_atomic(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_text() == "new"
    assert names(tmp_path) == ["f"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "f", "old")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, failing, full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "old"
    assert names(tmp_path) == ["f"]


def test_directory_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with atomic_directory(out) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "a").write_text("a")
        assert not out.exists()
    assert (out / "sub" / "a").read_text() == "a"
    assert names(out.parent) == ["out"]


def test_failed_directory_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_directory(tmp_path / "out") as partial:
            (partial / "a").write_text("a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == []


def test_directory_with_content_is_refused_and_an_empty_one_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with atomic_directory(tmp_path / "out") as partial:
        (partial / "a").write_text("a")
    with pytest.raises(UserError, match="exists already"), atomic_directory(tmp_path / "out"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="exists already"):
        refuse_existing(tmp_path / "file")


def test_left_overs_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """Also of one that had our own number, as the first process of a restarted container."""
    for owner in (DEAD, os.getpid(), os.getppid()):
        (tmp_path / f".partial-{owner}-out").mkdir()
        (tmp_path / f".partial-{owner}-out" / "half").touch()
    (tmp_path / f".partial-{DEAD}-file").touch()
    with atomic_directory(tmp_path / "out") as partial:
        assert names(partial) == []
    assert names(tmp_path) == [f".partial-{os.getppid()}-out", "out"]  # the parent is alive and may be writing
    remove_partials(tmp_path, exclusive=True)
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a": 1'])
def test_bad_json_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.json cannot be read as JSON"):
        read_json(tmp_path / "x.json")
    with pytest.raises(UserError, match="does not exist"):
        read_json(tmp_path / "y.json")


def test_json_keeps_text(tmp_path: Path) -> None:
    files.write_json(tmp_path / "x.json", {"ü": "漢\u2028", "n": [1, 2.5, None]})
    assert read_json(tmp_path / "x.json") == {"ü": "漢\u2028", "n": [1, 2.5, None]}
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))


def test_text_is_utf8_or_named_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes("a\r\nü".encode())
    assert read_text(tmp_path / "t") == "a\r\nü"
    (tmp_path / "t").write_bytes(b"abc\xff")
    with pytest.raises(UserError, match="invalid UTF-8 at byte 3"):
        read_text(tmp_path / "t")
    with pytest.raises(UserError, match="No such file"):
        read_text(tmp_path / "nowhere")
