"""Runs a study to its end: each run in a process of its own, several at a time, whatever was interrupted before.

Any number of these may work on one directory, on one machine or several: runs are claimed one by one.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from hrmlm.data.tokens import PreparedData
from hrmlm.errors import UserError
from hrmlm.signals import StopSignal
from hrmlm.studies import worker
from hrmlm.studies.directory import StudyDirectory
from hrmlm.studies.expand import Expansion, Run, StudyMistakes, device_mistakes, expand
from hrmlm.studies.plan import duration, measure_steps, plan
from hrmlm.studies.search import TrialSource
from hrmlm.studies.spec import Study
from hrmlm.studies.watch import Running, Watch, last_step

POLL_SECONDS = 0.2
WATCH_SECONDS = 1.0
DEATHS = 3
"""A run whose process is killed so often from outside, as by a lack of memory, has failed."""


class Source(Protocol):
    """Where runs come from."""

    def open_runs(self) -> list[Run]:
        """Runs that are neither finished nor failed; asked again and again, until there are none."""

    def all_runs(self) -> list[Run]:
        """All runs known so far."""

    def total(self) -> int:
        """How many runs there will be."""

    def retry(self, run: Run) -> None:
        """Let a failed run be tried again, from its first step."""


@dataclass
class FixedRuns:
    """The runs of a grid."""

    runs: list[Run]
    place: StudyDirectory

    def open_runs(self) -> list[Run]:
        """See Source."""
        return [run for run in self.runs if not self.place.is_done(run) and self.place.error(run.id) is None]

    def all_runs(self) -> list[Run]:
        """See Source."""
        return self.runs

    def total(self) -> int:
        """See Source."""
        return len(self.runs)

    def retry(self, run: Run) -> None:
        """See Source."""
        self.place.forget(run.id)


@dataclass
class Outcome:
    """How it ended. failed: error messages by run; stopped_by: name of a signal, None if all runs are over."""

    done: int
    failed: dict[str, str]
    total: int
    stopped_by: str | None


@dataclass
class _Child:
    """A run in its own process."""

    run: Run
    token: str
    process: subprocess.Popen[bytes]
    since: float = field(default_factory=time.monotonic)


def run_study(
    study: Study, out: str | Path, *, jobs: int = 1, retry_failed: bool = False, watch: Watch | None = None
) -> Outcome:
    """Run whatever of the study is not finished yet.

    jobs: processes at a time; retry_failed: try failed runs again; watch: shows people how far it is.
    Raises: UserError before the first run for a study that cannot be run, with all of its mistakes.
    """
    watch = watch or Watch()
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: at least 1 is needed")
    expansion = expand(study)
    if mistakes := device_mistakes(expansion):
        raise StudyMistakes(mistakes)
    TrialSource.check(study)
    place = StudyDirectory(out)
    for key, (before, now) in place.store(study).items():
        watch.tell(f"{key} was {before!r} and is {now!r} now; runs that it does not change are kept")
    seconds = measured_steps(expansion, place, watch)
    source = source_of(expansion, place, seconds)
    steps = {c.label: expansion.steps_of(c, seconds) for c in expansion.conditions}
    conditions = [line.to_dict() for line in plan(expansion, {}, steps)]
    given = {"jobs": jobs, "corpus": _corpus(expansion.data)}
    place.store_plan(conditions, source.all_runs(), given)
    if isinstance(source, TrialSource) and len(study.seed_list) > 1:
        engine, seed = source.search.engine, source.seed
        watch.tell(f"a search by {engine} trains every trial with one seed, {seed}; the others of seeds are not used")
    for run in source.all_runs():
        if retry_failed and place.error(run.id) is not None:
            source.retry(run)
    outcome = _Runner(place, source, jobs, watch).loop()
    if outcome.stopped_by is None:  # of a search nothing else tells, as trials of equal values share a run
        place.store_plan(conditions, source.all_runs(), {**given, "complete": True})
    return outcome


def _corpus(data: PreparedData) -> dict[str, Any]:
    """What the report tells of the data."""
    meta = data.meta
    return {
        "path": str(data.path),
        "tokenizer": meta.tokenizer.kind,
        "vocab_size": meta.vocab_size,
        "tokens": {name: split.tokens for name, split in meta.splits.items()},
        "sources": [{"source": source.source, "split": source.split} for source in meta.sources],
    }


def measured_steps(expansion: Expansion, place: StudyDirectory, watch: Watch) -> dict[str, float] | None:
    """Step times for a budget in seconds: measured once for all processes that share the study; None for others."""
    if expansion.study.budget.kind != "seconds":
        return None
    stored = place.measured() or {}
    missing = [c for c in expansion.conditions if c.label not in stored]
    if not missing:
        return stored
    watch.tell(f"measuring steps of {len(missing)} conditions: the budget is a time")
    found = {label: timing.median for label, timing in measure_steps(missing, expansion).items()}
    return place.store_measured({**found, **stored})


def source_of(expansion: Expansion, place: StudyDirectory, step_seconds: Mapping[str, float] | None) -> Source:
    """Where the runs of a study come from."""
    search = expansion.study.search
    if search is not None and search.engine != "grid":
        return TrialSource(expansion, place, step_seconds)
    return FixedRuns(expansion.runs(step_seconds), place)


def _named(run: Run) -> str:
    """A run for people."""
    return f"{run.condition}, " + (f"seed {run.seed}" if run.trial is None else f"trial {run.trial}")


class _Runner:
    """One process's work on a study."""

    def __init__(self, place: StudyDirectory, source: Source, jobs: int, watch: Watch) -> None:
        self.place, self.source, self.jobs, self.watch = place, source, jobs, watch
        self.claims = place.claims
        self.children: dict[str, _Child] = {}
        self.deaths: dict[str, int] = {}
        self.stop = StopSignal()
        self.waiting = False
        self.looked = 0.0

    def loop(self) -> Outcome:
        """Start runs and look after them until all are over, or a signal asks to stop."""
        self.watch.tell(self._beginning())
        with self.stop.caught():
            try:
                while self.stop.name is None:
                    self._reap()
                    runs = self.source.open_runs()
                    if not runs and not self.children:
                        break
                    self._start_some(runs)
                    self._look()
                    time.sleep(POLL_SECONDS)
            finally:
                self.watch.stop()
                self._stop_children()
        return self._outcome()

    def _beginning(self) -> str:
        """What there is to do."""
        runs = self.source.all_runs()
        done = sum(self.place.is_done(run) for run in runs)
        failed = sum(self._is_over(run) for run in runs) - done
        before = f", {done} of them finished before" if done else ""
        before += f", {failed} failed before (--retry-failed tries them again)" if failed else ""
        total = self.source.total()
        return f"{total} run{'' if total == 1 else 's'}{before}; results in {self.place.path}"

    def _look(self) -> None:
        """Show how far all is, now and then: it reads files."""
        if not self.watch.wants_steps or time.monotonic() - self.looked < WATCH_SECONDS:
            return
        self.looked = time.monotonic()
        running = [
            Running(_named(child.run), last_step(self.place.folder(child.run.id) / "train"), child.run.steps)
            for child in self.children.values()
        ]
        self.watch.now(self._over(), self.source.total(), running)

    def _start_some(self, runs: list[Run]) -> None:
        for run in runs:
            if len(self.children) >= self.jobs:
                return
            if run.id in self.children or (token := self.claims.take(run.id)) is None:
                continue
            if self.place.is_done(run) or self.place.error(run.id) is not None:  # while we looked
                self.claims.release(run.id, token)
                continue
            self._start(run, token)
        if runs and not self.children and not self.waiting:
            self.waiting = True
            self.watch.tell(f"waiting for {len(runs)} runs that other processes work on")

    def _start(self, run: Run, token: str) -> None:
        self.place.describe(run)
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // self.jobs))
        with open(self.place.folder(run.id) / "log.txt", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", worker.__name__, str(self.place.path), run.id, token],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C reaches us alone, and we stop them
            )
        self.children[run.id] = _Child(run, token, process)

    def _reap(self) -> None:
        for run_id, child in list(self.children.items()):
            code = child.process.poll()
            if code is None:
                continue
            del self.children[run_id]
            self._ended(child, code)
            self.claims.release(run_id, child.token)

    def _ended(self, child: _Child, code: int) -> None:
        run, taken = child.run, duration(time.monotonic() - child.since)
        result = self.place.result(run)
        if result is not None:  # whatever happened to the process after that
            loss = "pruned" if result.get("pruned") else f"{result['loss']:.4f} nats per token"
            self.watch.tell(f"{self._count()} {_named(run)}: {loss} ({taken})")
        elif code < 0 or code not in (worker.DONE, worker.FAILED, worker.STOPPED, worker.BUSY):
            self._died(run, f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
        elif (error := self.place.error(run.id)) is not None:
            self.watch.tell(f"{self._count()} {_named(run)} failed: {error.get('message')}")

    def _died(self, run: Run, how: str) -> None:
        self.deaths[run.id] = self.deaths.get(run.id, 0) + 1
        log = self.place.folder(run.id) / "log.txt"
        if self.deaths[run.id] < DEATHS:
            return self.watch.tell(f"{_named(run)}: its process ended by {how}; going on with it")
        message = f"its process ended {DEATHS} times by {how}, as for lack of memory; see {log}"
        worker.write_error(self.place, run.id, "ProcessDied", message)
        self.watch.tell(f"{_named(run)} failed: {message}")

    def _count(self) -> str:
        return f"{self._over()}/{self.source.total()}"

    def _over(self) -> int:
        """Runs that are over; those of ours count when they are told, so that no number comes twice."""
        return sum(self._is_over(run) and run.id not in self.children for run in self.source.all_runs())

    def _is_over(self, run: Run) -> bool:
        return self.place.is_done(run) or self.place.error(run.id) is not None

    def _stop_children(self) -> None:
        """Ask all to stop after the current step, saved; wait for them."""
        for child in self.children.values():
            child.process.terminate()
        for run_id, child in list(self.children.items()):
            code = child.process.wait()
            del self.children[run_id]
            if self.place.is_done(child.run):  # it was at its end already
                self._ended(child, code)
            self.claims.release(run_id, child.token)

    def _outcome(self) -> Outcome:
        runs = self.source.all_runs()
        errors = {run.id: self.place.error(run.id) for run in runs if not self.place.is_done(run)}
        failed = {run_id: str(error.get("message")) for run_id, error in errors.items() if error is not None}
        return Outcome(sum(self.place.is_done(run) for run in runs), failed, self.source.total(), self.stop.name)
