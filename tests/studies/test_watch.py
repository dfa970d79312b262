"""How far a study is: shown while it runs, and what was there before."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from hrmlm import console
from hrmlm.studies.runner import run_study
from hrmlm.studies.watch import Running, last_step
from tests.studies.helpers import Told, settings, study


def test_steps_of_a_run_are_shown_while_it_runs(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hrmlm.studies.runner.WATCH_SECONDS", 0.05)
    arms = {"hrm": settings(None)["arms"]["hrm"]}
    values = {"evaluation": {"tokens": 50}, "seeds": 1, "budget": {"steps": 200}, "arms": arms}
    watch = Told()
    run_study(study(data, **values), tmp_path / "out", watch=watch)
    assert watch.lines[0].startswith("1 run; results in ")
    steps = [one.step for _, _, running in watch.seen for one in running if one.name == "hrm, seed 0"]
    assert steps == sorted(steps)
    assert any(0 < step < 200 for step in steps)
    assert {(over, total) for over, total, _ in watch.seen} <= {(0, 1), (1, 1)}

    again = Told()
    run_study(study(data, **values, name="tiny"), tmp_path / "out", watch=again)
    assert again.lines[0].startswith("1 run, 1 of them finished before; results in ")


@pytest.mark.parametrize(
    ("content", "step"),
    [
        (None, 0),
        (b"", 0),
        (b'{"event": "step", "step": 3}\n', 3),
        (b'{"event": "step", "step": 3}\n{"event": "step", "st', 3),
        (b"nonsense\n\n[]\n", 0),
        (b'{"step": 1}\n' + b"x" * 20_000 + b'\n{"step": 7}\n', 7),
    ],
)
def test_the_last_whole_line_of_a_record_counts(content: bytes | None, step: int, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    assert last_step(tmp_path) == step


def test_a_terminal_shows_a_bar_and_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "ERRORS", Console(file=screen, force_terminal=True, width=80))
    bar = console.StudyBar("[odd] name")
    bar.now(1, 4, [Running("hrm, seed [0]", 30, 100), Running("x", 0, 9), Running("y", 9, 9)])
    bar.tell("1/4 plain, seed 0: 4.0000 nats per token (9 s)")
    bar.stop()
    assert bar.wants_steps
    for part in (
        "[odd] name",
        "1 of 4 runs",
        "hrm, seed [0]: step 30/100; x: starting; y: evaluating",
        "1/4 plain, seed 0: 4.0000",
    ):
        assert part in screen.getvalue()


def test_without_a_terminal_there_are_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "ERRORS", Console(file=screen, force_terminal=False, width=160))
    bar = console.StudyBar("name")
    bar.tell("one line")
    bar.stop()
    assert not bar.wants_steps
    assert screen.getvalue() == "one line\n"
