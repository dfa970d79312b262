"""Telling a tracker in the background what the record says, and remembering how far it was told."""

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from hrmlm.errors import UserError
from hrmlm.files import read_json, write_atomic
from hrmlm.training.run import warn

WAITING_LINES = 10_000
"""Lines that may wait for a slow tracker; further ones are dropped."""

CLOSE_SECONDS = 30.0
"""How long the end of a run waits for a tracker."""


class Line(NamedTuple):
    """Numbers of one line of the record."""

    event: str
    step: int
    values: dict[str, float]


class Tracker(Protocol):
    """Something that keeps numbers by name and step. It may fail, and it may take its time.

    settling: seconds after which a kill cannot lose a line any more, once a later step was told (None: at once).
    highest: step that it already has of this run, by its own account (None: it has no account).
    """

    settling: float | None
    highest: int | None

    def log(self, step: int, values: dict[str, float]) -> None:
        """Keep `values` of `step`; steps never go back."""

    def close(self) -> None:
        """Write out what is still held back."""


@dataclass
class Mark:
    """How far a tracker was told, in a file of the run directory. id: of its run, the same in all sessions; step: the
    highest that it has (-1: none); events: those that it has of this step."""

    path: Path
    id: str
    step: int = -1
    events: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, new_id: str) -> "Mark":
        """The mark in a file; a new one where there is none, or a damaged one."""
        try:
            found = read_json(path)
            return cls(path, str(found["id"]), int(found["step"]), [str(event) for event in found["events"]])
        except (UserError, KeyError, TypeError, ValueError):
            return cls(path, new_id)

    def covers(self, event: str, step: int) -> bool:
        """Whether the tracker has this line, or later ones, after which it would not take it."""
        return step < self.step or (step == self.step and event in self.events)

    def move(self, lines: Iterable["Line"]) -> None:
        """Remember that the tracker has these lines, which come next. A kill leaves the mark before or after them."""
        for line in lines:
            self.events = [*self.events, line.event] if line.step == self.step else [line.event]
            self.step = line.step
        self.write()

    def correct(self, step: int) -> None:
        """The tracker has everything up to this step."""
        if step != self.step:
            self.step, self.events = step, ["step", "eval"]

    def write(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(exist_ok=True)
        content = {"id": self.id, "step": self.step, "events": self.events}
        write_atomic(self.path, json.dumps(content), sync=False)


class Delivery:
    """One tracker in a thread of its own. None of its methods fails, and only `close` waits.

    make: gives the tracker, in the thread. backlog: lines that it is told first. Lines that `mark` covers are left out.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], mark: Mark, backlog: Iterable[Line] = ()) -> None:
        self.name = name
        self._make, self._mark, self._backlog = make, mark, backlog
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._unsettled: list[tuple[float, Line]] = []
        self._over = False
        self._warned = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, event: str, step: int, values: dict[str, float]) -> None:
        """Hand over one line."""
        if self._over or not values:
            return
        if self._lines.qsize() < WAITING_LINES:
            self._lines.put(Line(event, step, values))
        else:
            self._warn(f"is too slow: lines are left out while {WAITING_LINES:,} are waiting")

    def close(self) -> None:
        """Wait until the tracker has everything, or CLOSE_SECONDS."""
        self._lines.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._over = True
            self._warn(f"did not finish within {CLOSE_SECONDS:g} s and is left behind")

    def _work(self) -> None:
        try:
            self._mark.write()  # first: a run killed while the tracker starts must not get another one
            tracker = self._make()
            if tracker.highest is not None:
                self._mark.correct(tracker.highest)
            for line in self._backlog:
                self._tell(tracker, line)
            while not self._over and (next_line := self._lines.get()) is not None:
                self._tell(tracker, next_line)
            tracker.close()
            self._settle(0.0, math.inf)
        except BaseException as error:  # whatever a tracker does, training goes on
            self._over = True
            self._warn(f"failed and is switched off: {type(error).__name__}: {' '.join(str(error).split())}")

    def _tell(self, tracker: Tracker, line: Line) -> None:
        if not line.values or self._mark.covers(line.event, line.step):
            return
        tracker.log(line.step, line.values)
        if tracker.settling is None:
            return self._mark.move([line])
        self._settle(tracker.settling, line.step)
        self._unsettled.append((time.monotonic(), line))

    def _settle(self, seconds: float, step: float) -> None:
        """Mark what was told so long ago, and before this step."""
        latest = time.monotonic() - seconds
        settled = [line for told, line in self._unsettled if told <= latest and line.step < step]
        if settled:
            self._unsettled = self._unsettled[len(settled) :]
            self._mark.move(settled)

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warn(f"tracker {self.name} {what}; {self._mark.path.parents[1] / 'metrics.jsonl'} is whole")
