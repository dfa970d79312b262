"""Experiment trackers beside the local record: TensorBoard, Weights & Biases, Trackio.

Each runs in a thread of its own, behind a queue: one that fails, hangs or is slow never stops a run and never keeps it
waiting; it costs one warning. A resumed run goes on in the same tracker run, from the step that the tracker has.
"""

import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hrmlm.errors import UserError
from hrmlm.training.delivery import CLOSE_SECONDS, Delivery, Line, Mark, Tracker
from hrmlm.training.metrics import numbers_of, read_metrics
from hrmlm.training.recipe import Recipe


@dataclass(frozen=True)
class Identity:
    """Which tracker run is meant. run: directory of the training run; id: the same in all its sessions; recipe: plain
    values, told to trackers that show settings."""

    run: Path
    id: str
    recipe: Mapping[str, Any]

    @property
    def name(self) -> str:
        """For people; the directory's, made unique."""
        return f"{self.run.resolve().name}-{self.id}"


class TensorBoard:
    """Event files in RUN/tensorboard (extra: tensorboard)."""

    settling: float | None = None
    highest: int | None = None

    def __init__(self, identity: Identity) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(identity.run / "tensorboard")

    def log(self, step: int, values: dict[str, float]) -> None:
        """See Tracker. Flushed each time, so that a killed run leaves all that it was told."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases in RUN/wandb (extra: wandb). Offline unless WANDB_MODE says otherwise.

    Only numbers and the recipe are recorded: no code, no console output, nothing about the machine's files.
    """

    settling: float | None = (
        1.0  # a step is written when the next one begins, and that to the disk every second, see below
    )

    def __init__(self, identity: Identity) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # the package would report its own errors otherwise
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hrmlm"),
            name=identity.name,
            id=identity.id,
            resume="allow",
            dir=str(identity.run),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(identity.recipe),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
                x_transaction_log_flush_interval=1,
                login_timeout=1,
                finish_timeout=CLOSE_SECONDS,
            ),
        )
        self.highest: int | None = self._run.step - 1 if self._run.resumed else None  # offline it cannot know

    def log(self, step: int, values: dict[str, float]) -> None:
        """See Tracker."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


class Trackio:
    """A run of Trackio (extra: trackio), in its local database unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

    settling: float | None = 2.0  # it writes every half a second

    def __init__(self, identity: Identity) -> None:
        import trackio

        with redirect_stdout(sys.stderr):  # it greets on standard output, which belongs to the result
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "hrmlm"),
                name=identity.name,
                resume="allow",
                config=dict(identity.recipe),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        following = getattr(self._run, "_next_step", None)  # there is no public way to ask
        self.highest: int | None = following - 1 if isinstance(following, int) else None

    def log(self, step: int, values: dict[str, float]) -> None:
        """See Tracker."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """See Tracker."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


TRACKERS: dict[str, Callable[[Identity], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def check_trackers(names: Sequence[str]) -> None:
    """Raises: UserError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"the tracker {name} needs: pip install 'hrmlm[{name}]'")


def open_trackers(recipe: Recipe, run: Path) -> list[Delivery]:
    """The trackers of a run, working in the background.

    What the local record has and a tracker lacks is told to it first: a tracker that failed, or was not asked for, in
    an earlier session catches up.
    """
    lines = _lines(run / "metrics.jsonl") if recipe.training.trackers else []
    deliveries = []
    for name in recipe.training.trackers:
        mark = Mark.open(run / "trackers" / f"{name}.json", new_id=uuid.uuid4().hex[:8])
        make = partial(TRACKERS[name], Identity(run, mark.id, recipe.to_dict()))
        deliveries.append(Delivery(name, make, mark, lines))
    return deliveries


def _lines(path: Path) -> list[Line]:
    """The numbers of a record, but for superseded lines."""
    return [_line_of(**line) for line in read_metrics(path)] if path.is_file() else []


def _line_of(event: str, step: int, **values: Any) -> Line:
    return Line(event, step, numbers_of(event, values))
