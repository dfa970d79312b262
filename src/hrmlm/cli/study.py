"""`hrmlm study`: commands that run studies and report on them."""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from hrmlm.cli.common import Json, print_json
from hrmlm.errors import UserError

study = typer.Typer(help="Run studies: grids of trainings, compared in a report.", no_args_is_help=True)


@study.command()
def run(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="Path of a YAML study, or name of a shipped one.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as seeds=5 or scale=published.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Study directory (default: runs/studies/NAME).")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each in its own process.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print runs, parameters, FLOPs and time.")] = False,
    measure: Annotated[bool, typer.Option(help="Measure steps for the time estimate of --dry-run.")] = True,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try runs again that failed.")] = False,
    as_json: Json = False,
) -> None:
    """Run what is not finished of a study; give the same line again to go on after any interruption.

    Example: hrmlm study run equal-param base.data.path=data/book --out runs/equal-param --jobs 2
    """
    from hrmlm.console import ERRORS, StudyBar
    from hrmlm.studies.runner import run_study
    from hrmlm.studies.spec import load_study

    settings = load_study(name, overrides or ())
    directory = out or Path("runs/studies") / settings.name
    if dry_run:
        return _dry_run(settings, directory, jobs, measure, as_json)
    outcome = run_study(settings, directory, jobs=jobs, retry_failed=retry_failed, watch=StudyBar(settings.name))
    if as_json:
        print_json({"out": str(directory), **vars(outcome)})
    else:
        print(f"{directory}: {outcome.done} of {outcome.total} runs finished, {len(outcome.failed)} failed")
        if outcome.done:
            print(f"report: hrmlm study report {directory}")
    if outcome.stopped_by:
        ERRORS.print(f"{outcome.stopped_by}: go on with the same command", highlight=False)
    for run_id, message in outcome.failed.items():
        ERRORS.print(f"failed: {run_id}: {message}", highlight=False, markup=False)
    if outcome.failed:
        ERRORS.print("try them again with --retry-failed", highlight=False)
    if outcome.stopped_by:
        raise typer.Exit(128 + signal.Signals[outcome.stopped_by])
    if outcome.failed:
        raise typer.Exit(1)


def _dry_run(settings: Any, directory: Path, jobs: int, measure: bool, as_json: bool) -> None:
    from rich.console import Console

    from hrmlm.console import ERRORS
    from hrmlm.studies import plan
    from hrmlm.studies.directory import StudyDirectory
    from hrmlm.studies.expand import device_mistakes, expand
    from hrmlm.studies.runner import source_of

    expansion = expand(settings)
    measure = measure and (settings.budget.kind, settings.budget.amount) != ("steps", 0)  # nothing is trained
    if measure and (mistakes := device_mistakes(expansion)):
        ERRORS.print(f"no step was measured: {'; '.join(mistakes)}", highlight=False, markup=False)
        measure = False
    if settings.budget.kind == "seconds" and not measure:
        raise UserError("a budget in seconds needs measured steps, on a machine with the device")
    timings = plan.measure_steps(expansion.conditions, expansion) if measure else {}
    place = StudyDirectory(directory)
    seconds = {label: timing.median for label, timing in timings.items()} | (place.measured() or {})
    steps = {c.label: expansion.steps_of(c, seconds) for c in expansion.conditions}
    planned = plan.plan(expansion, timings, steps)
    is_search = settings.search is not None and settings.search.engine != "grid"
    runs = [] if is_search else source_of(expansion, place, seconds).all_runs()
    done = sum(place.is_done(run) for run in runs)
    if as_json:
        ids = [{"id": run.id, "condition": run.condition, "seed": run.seed, "steps": run.steps} for run in runs]
        return print_json({"conditions": [line.to_dict() for line in planned], "runs": ids, "finished": done})
    plan.show(planned, expansion, jobs, done, Console())
    for run in runs:
        print(f"  {run.id}{' (finished)' if place.is_done(run) else ''}")


@study.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Study directory.")],
    out: Annotated[Path | None, typer.Option(help="Directory for report.html and report.md (default: DIR).")] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a study, finished or not: report.html (one file, no network) and report.md.

    Example: hrmlm study report runs/equal-param
    """
    from hrmlm.studies.collect import collect
    from hrmlm.studies.report import write

    findings = collect(directory)
    paths = write(findings, out or directory)
    if as_json:
        return print_json({"report": [str(path) for path in paths], **findings.to_dict()})
    for sentence in findings.summary():
        print(sentence)
    for path in paths:
        print(f"Report: {path}")


@study.command("list")
def list_studies() -> None:
    """Names and questions of the studies that come with the package.

    Example: hrmlm study list
    """
    from hrmlm.studies.spec import load_study, study_names

    for name in study_names():
        found = load_study(name)
        print(f"{name}: {found.question or found.title}")
