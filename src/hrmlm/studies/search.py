"""Hyper-parameter search through Optuna (extra: study): one search per arm, each with the same number of trials.

Every trial is an ordinary run of the study, so a killed one goes on from its checkpoint. What Optuna knows is kept in
a journal file in the study directory, which several processes and machines may share, or in a storage named by the
environment variable HRMLM_OPTUNA_STORAGE, such as a database.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from hrmlm.errors import UserError
from hrmlm.studies.directory import StudyDirectory
from hrmlm.studies.expand import Condition, Expansion, Run, nested, space_of
from hrmlm.studies.spec import Study, merged
from hrmlm.training.recipe import Recipe
from hrmlm.training.train import Reporter

STORAGE = "HRMLM_OPTUNA_STORAGE"
PRUNE_AFTER = 4
"""Trials that must be finished before any is pruned."""


INSTEAD_OF = "instead_of"
"""Attribute of a trial: the number of the failed one that it repeats."""


class Pruned(RuntimeError):
    """A trial that is not worth its budget."""


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError(
            "search.engine tpe needs Optuna: pip install 'hrmlm[study]', or use search.engine=grid with lists of values"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _storage(place: StudyDirectory) -> Any:
    optuna = _optuna()
    if url := os.environ.get(STORAGE):
        return url
    from optuna.storages.journal import JournalFileBackend

    return optuna.storages.JournalStorage(JournalFileBackend(str(place.path / "optuna.journal")))


def _sampler(seed: int) -> Any:
    return _optuna().samplers.TPESampler(seed=seed, constant_liar=True)


def _searcher(place: StudyDirectory, study: Study, arm: str) -> Any:
    """Optuna's study of one arm."""
    optuna = _optuna()
    assert study.search is not None
    pruner = optuna.pruners.MedianPruner(n_startup_trials=PRUNE_AFTER) if study.search.prune else None
    return optuna.create_study(
        storage=_storage(place),
        study_name=f"{study.name}/{arm}",
        sampler=_sampler(study.search.seed),
        pruner=pruner or optuna.pruners.NopPruner(),
        direction="minimize",
        load_if_exists=True,
    )


