"""Tiny studies over bytes, and a way to run them within the process of the test."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hrmlm.studies import worker
from hrmlm.studies.directory import StudyDirectory
from hrmlm.studies.expand import Expansion, expand
from hrmlm.studies.plan import plan
from hrmlm.studies.search import TrialSource
from hrmlm.studies.spec import Study
from hrmlm.studies.watch import Running, Watch

TINY = {"context": 32, "d_model": 32, "n_heads": 2}


class Told(Watch):
    """Keeps what people would see."""

    wants_steps = True

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.seen: list[tuple[int, int, list[Running]]] = []

    def tell(self, line: str) -> None:
        self.lines.append(line)

    def now(self, over: int, total: int, running: Sequence[Running]) -> None:
        self.seen.append((over, total, list(running)))


def settings(data: Path | str | None, **changes: Any) -> dict[str, Any]:
    """Settings of a study of two arms that runs in seconds; changes: whole sections."""
    return {
        "name": "tiny",
        "title": "A tiny study",
        "base": {
            "data": {"path": None if data is None else str(data), "window": 16},
            "training": {"batch_size": 2, "eval_every": 4, "eval_tokens": 100, "save_every": 3},
            "optimizer": {"lr": 3e-3},
        },
        "arms": {
            "hrm": {"model": {"family": "hrm_lm", **TINY, "n_cycles": 2, "fast_steps": 1}},
            "plain": {"model": {"family": "transformer", **TINY, "n_layers": 2}, "match": {"to": "hrm"}},
        },
        "evaluation": {"tokens": 300},
        "seeds": 3,
        "budget": {"steps": 8},
        **changes,
    }


def study(data: Path | str | None, **changes: Any) -> Study:
    return Study.parse(settings(data, **changes), "study")


def run_here(study: Study, out: Path) -> Expansion:
    """Do all runs that are not over, one after the other, in this process."""
    expansion, place = expand(study), StudyDirectory(out)
    place.store(study)
    steps = {c.label: expansion.steps_of(c) for c in expansion.conditions}
    runs = expansion.runs()
    place.store_plan([line.to_dict() for line in plan(expansion, {}, steps)], runs, {"jobs": 1})
    for run in runs:
        if not place.is_done(run) and place.error(run.id) is None:
            token = place.claims.take(run.id)
            assert token is not None
            place.describe(run)
            worker.main(str(out), run.id, token)
    return expansion


def search_here(study: Study, out: Path, retry_failed: bool = False) -> TrialSource:
    """Do all trials of a search, one after the other, in this process."""
    expansion, place = expand(study), StudyDirectory(out)
    place.store(study)
    source = TrialSource(expansion, place, None)
    steps = {c.label: expansion.steps_of(c) for c in expansion.conditions}
    place.store_plan([line.to_dict() for line in plan(expansion, {}, steps)], [], {"jobs": 1})
    for run in source.all_runs() if retry_failed else []:
        if place.error(run.id) is not None:
            source.retry(run)
    while runs := source.open_runs():
        token = place.claims.take(runs[0].id)
        assert token is not None
        place.describe(runs[0])
        worker.main(str(out), runs[0].id, token)
    return source
