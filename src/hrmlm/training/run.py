"""A run directory: recipe, record, checkpoints. Anything may be killed at any moment and the rest stays usable.

recipe.yaml     the resolved recipe          metrics.jsonl   one line per step, evaluation and event
checkpoints/    step-00000500/, …            best.json       which checkpoint had the lowest validation loss
verified.json   data files found right       trackers/       which runs of trackers belong to this one, and how far
profile/        traces                       tensorboard/, wandb/   what trackers write
"""

import fcntl
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from hrmlm.checkpoint import MANIFEST, Checkpoint, NewerFormatError, open_checkpoint
from hrmlm.errors import UserError
from hrmlm.files import read_json, refuse_existing, remove_partials, write_atomic, write_json
from hrmlm.training.recipe import Recipe


def warn(message: str) -> None:
    """One line on standard error."""
    print(f"warning: {message}", file=sys.stderr)


_FILES = ("recipe.yaml", "metrics.jsonl", "best.json", "result.json", "verified.json")
_DIRECTORIES = ("trackers", "tensorboard", "wandb", "profile")


class RunDirectory:
    """Paths of a run and what may be done with them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.verified = self.path / "verified.json"
        self._lock: Any = None

    def create(self, overwrite: bool = False) -> None:
        """A new, empty run directory. Raises: UserError if it exists with content and overwriting was not asked for."""
        if overwrite and self.path.is_dir():
            if not self._looks_like_run():
                raise UserError(f"{self.path} is not a run directory and will not be overwritten")
            self.lock()
            for name in _FILES:
                (self.path / name).unlink(missing_ok=True)
            for path in [*self.checkpoints(), *(self.path / name for name in _DIRECTORIES)]:
                _remove(path)
        else:
            try:
                refuse_existing(self.path)
            except UserError:
                raise UserError(
                    f"{self.path} exists already: add --resume to go on with it, --overwrite to start again, "
                    "or choose another --out"
                ) from None
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock()

    def _looks_like_run(self) -> bool:
        known = {*_FILES, *_DIRECTORIES, "checkpoints", ".lock"}
        entries = (entry.name for entry in self.path.iterdir())
        return self.is_run() and all(name in known or name.startswith(".partial-") for name in entries)

    def is_run(self) -> bool:
        """Whether a run was started here, or nothing at all (it was killed before its first file)."""
        named_like_one = self.metrics.is_file() and (self.path / "recipe.yaml").is_file()
        return self.path.is_dir() and (
            named_like_one or (self.path / ".lock").is_file() or not any(self.path.iterdir())
        )

    def lock(self) -> None:
        """Hold the directory for this process. Raises: UserError if another process trains in it."""
        if self._lock is not None:
            return
        self._lock = open(self.path / ".lock", "w")  # noqa: SIM115  held until the process ends
        try:
            # Not flock: loader workers would inherit it, and hold it for seconds after this process was killed.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{self.path} is in use by another process that trains in it") from None
        remove_partials(self.path, exclusive=True)
        remove_partials(self.path / "checkpoints", exclusive=True)

    def close(self) -> None:
        """Let other processes use the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_recipe(self, recipe: Recipe) -> None:
        """Write the resolved recipe, from which the run can be repeated."""
        write_atomic(self.path / "recipe.yaml", yaml.safe_dump(recipe.to_dict(), sort_keys=False))

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step stands."""
        return self.path / "checkpoints" / f"step-{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Checkpoint directories, newest first. They may be damaged; `open_checkpoint` tells."""
        return sorted((self.path / "checkpoints").glob("step-????????"), reverse=True)

    def newest(self) -> Checkpoint:
        """The newest checkpoint that is whole; damaged ones are named in a warning.

        Raises: UserError if there is none, or the newest is of a later format.
        """
        for path in self.checkpoints():
            try:
                return open_checkpoint(path)
            except NewerFormatError:
                raise
            except UserError as error:
                warn(f"{error}; looking for an older checkpoint")
        raise UserError(f"{self.path} has no usable checkpoint; start again with --overwrite")

    def remove_after(self, step: int) -> None:
        """Remove the (damaged) checkpoints of later steps: the run is about to write these steps again."""
        for path in self.checkpoints():
            if path > self.checkpoint_path(step):
                _remove(path)

    def best_step(self) -> int | None:
        """Step of the best checkpoint, if one was recorded and is there."""
        if not (self.path / "best.json").is_file():
            return None
        try:
            step = read_json(self.path / "best.json")["step"]
        except (UserError, KeyError, TypeError):
            step = None
        if type(step) is not int or step < 0:
            warn(f"{self.path / 'best.json'} is damaged: the best checkpoint is not known")
            return None
        return step if self.checkpoint_path(step).is_dir() else None

    def mark_best(self, step: int, loss: float) -> None:
        """Record that the checkpoint of `step`, which must exist, has the lowest validation loss so far."""
        assert self.checkpoint_path(step).is_dir()
        write_json(self.path / "best.json", {"step": step, "loss": loss})

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints and the best."""
        best = self.best_step()
        for path in self.checkpoints()[keep:]:
            if best is None or path != self.checkpoint_path(best):
                _remove(path)


def _remove(path: Path) -> None:
    (path / MANIFEST).unlink(missing_ok=True)  # first: a half-removed directory is not a checkpoint
    shutil.rmtree(path, ignore_errors=True)


def resolve_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint a path means: itself, or of a run directory the best one, else the newest. Raises: UserError."""
    path = Path(path)
    if not (path / MANIFEST).is_file() and (path / "checkpoints").is_dir():
        run = RunDirectory(path)
        best = run.best_step()
        if best is not None:
            try:
                return open_checkpoint(run.checkpoint_path(best))
            except UserError as error:
                warn(f"{error}; using the newest instead")
        return run.newest()
    return open_checkpoint(path)


def difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two nested mappings, with both values."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(k for k in new if k not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changes.update(difference(before, after, f"{prefix}{key}."))
        elif before != after:
            changes[prefix + key] = (before, after)
    return changes
