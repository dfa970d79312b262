"""Ids on disk, in one file or several, read where they are asked for."""

import os
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from hrmlm.errors import UserError

_OPEN_FILES = 64


class IdFiles:
    """Ids of a split: one sequence over `files`, which hold `tokens` ids each. Use it like a 1-D array: `len`, an index
    or a slice without step; `numpy.asarray` reads everything.

    A slice costs one read per file that it touches, and nothing stays in memory. A memory map would do neither: the
    pages it has touched count as memory of the process, and each window drags in its neighbourhood from the disk.
    """

    ndim = 1

    def __init__(self, files: Sequence[Path], tokens: Sequence[int], dtype: np.dtype) -> None:
        assert len(files) == len(tokens) > 0
        self.files, self.dtype = tuple(files), dtype
        self._ends = np.fromiter(accumulate(tokens), dtype=np.int64, count=len(tokens))
        self._open: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def shape(self) -> tuple[int]:
        """As of an array."""
        return (len(self),)

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> NDArray[np.integer]: ...
    def __getitem__(self, key: int | slice) -> int | NDArray[np.integer]:
        """One id, or a copy of a stretch of them. Raises: UserError for a file that cannot be read or has shrunk."""
        if not isinstance(key, slice):
            place = range(len(self))[key]
            return int(self._read(place, place + 1)[0])
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ValueError("ids on disk are read in one direction and without gaps")
        return self._read(start, max(start, stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.integer]:
        return self[:].astype(dtype or self.dtype, copy=False)

    def _read(self, start: int, stop: int) -> NDArray[np.integer]:
        ids = np.empty(stop - start, dtype=self.dtype)
        done = 0
        while done < len(ids):
            number = int(np.searchsorted(self._ends, start + done, side="right"))
            first = int(self._ends[number - 1]) if number else 0
            count = min(stop, int(self._ends[number])) - start - done
            self._fill(number, start + done - first, ids[done : done + count])
            done += count
        return ids

    def _fill(self, number: int, first: int, ids: NDArray[np.integer]) -> None:
        """Read the ids from place `first` of a file on."""
        rest, offset = memoryview(ids.view(np.uint8).data), first * self.dtype.itemsize
        try:
            while rest:
                size = os.preadv(self._file(number).fileno(), [rest], offset)
                if not size:
                    raise UserError(f"{self.files[number]} was cut while it was in use; run hrmlm prepare again")
                rest, offset = rest[size:], offset + size
        except OSError as error:
            raise UserError(f"{self.files[number]} cannot be read: {error.strerror}") from None

    def _file(self, number: int) -> Any:
        """An open file; those not used for the longest time are closed, as a process may have only so many."""
        if number not in self._open:
            self._open[number] = open(self.files[number], "rb", buffering=0)  # noqa: SIM115  closed with this object
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        """Processes that are started afresh open the files themselves."""
        return self.__dict__ | {"_open": OrderedDict()}
