"""Where the time of training steps goes: torch's profiler over a few steps, a trace and the dearest operations."""

import gzip
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from hrmlm.errors import UserError

T = TypeVar("T")

DEAREST = 10


@dataclass(frozen=True)
class Operation:
    """Calls of one operation. milliseconds: of its own, without what it called; share: of those of all operations."""

    name: str
    calls: int
    milliseconds: float
    share: float


@dataclass
class Profile:
    """steps first to last of a process (1: its first one). Filled when they are over: trace: the file written; seconds:
    wall clock of the steps; clock: "cpu", or the kind of device whose time was counted; operations: the dearest."""

    first: int
    last: int
    trace: str | None = None
    seconds: float = 0.0
    clock: str = "cpu"
    operations: list[Operation] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> "Profile":
        """Of "first:last" or of one number. Raises: UserError."""
        match = re.fullmatch(r"([0-9]{1,12})(?::([0-9]{1,12}))?", text.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UserError(f"profile steps {text!r}: give the first and the last one, such as 5:10")
        return cls(first, last)

    def check(self, steps: int) -> None:
        """Raise UserError unless a process that does so many steps comes to the first one."""
        if steps < self.first:
            raise UserError(
                f"profiling begins with step {self.first} of this process, which does {steps}; choose --profile-steps"
            )

    def watch(self, steps: Iterable[T], directory: Path) -> Iterator[T]:
        """The same steps; the chosen ones are profiled, also what is done between them. Writes into `directory`.

        A run that ends among them profiles those that it did. The steps do the same computation as without.
        """
        iterator, number = iter(steps), 0
        profiler: profile | None = None
        try:
            while True:
                number += 1
                if number == self.first:
                    profiler, started = _start(), time.perf_counter()
                try:
                    step = next(iterator)
                except StopIteration:
                    return
                if number == self.last and profiler is not None:
                    self._finish(profiler, time.perf_counter() - started, directory, number)
                    profiler = None
                yield step
        finally:
            if profiler is not None:
                self._finish(profiler, time.perf_counter() - started, directory, number)

    def _finish(self, profiler: profile, seconds: float, directory: Path, last: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        self.last, self.seconds = last, seconds
        events = profiler.key_averages()  # slow
        self.clock = "cuda" if any(_own(event, "cuda") for event in events) else "cpu"
        self.operations = dearest(events, self.clock)
        directory.mkdir(exist_ok=True)
        path = directory / f"steps-{self.first}-{self.last}.json.gz"
        plain = directory / f".partial-{os.getpid()}-trace.json"
        packed = plain.with_suffix(".json.gz")
        try:
            profiler.export_chrome_trace(str(plain))
            with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            os.replace(packed, path)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
        self.trace = str(path)


def _start() -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    profiler.start()
    return profiler


def _own(event: Any, clock: str) -> float:
    """Microseconds of an operation without what it called."""
    return event.self_cpu_time_total if clock == "cpu" else event.self_device_time_total


def dearest(events: Sequence[Any], clock: str, count: int = DEAREST) -> list[Operation]:
    """The operations with the largest time of their own, largest first. events: as the profiler averages them."""
    total = sum(_own(event, clock) for event in events)
    return [
        Operation(event.key, event.count, _own(event, clock) / 1000, _own(event, clock) / total if total else 0.0)
        for event in sorted(events, key=lambda event: -_own(event, clock))[:count]
    ]