class TrialSource:
    """Runs that come out of a search: new trials as long as the budget of their arm lasts."""

    def __init__(self, expansion: Expansion, place: StudyDirectory, step_seconds: Mapping[str, float] | None) -> None:
        assert expansion.study.search is not None
        self.expansion, self.place, self.step_seconds = expansion, place, step_seconds
        self.search = expansion.study.search
        self.seed = expansion.study.seed_list[0]
        self.searchers = {c.label: _searcher(place, expansion.study, c.label) for c in expansion.conditions}

    @staticmethod
    def check(study: Study) -> None:
        """Raises: UserError if the study needs Optuna and it is not installed."""
        if study.search is not None and study.search.engine != "grid":
            _optuna()

    def open_runs(self) -> list[Run]:
        """Trials that are not finished, and, if there is nothing else to do, new ones."""
        runs = []
        for label, searcher in self.searchers.items():
            for trial, run in self._trials(label):
                if not trial.state.is_finished() and not self._settle(searcher, trial, run):
                    runs.append(run)
            if not self._free(runs) and (new := self._new(label)) is not None:
                runs.append(new)
        return runs

    def all_runs(self) -> list[Run]:
        """Runs of all trials so far, without those that are tried again as another trial."""
        return [run for label in self.searchers for _, run in self._trials(label)]

    def total(self) -> int:
        """Trials that all arms will have."""
        return self.search.trials * len(self.searchers)

    def retry(self, run: Run) -> None:
        """Try a failed run again: as a new trial with the same values, since Optuna takes no second result of one."""
        searcher = self.searchers[run.condition]
        assert run.trial is not None
        failed = searcher.get_trials(deepcopy=False)[run.trial]
        self._settle(searcher, failed, run)
        self.place.forget(run.id)
        searcher.enqueue_trial(failed.params, user_attrs={INSTEAD_OF: failed.number})

    def _trials(self, label: str) -> Iterator[tuple[Any, Run]]:
        """The trials of an arm that count, with their runs. Trials of equal values have one run between them."""
        trials = self.searchers[label].get_trials(deepcopy=False)
        replaced = {trial.user_attrs.get(INSTEAD_OF) for trial in trials}
        for trial in trials:
            run = self._run(self.expansion.by_label[label], trial)
            if run is not None and trial.number not in replaced:
                yield trial, run

    def _new(self, label: str) -> Run | None:
        """The run of a new trial, if the arm has any left; one process at a time asks for it."""
        claim = f"search-{list(self.searchers).index(label)}"
        token = self.place.claims.take(claim)
        if token is None:
            return None
        try:
            if len(list(self._trials(label))) >= self.search.trials:
                return None
            searcher = self.searchers[label]
            # A process that goes on with a search must not draw the numbers of its first trials once more.
            searcher.sampler = _sampler(self.search.seed + len(searcher.get_trials(deepcopy=False)))
            trial = searcher.ask()
            self._suggest(trial)
            return self._run(self.expansion.by_label[label], trial)
        finally:
            self.place.claims.release(claim, token)

    def _free(self, runs: list[Run]) -> list[Run]:
        held = set(self.place.claims.held())
        return [run for run in runs if run.id not in held]

    def _settle(self, searcher: Any, trial: Any, run: Run) -> bool:
        """Tell Optuna of a run that is over; whether it was."""
        states = _optuna().trial.TrialState
        result, error = self.place.result(run), self.place.error(run.id)
        if result is None and error is None:
            return False
        told: dict[str, Any] = {"values": result.get("loss")} if result else {"state": states.FAIL}
        if result and result.get("pruned"):
            told = {"state": states.PRUNED}
        with suppress(_optuna().exceptions.UpdateFinishedTrialError):  # another process was a moment earlier
            searcher.tell(trial.number, **told, skip_if_finished=True)
        return True

    def _suggest(self, trial: Any) -> None:
        for key, values in space_of(self.search.space).items():
            if isinstance(values, list):
                trial.suggest_categorical(key, values)
            elif all(isinstance(values[end], int) for end in ("low", "high")):
                trial.suggest_int(key, values["low"], values["high"], log=bool(values.get("log")))
            else:
                trial.suggest_float(key, values["low"], values["high"], log=bool(values.get("log")))

    def _run(self, condition: Condition, trial: Any) -> Run | None:
        """The run of a trial; None of one whose process was killed before it had all of its values: it never counts."""
        if trial.params.keys() != space_of(self.search.space).keys():
            return None
        settings = merged(condition.recipe.to_dict(), nested(trial.params))
        changed = Condition(**{**vars(condition), "recipe": Recipe.parse(settings, "recipe"), "factors": trial.params})
        steps = self.expansion.steps_of(condition, self.step_seconds)
        return self.expansion.run(changed, self.seed, steps, trial.number)


class _TrialReporter(Reporter):
    """Tells Optuna of every evaluation, and stops what it gives up."""

    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def evaluation(
        self, step: int, loss: float, bits_per_byte: float | None, is_best: bool, mean_steps: float | None = None
    ) -> None:
        """See Reporter."""
        self.trial.report(loss, step)
        if self.trial.should_prune():
            raise Pruned(f"at step {step}, {loss:.4f} nats per token")


def reporter_for(place: StudyDirectory, run: Run) -> Reporter:
    """What watches over a run: of a trial, Optuna."""
    if run.trial is None:
        return Reporter()
    study = place.study()
    searcher = _searcher(place, study, run.condition)
    trial_id = searcher.get_trials(deepcopy=False)[run.trial]._trial_id
    return _TrialReporter(_optuna().trial.Trial(searcher, trial_id))
