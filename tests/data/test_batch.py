import pytest
import torch

from hrmlm.data.batch import IGNORE, Batch


def _batch(rows: int = 5) -> Batch:
    ids_BL = torch.arange(rows * 4).reshape(rows, 4)
    return Batch(ids_BL[:, :-1], ids_BL[:, 1:].clone())


def test_ignored_targets_are_not_counted():
    batch = _batch()
    batch.targets_BL[0, :2] = IGNORE
    assert batch.n_targets == 5 * 3 - 2


def test_micro_batches_are_the_rows_in_order():
    batch = _batch()
    parts = batch.split(2)
    assert [len(part.inputs_BL) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part.targets_BL for part in parts]), batch.targets_BL)


def test_to_keeps_values():
    moved = _batch().to("cpu")
    assert torch.equal(moved.inputs_BL, _batch().inputs_BL)


def test_wrong_types_are_programming_errors():
    with pytest.raises(AssertionError):
        Batch(torch.zeros(1, 2), torch.zeros(1, 2))
