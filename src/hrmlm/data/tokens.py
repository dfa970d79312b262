"""Prepared data, read back: ids of a split, and the batches that training draws from them."""

import signal
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from hrmlm.data.batch import Batch
from hrmlm.data.ids import IdFiles
from hrmlm.data.meta import Meta
from hrmlm.data.order import hash_words, permute
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError


class PreparedData:
    """A directory written by `hrmlm prepare`. Use `open`; `meta` and `tokenizer` are read at once, ids on demand."""

    def __init__(self, path: Path, meta: Meta, tokenizer: Tokenizer) -> None:
        self.path = path
        self.meta = meta
        self.tokenizer = tokenizer

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a prepared directory and check sizes and tokenizer; every byte is checked by `hrmlm.data.verify`.

        Raises: UserError if it is no prepared directory, is of an unknown format, or a file of it was cut or changed.
        """
        path = Path(path)
        meta = Meta.read(path)
        tokenizer = Tokenizer.load(path)
        if tokenizer.fingerprint != meta.tokenizer.fingerprint:
            raise UserError(
                f"{path}/tokenizer.json has fingerprint {tokenizer.fingerprint}, but the data were made with "
                f"{meta.tokenizer.fingerprint}; put that tokenizer back or run hrmlm prepare again"
            )
        data = cls(path, meta, tokenizer)
        for name in meta.splits:
            data._check_size(name)
        return data

    def split(self, name: str) -> IdFiles:
        """The ids of a split ("train", "valid", perhaps "test"): on disk, read where they are asked for.

        Every document is followed by `tokenizer.end_of_text`.
        """
        if name not in self.meta.splits:
            raise UserError(f"{self.path} has no split {name!r}; it has {', '.join(self.meta.splits)}")
        self._check_size(name)
        files = self.meta.splits[name].files(name)
        return IdFiles(
            [self.path / file.name for file in files], [file.tokens for file in files], self.meta.numpy_dtype
        )

    def check_vocab(self, vocab_size: int) -> None:
        """Raise UserError if a model of `vocab_size` ids cannot hold every id of these data."""
        if self.meta.vocab_size > vocab_size:
            raise UserError(
                f"{self.path} has {self.meta.vocab_size} ids, but the model has only {vocab_size}; "
                "use the tokenizer of the model, or a model of at least that vocabulary"
            )

    def _check_size(self, name: str) -> None:
        for file in self.meta.splits[name].files(name):
            path, expected = self.path / file.name, file.tokens * self.meta.numpy_dtype.itemsize
            found = path.stat().st_size if path.is_file() else None
            if found != expected:
                state = "is missing" if found is None else f"has {found} bytes instead of {expected}"
                raise UserError(f"{path} {state}; run hrmlm prepare again")


class Windows(Dataset[Batch]):
    """An endless, numbered sequence of windows, in batches: nothing has to be saved to resume exactly.

    Batch i holds windows i * batch_size to (i + 1) * batch_size - 1. A window covers `window` inputs and as many
    targets (the ids one further on).
    """

    window: int
    batch_size: int

    @abstractmethod
    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.integer]:
        """Ids (N, window + 1) of the windows of these numbers."""

    def rows(self, index: int, start: int, stop: int) -> Batch:
        """Rows `start` to stop - 1 of batch `index`; the others are not read."""
        assert 0 <= start <= stop <= self.batch_size
        first = index * self.batch_size
        ids_BL = torch.from_numpy(self.read(np.arange(first + start, first + stop)).astype(np.int64))
        return Batch(ids_BL[:, :-1].contiguous(), ids_BL[:, 1:].contiguous())

    def __getitem__(self, index: int) -> Batch:
        """Batch `index` (any integer from 0 on): inputs and targets (batch_size, window)."""
        return self.rows(index, 0, self.batch_size)


class TokenWindows(Windows):
    """Windows of one corpus: an endless sequence of epochs.

    An epoch visits each of its `windows_per_epoch` windows once, in an order drawn from (seed, epoch); a batch may lie
    across two epochs, and every batch is full. The ids that do not fill a window are left out, and how many of them at
    the start or the end is drawn for every epoch.

    ids: 1-D integers. Raises: UserError if there are fewer than window + 1.
    """

    def __init__(self, ids: np.ndarray | IdFiles, window: int, batch_size: int, seed: int = 0) -> None:
        if window < 1 or batch_size < 1:
            raise UserError(f"window {window} and batch size {batch_size} must be at least 1")
        if len(ids) < window + 1:
            largest = f"the largest window that fits is {len(ids) - 1}" if len(ids) > 1 else "no window fits"
            raise UserError(f"{len(ids)} tokens are too few for a window of {window} (needs {window + 1}); {largest}")
        self.ids = ids
        self.window, self.batch_size, self.seed = window, batch_size, seed
        self.windows_per_epoch = (len(ids) - 1) // window

    def starts(self, index: int) -> NDArray[np.int64]:
        """int64 (batch_size,): where in `ids` the windows of batch `index` begin."""
        return self._starts(np.arange(index * self.batch_size, (index + 1) * self.batch_size))

    def _starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, places = np.divmod(numbers, self.windows_per_epoch)
        starts = np.empty_like(numbers)
        left_over = len(self.ids) - 1 - self.windows_per_epoch * self.window
        for epoch in np.unique(epochs):
            offset = int(hash_words(self.seed, int(epoch), -1, count=1)[0]) % (left_over + 1)
            rows = epochs == epoch
            order = permute(places[rows], self.windows_per_epoch, self.seed, int(epoch))
            starts[rows] = offset + order * self.window
        return starts

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.integer]:
        """See Windows."""
        ids = np.empty((len(numbers), self.window + 1), dtype=self.ids.dtype)
        for row, start in zip(ids, self._starts(numbers).tolist(), strict=True):
            row[:] = self.ids[start : start + self.window + 1]
        return ids

    def counts(self, total: int) -> list[int]:
        """How many of the first `total` windows come from each corpus: all from this one."""
        return [total]


def loader(
    dataset: Dataset[Batch], start: int, stop: int, workers: int = 0, pin_memory: bool = False
) -> Iterator[Batch]:
    """Batches `start` to stop - 1 of `dataset`, in order, made ahead of time by `workers` processes.

    Whatever was made ahead but not consumed is simply made again after a resume, since items depend on the index only.
    """
    sampler: Iterable[int] = range(start, stop)
    # torch draws a seed for the workers; from a generator of its own, or resuming would shift the random numbers of
    # the training itself.
    generator = torch.Generator().manual_seed(0)
    return iter(
        DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=workers,
            pin_memory=pin_memory,
            generator=generator,
            worker_init_fn=_leave_signals_to_parent if workers else None,
        )
    )


def _leave_signals_to_parent(worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole process group; the parent needs its workers until it has saved.

    They end with it: it tells them to, and they notice when it is gone.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
