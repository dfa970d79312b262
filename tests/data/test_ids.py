"""Ids in one file and in several, against numpy's own reading; a file of two gigabytes in little memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrmlm.data import ids as module
from hrmlm.data.ids import IdFiles
from hrmlm.data.mixture import MixedWindows, shares
from hrmlm.data.tokens import TokenWindows
from hrmlm.errors import UserError
from tests.training.helpers import environment

TOKENS = 1 << 30  # of two bytes each
TYPE = np.dtype("<u2")


def written(directory: Path, ids: np.ndarray, sizes: list[int]) -> IdFiles:
    files = []
    for number, part in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        files.append(directory / f"{number}.bin")
        part.tofile(files[-1])
    return IdFiles(files, sizes, ids.dtype)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
@settings(max_examples=25, deadline=None)
def test_slices_are_those_of_the_whole(tmp_path_factory, sizes, draws):
    whole = np.arange(sum(sizes), dtype=draws.draw(st.sampled_from(["<u2", "<u4"]))) * 7 + 3
    ids = written(tmp_path_factory.mktemp("ids"), whole, sizes)
    assert (len(ids), ids.shape, ids.dtype, ids.ndim) == (len(whole), whole.shape, whole.dtype, 1)
    assert np.array_equal(np.asarray(ids), whole)
    for _ in range(20):
        start, stop = (draws.draw(st.none() | st.integers(-60, 60)) for _ in range(2))
        assert np.array_equal(ids[start:stop], whole[start:stop])
        place = draws.draw(st.integers(-len(whole), len(whole) - 1))
        assert ids[place] == whole[place]
    assert list(ids) == whole.tolist()
    with pytest.raises(IndexError):
        ids[len(whole)]


def test_few_files_are_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_OPEN_FILES", 3)
    ids = written(tmp_path, np.arange(40, dtype=TYPE), [4] * 10)
    before = len(os.listdir("/proc/self/fd"))
    for place in [*range(40), 0, 39, 0]:
        assert ids[place] == place
        assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_a_file_cut_while_it_is_read_is_named(tmp_path):
    ids = written(tmp_path, np.arange(40, dtype=TYPE), [20, 20])
    os.truncate(tmp_path / "1.bin", 10)
    assert ids[:25].tolist() == list(range(25))
    with pytest.raises(UserError, match=r"1\.bin was cut"):
        ids[20:30]
    (tmp_path / "0.bin").unlink()
    with pytest.raises(UserError, match=r"0\.bin cannot be read: No such file"):
        IdFiles([tmp_path / "0.bin"], [20], TYPE)[0]


CHILD = """
import json, resource, sys
import numpy as np
from pathlib import Path
from hrmlm.data.ids import IdFiles
from hrmlm.data.tokens import TokenWindows
from hrmlm.data.order import permute

path, tokens = Path(sys.argv[1]), int(sys.argv[2])
windows = TokenWindows(IdFiles([path], [tokens], np.dtype("<u2")), 1024, 16, seed=1)
windows[0]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
for index in range(800):
    windows[index * 97]
print(json.dumps([before, peak()]))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """2 GiB on paper: holes, but for id n % 60,000 at each multiple n of 2^20 and at the end."""
    path = tmp_path_factory.mktemp("large") / "train.bin"
    with open(path, "wb") as file:
        file.truncate(TOKENS * 2)
        for place in [*range(0, TOKENS, 1 << 20), TOKENS - 1]:
            os.pwrite(file.fileno(), np.array([place % 60_000], dtype=TYPE).tobytes(), place * 2)
    assert path.stat().st_blocks * 512 < 16 << 20, "the file system keeps no holes"
    return path


def test_memory_does_not_grow_with_what_is_read(large):
    """12,800 windows, 26 MB read all over 2 GiB, cost next to nothing; mapped, their pages would be 52 MB or more."""
    command = [sys.executable, "-c", CHILD, str(large), str(TOKENS)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert after - before < 16 << 20
    assert after < 1 << 30


def test_known_places_of_two_gigabytes(large):
    ids = IdFiles([large], [TOKENS], TYPE)
    for place in (0, 1 << 20, 517 << 20, 1023 << 20, TOKENS - 1):
        expected = np.zeros(4, dtype=TYPE)
        expected[1] = place % 60_000
        found = ids[max(0, place - 1) : place + 3]
        assert found.tolist() == expected[1 if place == 0 else 0 :][: len(found)].tolist()
    assert ids[place] == place % 60_000


@pytest.mark.parametrize("mixed", [False, True])
def test_resuming_far_in_is_the_same_as_coming_there(large, mixed):
    """A batch of the hundredth epoch, made by an object that has seen nothing before."""

    def windows() -> TokenWindows | MixedWindows:
        parts = [TokenWindows(IdFiles([large], [TOKENS], TYPE), 4096, 8, seed) for seed in (1, 2)]
        return MixedWindows(parts, shares([0.9, 0.1]), 5) if mixed else parts[0]

    first, far = windows(), 100 * (TOKENS // 4096) // 8
    batches = [first[index] for index in range(far, far + 20)]
    again = [windows()[index] for index in range(far, far + 20)]
    assert all((a.inputs_BL == b.inputs_BL).all() for a, b in zip(batches, again, strict=True))
    rows = first.read(np.arange(far * 8, far * 8 + 4000))
    # A window starts at 4096 k + offset: 16 of 4096 windows hold a mark, and the mark says where.
    marks = [(int(np.flatnonzero(row)[0]), int(row.max())) for row in rows if row.any()]
    assert len(marks) > 5
    places = {n * (1 << 20) % 60_000 for n in range(TOKENS >> 20)} | {(TOKENS - 1) % 60_000}
    assert {value for _, value in marks} <= places
