"""Several processes that train one model: who they are, what they tell each other, and torch's engines behind it.

The processes come from `torchrun`, which describes them in the environment. Without it there is one process, every
method is trivial, and nothing here touches torch.distributed. Small messages (sums of a step, errors, a request to
stop) go over gloo on the CPU; gradients and weights over NCCL where the model is on GPUs.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hrmlm.errors import EndedElsewhere, LostProcess, UserError
from hrmlm.files import atomic_directory

T = TypeVar("T")

_MEETING = timedelta(minutes=10)
"""How long processes wait for each other before the recipe, which has a limit of its own, is read."""


@dataclass
class Parallel:
    """The processes of a run as one of them sees them: its number `rank` of `size`, and `local_rank` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: Any = None
    timeout: float = _MEETING.total_seconds()

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Self]:
        """Meet the other processes that torchrun started, and part from them in the end; one without torchrun."""
        size = int(os.environ.get("WORLD_SIZE", 1))
        if size == 1:
            yield cls()
            return
        dist.init_process_group("gloo", timeout=_MEETING)
        try:
            yield cls(dist.get_rank(), size, int(os.environ.get("LOCAL_RANK", 0)))
        except LostProcess:  # a farewell could wait for the one that is gone
            raise
        except BaseException:
            dist.destroy_process_group()
            raise
        dist.destroy_process_group()

    def configure(self, timeout: float, device: str) -> torch.device:
        """Use the time limit and the device of the recipe; the device of this process.

        timeout: seconds to wait for another process in any exchange. Raises: UserError if the device cannot be used.
        """
        name = f"cuda:{self.local_rank}" if self.size > 1 and device == "cuda" else device
        with self.together():  # before the processes meet again below
            try:
                place = torch.zeros(1, device=name)
                place.item()  # not only names it: it holds numbers
            except (RuntimeError, AssertionError) as error:
                reason = str(error).splitlines()[0]
                raise UserError(f"training.device {name!r} cannot be used: {reason}") from None
        if self.size > 1:
            backend = "gloo"
            if place.is_cuda:
                torch.cuda.set_device(place.device)
                backend = "cpu:gloo,cuda:nccl"
            self.timeout = timeout  # first: the group is made under it
            self.group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout))
        return place.device

    @property
    def is_first(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """The part of `count` rows that is this process's; the parts differ by one row at most, or are empty."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def total(self, array: NDArray[Any]) -> NDArray[Any]:
        """The sum of the arrays of all processes; of one, its own. Fewer steps than `gather` for large ones."""
        if self.size > 1:
            dist.all_reduce(torch.from_numpy(array), group=self.group)  # in place
        return array

    def agree(self, name: str | None) -> str | None:
        """The first name that any process has."""
        return next((found for found in self.gather(name) if found), None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """All processes pass this block, or none: an error of one ends it for all.

        Raises: EndedElsewhere in all but the first process that failed, which raises its own error. Blocks may nest.
        """
        try:
            yield
        except EndedElsewhere:
            raise
        except Exception as error:
            if not getattr(error, "told_others", False) and not _is_lost(error):
                error.told_others = True  # type: ignore[attr-defined]
                if self.gather(True).index(True) != self.rank:
                    raise EndedElsewhere from None
            raise
        failed = [rank for rank, has_failed in enumerate(self.gather(False)) if has_failed]
        if failed:
            raise EndedElsewhere

    def from_first(self, function: Callable[[], T]) -> T:
        """What `function` gives in the first process, on all of them. Raises: as `together`."""
        with self.together():
            value = function() if self.is_first else None
        return self.gather(value)[0]  # type: ignore[return-value]

    @contextmanager
    def directory(self, path: str | Path) -> Iterator[Path]:
        """`atomic_directory` for all processes together: it appears when all have left the block without an error."""
        with ExitStack() as stack:
            partial = self.from_first(lambda: stack.enter_context(atomic_directory(path)))
            with self.together():
                yield partial

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raises: LostProcess for what torch raises when another process ended or did not answer in time."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _is_lost(error):
                raise
            raise LostProcess(
                f"process {self.rank} of {self.size}: another process of the run ended, or did not answer within "
                f"{self.timeout:g} s (parallel.timeout); go on from the last checkpoint with --resume"
            ) from error


def _is_lost(error: Exception) -> bool:
    """Whether an error is that of an exchange with another process, as gloo, NCCL and the store word it."""
    lost = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out", "broken pipe", "socket")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in lost)
    )


ALONE = Parallel()
"""One process."""
