"""The next batch goes to the GPU while the current one is computed."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from hrmlm.data.batch import Batch

T = TypeVar("T")


def prefetched(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches in the same order; on a CUDA device already there, each copied one batch ahead.

    The copy overlaps with computation if the batch lies in pinned memory (`loader(..., pin_memory=True)`).
    """
    if device.type != "cuda":
        return iter(batches)
    stream = torch.cuda.Stream(device)

    def start(batch: Batch) -> Batch:
        with torch.cuda.stream(stream):
            return batch.to(device)

    def finish(batch: Batch) -> Batch:
        now = torch.cuda.current_stream(device)
        now.wait_stream(stream)
        for tensor in (batch.inputs_BL, batch.targets_BL):
            tensor.record_stream(now)  # its memory is not given away before `now` is done with it
        return batch

    return ahead(batches, start, finish)


def ahead(items: Iterable[T], start: Callable[[T], T], finish: Callable[[T], T]) -> Iterator[T]:
    """finish(start(item)) of each item, where the next one has been started before the current one is given out."""
    waiting: list[T] = []
    for item in items:
        waiting.append(start(item))
        if len(waiting) > 1:
            yield finish(waiting.pop(0))
    yield from map(finish, waiting)
