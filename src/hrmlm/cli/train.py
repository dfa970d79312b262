"""`hrmlm train`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hrmlm.cli.common import Json, fail, print_json
from hrmlm.errors import EndedElsewhere, UserError

if TYPE_CHECKING:
    from hrmlm.training.profiling import Profile
    from hrmlm.training.train import RunResult


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Path of a YAML recipe, or name of a shipped one.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as training.steps=100.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory (default: runs/<name of the recipe>).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the run in --out and start again.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a trace of a few steps and print the dearest operations.")
    ] = False,
    profile_steps: Annotated[
        str | None, typer.Option(help="With --profile: which steps of this process, first:last (default: 5:10).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model. Ctrl-C or SIGTERM saves and exits; --resume goes on exactly where it stopped.

    Example: hrmlm train recipes/wikitext2-hrm-lm.yaml data.path=data/wikitext-2 training.steps=200
    """
    from dataclasses import asdict

    if os.environ.get("WORLD_SIZE", "1") != "1":  # before torch is imported: its engines warn once per process
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from hrmlm.console import TrainingBar
    from hrmlm.parallel import Parallel
    from hrmlm.training.profiling import Profile
    from hrmlm.training.recipe import load_recipe, scale_warning_for
    from hrmlm.training.train import train as run
    from hrmlm.training.trainer import TrainingDiverged

    with Parallel.opened() as parallel:
        with parallel.watched(), parallel.together():
            if resume and overwrite:
                raise UserError("--resume and --overwrite exclude each other")
            settings = load_recipe(recipe, overrides or ())
            if profile_steps is not None and not profile:
                raise UserError("--profile-steps without effect: add --profile")
            watched = Profile.parse("5:10" if profile_steps is None else profile_steps) if profile else None
        directory = out or Path("runs") / Path(recipe).stem
        bar = TrainingBar(directory.name, scale_warning_for(recipe, settings))
        try:
            result = run(
                settings,
                directory,
                resume=resume,
                overwrite=overwrite,
                reporter=bar,
                profile=watched,
                parallel=parallel,
            )
        except TrainingDiverged as error:
            if not parallel.is_first:
                raise EndedElsewhere from None
            return fail(
                f"{error}; training stopped, checkpoints before it are in {directory}/checkpoints; "
                "try a lower optimizer.lr, a longer schedule.warmup or a larger model.gradient_window",
                1,
            )
    if not parallel.is_first:
        return
    if as_json:
        return print_json(asdict(result) | ({} if watched is None else {"profile": asdict(watched)}))
    _tell(result, directory, watched)


def _tell(result: "RunResult", directory: Path, profile: "Profile | None") -> None:
    """The end of a run, for people."""
    from rich.console import Console

    from hrmlm.console import ERRORS, corpora_table, profile_table

    if result.stopped_by:
        ERRORS.print(
            f"{result.stopped_by}: saved after step {result.step} of {result.steps}; go on with the same command and "
            "--resume",
            highlight=False,
        )
    else:
        print(f"{directory}: {result.step} steps, {result.tokens:,} tokens, {result.seconds:.0f} s")
        print(f"validation: {result.loss:.4f} nats per token (best {result.best_loss:.4f} at step {result.best_step})")
    if len(result.corpora) > 1:
        Console().print(corpora_table(result.corpora))
    if profile is not None:
        Console().print(profile_table(profile))
        print(f"trace: {profile.trace} (for chrome://tracing or ui.perfetto.dev)")
