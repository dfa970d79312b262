"""Splits in several files, and when their content is compared with what was recorded."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from hrmlm.data import verify as module
from hrmlm.data.prepare import prepare
from hrmlm.data.tokens import PreparedData, TokenWindows
from hrmlm.data.verify import Mode, verify
from hrmlm.errors import UserError

from .examples import corpus

TEXTS = [f"document {number} with some more text in it" for number in range(60)]


def make(place: Path, shard_tokens: int | None) -> PreparedData:
    source = corpus(place / "a.jsonl", TEXTS)
    prepare([source], place / f"out-{shard_tokens}", tokenizer="bytes", shard_tokens=shard_tokens)
    return PreparedData.open(place / f"out-{shard_tokens}")


@pytest.fixture
def sharded(tmp_path) -> PreparedData:
    return make(tmp_path, 500)


@pytest.mark.parametrize("size", [1000, 777, 10**9])
def test_files_together_are_the_split(size, tmp_path):
    whole, sharded = make(tmp_path, None), make(tmp_path, size)
    assert sharded.meta.fingerprint == whole.meta.fingerprint  # of the ids, however they are cut
    for split in ("train", "valid"):
        files = sharded.meta.splits[split].files(split)
        assert [file.name for file in files] == [f"{split}-{n:05d}.bin" for n in range(len(files))]
        assert [file.tokens for file in files[:-1]] == [size] * (len(files) - 1)
        assert 0 < files[-1].tokens <= size
        joined = b"".join((sharded.path / file.name).read_bytes() for file in files)
        assert joined == (whole.path / f"{split}.bin").read_bytes()
        assert np.array_equal(sharded.split(split)[:], whole.split(split)[:])
    assert {path.name for path in sharded.path.glob("*.bin")} == {
        file.name for split in ("train", "valid") for file in sharded.meta.splits[split].files(split)
    }
    verify([sharded, whole])


def test_windows_across_the_border_of_two_files(tmp_path):
    whole, sharded = (TokenWindows(make(tmp_path, size).split("train"), 16, 4) for size in (None, 37))
    for index in range(len(whole.ids) // 64 + 3):
        assert (whole[index].inputs_BL == sharded[index].inputs_BL).all()
        assert (whole[index].targets_BL == sharded[index].targets_BL).all()


def test_a_size_that_makes_no_sense(tmp_path):
    with pytest.raises(UserError, match="0 tokens per file is too few"):
        make(tmp_path, 0)
    assert not (tmp_path / "out-0").exists()


def test_a_damaged_or_missing_file_is_named(sharded):
    file = sharded.path / "train-00002.bin"
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(UserError, match=r"train-00002\.bin was changed: its SHA-256"):
        verify([PreparedData.open(sharded.path)])
    file.write_bytes(whole[:-2])
    with pytest.raises(UserError, match=rf"train-00002\.bin has {len(whole) - 2} bytes instead of {len(whole)}"):
        PreparedData.open(sharded.path)
    file.unlink()
    with pytest.raises(UserError, match=r"train-00002\.bin is missing"):
        PreparedData.open(sharded.path)


def test_counts_that_do_not_add_up(sharded):
    meta = json.loads((sharded.path / "meta.json").read_text())
    for change in ({"tokens": 499}, {"tokens": 0}):
        changed = json.loads(json.dumps(meta))
        changed["splits"]["train"]["shards"][0].update(change)
        (sharded.path / "meta.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=r"meta\.json.*(hold .* tokens instead of|tokens: input should be)"):
            PreparedData.open(sharded.path)


def test_old_directories_say_nothing_of_shards(tmp_path):
    data = make(tmp_path, None)
    meta = json.loads((data.path / "meta.json").read_text())
    for split in meta["splits"].values():
        assert split.pop("shards") == []
    (data.path / "meta.json").write_text(json.dumps(meta))
    assert len(PreparedData.open(data.path).split("train")) == len(data.split("train"))


def change_in_place(path: Path, keep_time: bool) -> None:
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    times = (before.st_atime_ns, before.st_mtime_ns)
    os.utime(path, ns=times if keep_time else (times[0], times[1] + 1))


@pytest.mark.parametrize(
    ("mode", "keep_time", "noticed"),
    [("auto", False, True), ("auto", True, False), ("always", True, True), ("never", False, False)],
)
def test_what_each_mode_notices(sharded, tmp_path, mode: Mode, keep_time: bool, noticed: bool):
    verify([sharded]).write(tmp_path / "verified.json")
    assert verify([sharded], mode, tmp_path / "verified.json").unread == 0
    change_in_place(sharded.path / "train-00001.bin", keep_time)
    if noticed:
        with pytest.raises(UserError, match=r"train-00001\.bin was changed"):
            verify([sharded], mode, tmp_path / "verified.json")
    else:
        verify([sharded], mode, tmp_path / "verified.json")


def test_untouched_files_are_read_once_wherever_they_are(sharded, tmp_path, monkeypatch):
    known = tmp_path / "verified.json"
    verify([sharded]).write(known)
    moved = shutil.move(sharded.path, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "train-00000.bin").touch()
    read = []

    def spied(path: Path, mode: str):
        read.append(path.name)
        return path.open(mode)

    monkeypatch.setattr(module, "open", spied, raising=False)
    found = verify([PreparedData.open(moved)], "auto", known)
    assert read == ["train-00000.bin"]
    assert {seal.sha256 for seal in found.seals} == {
        file.sha256 for name, split in sharded.meta.splits.items() for file in split.files(name)
    }
    for damage in ("[", "{}", '[{"sha256": 1}]'):
        known.write_text(damage)
        verify([PreparedData.open(moved)], "auto", known)
    assert len(read) > 10  # what cannot be trusted is read again


def test_more_than_can_be_read_at_every_start(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 100)
    change_in_place(sharded.path / "train-00001.bin", keep_time=False)
    size = sum(path.stat().st_size for path in sharded.path.glob("*.bin"))
    assert verify([sharded], "auto").unread == size
    with pytest.raises(UserError, match="was changed"):
        verify([sharded], "always")
    change_in_place(sharded.path / "train-00001.bin", keep_time=False)
    verify([sharded], "always").write(tmp_path / "verified.json")
    assert verify([sharded], "auto", tmp_path / "verified.json").unread == 0
