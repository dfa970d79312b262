"""Reports R02 and R24: batches near the limits of a small corpus, and the same ones after a resume."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hrmlm.data.ids import IdFiles
from hrmlm.data.order import permute
from hrmlm.data.tokens import TokenWindows, loader
from hrmlm.errors import UserError


@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_order_is_a_permutation(size, seed, epoch):
    order = permute(np.arange(size), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))
    place = size // 2
    assert permute(np.array([place]), size, seed, epoch)[0] == order[place]


def test_order_differs_between_seeds_and_epochs_and_looks_shuffled():
    base = permute(np.arange(1000), 1000, 0, 0)
    assert (base != permute(np.arange(1000), 1000, 0, 1)).mean() > 0.9
    assert (base != permute(np.arange(1000), 1000, 1, 0)).mean() > 0.9
    assert abs(np.corrcoef(np.arange(1000), base)[0, 1]) < 0.15
    assert (np.diff(base) == 1).mean() < 0.02


@given(st.integers(2, 150), st.integers(1, 40), st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_an_epoch_visits_every_window_once(tokens, window, batch_size, seed):
    if tokens < window + 1:
        return
    data = TokenWindows(np.arange(tokens), window, batch_size, seed)
    per_epoch = data.windows_per_epoch
    assert per_epoch == (tokens - 1) // window
    starts = np.concatenate([data.starts(i) for i in range(2 * per_epoch)])[: 2 * per_epoch].reshape(2, -1)
    for epoch in starts:
        assert (np.diff(np.sort(epoch)) == window).all()  # side by side, none twice
        assert epoch.min() >= 0
        assert epoch.max() + window + 1 <= tokens


def test_inputs_and_targets_are_shifted_by_one():
    batch = TokenWindows(np.arange(70_000, dtype="<u4"), 16, 3)[5]
    assert batch.inputs_BL.shape == batch.targets_BL.shape == (3, 16)
    assert torch.equal(batch.inputs_BL + 1, batch.targets_BL)
    assert batch.n_targets == 48


def test_too_few_tokens_for_a_window():
    with pytest.raises(UserError, match=r"40 tokens .* window of 64 .*fits is 39"):
        TokenWindows(np.zeros(40), 64, 1)
    with pytest.raises(UserError, match=r"fits is 63"):
        TokenWindows(np.zeros(64), 64, 1)
    with pytest.raises(UserError, match="no window fits"):
        TokenWindows(np.zeros(1), 1, 1)
    with pytest.raises(UserError, match="at least 1"):
        TokenWindows(np.zeros(9), 0, 1)
    assert TokenWindows(np.zeros(65), 64, 2)[7].n_targets == 128


def test_ragged_corpus_gives_full_batches_only():
    data = TokenWindows(np.arange(3 * 4 * 16 + 7), 16, 4)
    batches = list(loader(data, 0, 2 * data.windows_per_epoch // 4 + 1))
    assert {batch.inputs_BL.shape for batch in batches} == {(4, 16)}
    assert sum(batch.n_targets for batch in batches) == len(batches) * 64


def test_left_over_tokens_are_not_always_the_same():
    data = TokenWindows(np.arange(10 * 16 + 12), 16, 1)
    first = {min(int(data.starts(epoch * 10 + i)[0]) for i in range(10)) for epoch in range(30)}
    assert len(first) > 5
    assert max(first) <= 11


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_batches_are_the_uninterrupted_ones(workers, tmp_path):
    ids = np.arange(33 * 8 + 5, dtype="<u2")
    ids.tofile(tmp_path / "train.bin")
    data = TokenWindows(IdFiles([tmp_path / "train.bin"], [len(ids)], ids.dtype), 8, 4, seed=3)
    expected = [data[i].inputs_BL for i in range(20)]  # two and a half epochs
    interrupted = loader(data, 0, 20, workers)
    seen = [next(interrupted).inputs_BL for _ in range(7)]
    del interrupted  # batches made ahead are lost here
    seen += [batch.inputs_BL for batch in loader(data, 7, 20, workers)]
    assert len(seen) == 20
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_loading_leaves_the_random_numbers_of_training_alone():
    state = torch.get_rng_state()
    next(loader(TokenWindows(np.arange(100), 8, 2), 0, 3))
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_started_afresh_open_the_file_themselves(tmp_path):
    np.arange(100_000, dtype="<u2").tofile(tmp_path / "train.bin")
    data = TokenWindows(IdFiles([tmp_path / "train.bin"], [100_000], np.dtype("<u2")), 8, 2)
    before = data[3].inputs_BL
    packed = pickle.dumps(data)
    assert len(packed) < 2000
    assert torch.equal(pickle.loads(packed)[3].inputs_BL, before)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_a_batch_are_read_alone(size):
    """What several processes that share a batch read is together what one reads."""
    ids = np.arange(10 * 16 + 3)
    whole = TokenWindows(ids, 16, 7)
    for index in (0, 1, 40):
        parts = [whole.rows(index, rank * 7 // size, (rank + 1) * 7 // size) for rank in range(size)]
        assert torch.equal(torch.cat([part.inputs_BL for part in parts]), whole[index].inputs_BL)
        assert torch.equal(torch.cat([part.targets_BL for part in parts]), whole[index].targets_BL)
    assert whole.rows(3, 4, 4).inputs_BL.shape == (0, 16)
