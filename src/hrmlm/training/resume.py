"""Going on from a checkpoint: what may have changed since, and where the run stands."""

from typing import Any

from pydantic import TypeAdapter, ValidationError

from hrmlm.checkpoint import MANIFEST, Checkpoint
from hrmlm.errors import UserError
from hrmlm.training.recipe import Recipe
from hrmlm.training.run import difference
from hrmlm.training.setup import Setup
from hrmlm.training.trainer import Progress

FIXED_ON_RESUME = (
    "model.",
    "data.window",
    "training.seed",
    "training.batch_size",
    "training.accumulation",
    "optimizer.kind",
)
"""What cannot change in the middle of a run: the weights' shapes, the order of the data, what the optimizer keeps."""


def check_changes(setup: Setup, checkpoint: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Differences to the recipe the run was started with; what is given now wins, and is announced in the notes.

    Raises: UserError for a checkpoint without a training state, other data, and changes that a run cannot bear.
    """
    recipe = setup.recipe
    if checkpoint.training is None or checkpoint.optimizer is None:
        raise UserError(
            f"{checkpoint.path} holds weights only, so training cannot go on from it; start a new run from these "
            f"weights with training.init_from={checkpoint.path}"
        )
    setup.check_tokenizer(checkpoint)
    if checkpoint.data_fingerprint != setup.data.fingerprint:
        raise UserError(
            f"{setup.data.name} has fingerprint {setup.data.fingerprint} and the run was trained on "
            f"{checkpoint.data_fingerprint}; give the same prepared data in the same shares, or start a new run "
            f"with training.init_from={checkpoint.path}"
        )
    old = Recipe.parse(checkpoint.training["recipe"], f"{checkpoint.path}: recipe")
    changes = difference(old.to_dict(), recipe.to_dict())
    fixed = [key for key in changes if key.startswith(FIXED_ON_RESUME)]
    if fixed:
        told = ", ".join(f"{key} (was {changes[key][0]!r}, now {changes[key][1]!r})" for key in fixed)
        raise UserError(
            f"cannot change in the middle of a run: {told}; start a new run with training.init_from={checkpoint.path}"
        )
    done, steps = checkpoint.step, recipe.training.steps
    if steps < done:
        raise UserError(f"training.steps={steps} but the run has done {done} steps; give at least {done}")
    setup.notes.append(f"resumed after step {done} of {steps} from {checkpoint.path}")
    for key, (before, after) in changes.items():
        setup.notes.append(f"{key}: {before!r} in the checkpoint, {after!r} given now; the value given now is used")
    if any(key.startswith(("optimizer.lr", "schedule.", "training.steps")) for key in changes):
        setup.notes.append(f"the learning rate follows the new schedule from step {done + 1} on, without restarting it")
    return changes


def progress_of(checkpoint: Checkpoint) -> Progress:
    """Where the run of a checkpoint stands. Raises: UserError if the record of that is damaged."""
    position = {k: v for k, v in (checkpoint.training or {}).items() if k in Progress.__dataclass_fields__}
    try:
        return TypeAdapter(Progress).validate_python(position)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(f"{checkpoint.path / MANIFEST} is damaged: training.{where} is no valid value") from None
