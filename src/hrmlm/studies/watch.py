"""How far a study is, for people who wait."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hrmlm.training.run import RunDirectory

_TAIL = 8192
"""Bytes at the end of a record in which its last whole line is found."""


@dataclass(frozen=True)
class Running:
    """A run that is being worked on. step: the last one done, of `steps`."""

    name: str
    step: int
    steps: int

    @property
    def told(self) -> str:
        """For people: what it is doing."""
        if self.step >= self.steps:
            return "evaluating"
        return f"step {self.step}/{self.steps}" if self.step else "starting"


class Watch:
    """Is told how far a study is; this one shows nothing."""

    wants_steps = False
    """Whether `now` shall be called."""

    def tell(self, line: str) -> None:
        """Something happened."""

    def now(self, over: int, total: int, running: Sequence[Running]) -> None:
        """So many runs of all are over, and these are going on."""

    def stop(self) -> None:
        """Nothing more comes but lines."""


def last_step(train: Path) -> int:
    """The last step in the record of a run that another process writes; 0 if there is none yet."""
    try:
        with open(RunDirectory(train).metrics, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().split(b"\n")[:-1]  # the last line may be half written
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
