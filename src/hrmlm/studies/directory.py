"""The directory of a study, which several processes and machines may share.

study.yaml     the study, resolved        runs/<id>/run.json      what the run is
plan.json      conditions and runs        runs/<id>/train/        its run directory, as of `hrmlm train`
measured.json  measured step times        runs/<id>/result.json   there once it is finished
claims/        who works on what          runs/<id>/error.json    there if it failed
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hrmlm.errors import UserError
from hrmlm.files import read_json, read_text, remove_partials, write_atomic, write_json
from hrmlm.studies.claims import Claims
from hrmlm.studies.expand import Run
from hrmlm.studies.spec import Study, dump_study, parse_study
from hrmlm.studies.stored import check_plan
from hrmlm.training.run import difference


class StudyDirectory:
    """Paths of a study, and the states of its runs."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.runs = self.path / "runs"

    @property
    def claims(self) -> Claims:
        """Who works on which run."""
        return Claims(self.path / "claims")

    def is_study(self) -> bool:
        """Whether a study was started here."""
        return (self.path / "study.yaml").is_file()

    def study(self) -> Study:
        """The study as it was last started. Raises: UserError."""
        if not self.is_study():
            raise UserError(f"{self.path} is not a study directory: it has no study.yaml; see `hrmlm study run`")
        file = self.path / "study.yaml"
        return parse_study(read_text(file), str(file))

    def store(self, study: Study) -> dict[str, tuple[Any, Any]]:
        """Write the study down; return what differs from the one that was here.

        Raises: UserError if the directory holds something else, or another study is being run in it right now.
        """
        if not self.is_study():
            if self.path.is_file() or (self.path.is_dir() and any(self.path.iterdir()) and not self.runs.is_dir()):
                raise UserError(f"{self.path} exists and is not a study directory; choose another --out")
            self.runs.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / "study.yaml", dump_study(study))
            return {}
        remove_partials(self.path)
        old = self.study()
        changes = difference(old.to_dict(), study.to_dict())
        if old.name != study.name:
            raise UserError(f"{self.path} holds the study {old.name!r}, not {study.name!r}; choose another --out")
        if changes and (held := self.claims.held()):
            raise UserError(
                f"{self.path} is being run with other settings ({', '.join(changes)}) by a process that works on "
                f"{held[0]}; wait for it, or give the same settings"
            )
        if changes:
            write_atomic(self.path / "study.yaml", dump_study(study))
        return changes

    def measured(self) -> dict[str, float] | None:
        """Step times by label, if they were measured."""
        file = self.path / "measured.json"
        if not file.is_file():
            return None
        values = read_json(file)
        if not isinstance(values, dict) or not all(isinstance(v, float) and v > 0 for v in values.values()):
            raise UserError(f"{file} is damaged; remove it, and the steps that fit in the budget are measured again")
        return values

    def store_measured(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Keep step times for all processes of this study; what another process has stored first counts."""
        partial = self.path / f".measured-{os.getpid()}"
        partial.write_text(json.dumps(dict(seconds), indent=2) + "\n", encoding="utf-8")
        try:
            os.link(partial, self.path / "measured.json")
        except FileExistsError:
            pass
        finally:
            partial.unlink(missing_ok=True)
        return self.measured() or {}

    def store_plan(self, conditions: list[dict[str, Any]], runs: list[Run], given: dict[str, Any]) -> None:
        """Keep what the report needs to know of runs that are not there (yet). given: further facts."""
        listed = [{"id": run.id, "condition": run.condition, "seed": run.seed, "steps": run.steps} for run in runs]
        write_json(self.path / "plan.json", {"conditions": conditions, "runs": listed, **given})

    def plan(self) -> dict[str, Any]:
        """What `store_plan` wrote. Raises: UserError if it is missing or damaged."""
        file = self.path / "plan.json"
        if not file.is_file():
            raise UserError(f"{file} does not exist; give `hrmlm study run` again, it is written anew")
        plan = read_json(file)
        check_plan(plan, file)
        return plan

    def folder(self, run_id: str) -> Path:
        """The directory of a run."""
        return self.runs / run_id

    def describe(self, run: Run) -> None:
        """Write down what a run is."""
        self.folder(run.id).mkdir(parents=True, exist_ok=True)
        write_json(self.folder(run.id) / "run.json", run.to_dict())

    def result(self, run: Run) -> dict[str, Any] | None:
        """The result of a finished run, None if it is not finished. Raises: UserError if it is damaged."""
        file = self.folder(run.id) / "result.json"
        if not file.is_file():
            return None
        result = read_json(file)
        if not isinstance(result, dict) or not isinstance(result.get("measures"), dict):
            raise UserError(f"{file} is damaged; remove it, and the run is evaluated again")
        return result if set(run.measure) <= result["measures"].keys() else None

    def is_done(self, run: Run) -> bool:
        """Whether a run is finished, with all its measurements."""
        return self.result(run) is not None

    def error(self, run_id: str) -> dict[str, Any] | None:
        """How a run failed; None if it did not."""
        file = self.folder(run_id) / "error.json"
        if not file.is_file():
            return None
        error = read_json(file)
        return error if isinstance(error, dict) else {"message": f"not known: {file} is damaged"}

    def forget(self, run_id: str) -> None:
        """Forget a failed run with its checkpoints, in which may be what made it fail."""
        (self.folder(run_id) / "error.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder(run_id), ignore_errors=True)
