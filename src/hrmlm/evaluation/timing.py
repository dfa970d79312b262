"""Timing things side by side on a machine that does other work too: interleaved rounds, warm-up, medians and spread."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hrmlm.errors import UserError


@dataclass(frozen=True)
class Timing:
    """Seconds of one call in each round that counts (after the warm-up), in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Middle of the rounds, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance between the slowest and the fastest round, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    def ratio(self, other: "Timing") -> float:
        """How many times as long as `other` it takes: the median over rounds, so that slow moments hit both alike."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, iterations: int, warmup: int, device: torch.device | str = "cpu"
) -> dict[str, Timing]:
    """Time each call once per round, for `iterations` rounds of which the first `warmup` do not count.

    The clock stops when the device has finished. Each round starts with another call, so that none is always first.

    Raises: UserError unless 0 <= warmup < iterations.
    """
    if not 0 <= warmup < iterations:
        raise UserError(f"{iterations} iterations with a warm-up of {warmup} leave nothing to measure; ask for more")
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for iteration in range(iterations):
        shift = iteration % len(names)
        for name in names[shift:] + names[:shift]:
            elapsed = _timed(calls[name], torch.device(device))
            if iteration >= warmup:
                seconds[name].append(elapsed)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def _timed(call: Callable[[], object], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    """Until everything given to an accelerator is done; the CPU has nothing pending."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
