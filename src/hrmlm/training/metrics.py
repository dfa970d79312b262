"""The record of a run: `metrics.jsonl` always, and what trackers are told besides.

Each line is one JSON object with "event": step, eval, start, resume, warning or stop. Lines of steps that a crash made
the run repeat stay, marked "superseded": true, so each step stands exactly once among the others.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hrmlm.files import write_atomic


class Listener(Protocol):
    """Something that is told the numbers of the record as they are written; it must not fail, nor keep one waiting."""

    def log(self, event: str, step: int, values: dict[str, float]) -> None:
        """Numbers of one line by name."""

    def close(self) -> None:
        """No more lines will come."""


class Metrics:
    """Appends lines to metrics.jsonl and passes their numbers on."""

    def __init__(self, path: Path, listeners: Sequence[Listener] = ()) -> None:
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  closed by close()
        self._listeners = list(listeners)

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append one line. A value that is not finite becomes null with its text beside it: JSON has no NaN."""
        line = {"event": event, "step": step, **values}
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                line[name], line[f"{name}_text"] = None, str(value)
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        numbers = numbers_of(event, values)
        for listener in self._listeners:
            listener.log(event, step, numbers)

    def close(self) -> None:
        """Close the file and tell the listeners."""
        self._file.close()
        for listener in self._listeners:
            listener.close()


def numbers_of(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of the record, by "event/name" or "event/group/name"."""
    return {f"{event}/{name}": value for name, value in _numbers(values)}


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
