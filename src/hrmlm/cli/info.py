"""`hrmlm info`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hrmlm.cli.common import Json, print_json
from hrmlm.errors import UserError


def info(
    model: Annotated[str, typer.Argument(metavar="PRESET|RECIPE|CHECKPOINT", help="What to count.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes of a recipe, as in `train`.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Sequence length for FLOPs (default: the context).")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Peak memory of a training step, by what saves it.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="With --memory: run steps and measure them too.")] = False,
    as_json: Json = False,
) -> None:
    """Count parameters, weight bytes, applications, FLOPs per token and cache bytes, without allocating weights.

    Example: hrmlm info hrm-lm-359m-nt36
    """
    from hrmlm.evaluation.cost import cost_of, show
    from hrmlm.training.recipe import load_recipe
    from hrmlm.training.run import resolve_checkpoint
    from hrmlm.training.train import recipe_model

    if measure and not memory:
        raise UserError("--measure needs --memory")
    if Path(model).is_dir() and (memory or overrides):
        raise UserError(f"{model} is no recipe; a run has one in it: {Path(model) / 'recipe.yaml'}")
    if memory:
        return _training_memory(model, overrides or (), measure, as_json)
    is_saved = Path(model).is_dir()
    settings = resolve_checkpoint(model).model if is_saved else recipe_model(load_recipe(model, overrides or ()))
    report = cost_of(settings, length)
    if as_json:
        return print_json(report.to_dict())
    from rich.console import Console

    show(report, Console(), model)


def _training_memory(name: str, overrides: Sequence[str], measure: bool, as_json: bool) -> None:
    """`info --memory`."""
    from rich.console import Console

    from hrmlm.console import ERRORS
    from hrmlm.evaluation.training_memory import choices, show
    from hrmlm.training.recipe import load_recipe
    from hrmlm.training.train import recipe_model

    recipe = load_recipe(name, overrides)
    recipe = recipe.model_copy(update={"model": recipe_model(recipe).model_dump(mode="json")})
    with ERRORS.status("counting one training step for every choice"):
        found = list(choices(recipe, measure))
    if as_json:
        return print_json([choice.to_dict() for choice in found])
    show(recipe, found, Console(), name)
