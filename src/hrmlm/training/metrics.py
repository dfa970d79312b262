"""The record of a run: `metrics.jsonl` always, other trackers if asked for. A tracker that fails never stops training.

Each line is one JSON object with "event": step, eval, start, resume, warning or stop. Lines of steps that a crash made
the run repeat stay, marked "superseded": true, so each step stands exactly once among the others.
"""

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hrmlm.errors import UserError
from hrmlm.files import write_atomic
from hrmlm.training.run import warn


class Tracker(Protocol):
    """Something that keeps numbers by name and step."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Keep `values` of `step`."""

    def close(self) -> None:
        """Write out what is still held back."""


class TensorBoard:
    """Event files for TensorBoard in `directory` (extra: tensorboard)."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory)

    def log(self, step: int, values: dict[str, float]) -> None:
        """See Tracker."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


def check_trackers(names: Sequence[str]) -> None:
    """Raises: UserError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"the tracker {name} needs: pip install 'hrmlm[{name}]'")


def open_trackers(names: Sequence[str], directory: Path) -> list[Tracker]:
    """The trackers of a run; one that cannot start is left out with a warning."""
    trackers: list[Tracker] = []
    for name in names:
        try:
            trackers.append({"tensorboard": TensorBoard}[name](directory / name))
        except Exception as error:  # whatever a tracker does, training goes on
            warn(f"tracker {name} cannot start and is left out: {error}")
    return trackers


class Metrics:
    """Appends lines to metrics.jsonl and passes numbers on to trackers."""

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()) -> None:
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  closed by close()
        self._trackers = list(trackers)

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append one line. A value that is not finite becomes null with its text beside it: JSON has no NaN."""
        line = {"event": event, "step": step, **values}
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                line[name], line[f"{name}_text"] = None, str(value)
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        numbers = {f"{event}/{name}": value for name, value in _numbers(values)}
        for tracker in list(self._trackers):
            self._attempt(tracker, "log", step, numbers)

    def _attempt(self, tracker: Tracker, method: str, *arguments: Any) -> None:
        try:
            getattr(tracker, method)(*arguments)
        except Exception as error:  # whatever a tracker does, training goes on
            warn(f"tracker {type(tracker).__name__} failed and is switched off: {error}")
            if tracker in self._trackers:
                self._trackers.remove(tracker)

    def close(self) -> None:
        """Close the file and the trackers."""
        self._file.close()
        for tracker in list(self._trackers):
            self._attempt(tracker, "close")


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line by name; those of nested objects as "group/name"."""
    for name, value in values.items():
        if isinstance(value, int | float):
            yield name, float(value)
        elif isinstance(value, Mapping) and name != "recipe":
            yield from ((f"{name}/{inner}", number) for inner, number in _numbers(value))


def read_metrics(path: Path, superseded: bool = False) -> list[dict[str, Any]]:
    """The lines of a record, without one that a kill cut short, and without superseded ones unless asked for."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            continue
        if superseded or not line.get("superseded"):
            lines.append(line)
    return lines


def supersede(path: Path, step: int, evaluated: int | None = None) -> None:
    """Mark the lines of steps after `step` as superseded: the run is about to repeat them.

    evaluated: step of the last evaluation that is not repeated (None: `step`).
    """
    if not path.is_file():
        return
    lines = read_metrics(path, superseded=True)
    for line in lines:
        last_kept = evaluated if line.get("event") == "eval" and evaluated is not None else step
        if line.get("step", 0) > last_kept:
            line["superseded"] = True
    write_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
