"""What the command line draws: the progress of a training run, and tables about it."""

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from hrmlm.data.corpora import Usage
from hrmlm.studies.watch import Running, Watch
from hrmlm.training.profiling import Profile
from hrmlm.training.recipe import Recipe
from hrmlm.training.train import Reporter
from hrmlm.training.trainer import StepResult

ERRORS = Console(stderr=True, soft_wrap=True)


class TrainingBar(Reporter):
    """A bar with loss, tokens per second and time left; plain lines where standard error is not a terminal."""

    def __init__(self, name: str, warning: str | None = None) -> None:
        self.name, self.warning = name, warning
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  valid {task.fields[valid]}{task.fields[steps]}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=ERRORS,
            disable=not ERRORS.is_terminal,
        )
        self._mean: float | None = None
        self._mean_steps: float | None = None
        self._mean_mfu: float | None = None

    def start(self, recipe: Recipe, done: int, notes: list[str]) -> None:
        """See Reporter."""
        if self.warning:
            ERRORS.print(f"warning: {self.warning}", style="yellow", highlight=False, markup=False)
        for note in notes:
            ERRORS.print(f"{self.name}: {note}", style="dim", highlight=False, markup=False)
        self._task = self._progress.add_task(
            escape(self.name),
            total=recipe.training.steps,
            completed=done,
            loss="–",
            valid="–",
            steps="",
            rate="– tokens/s",
        )
        self._progress.start()

    def step(self, result: StepResult, tokens_per_second: float) -> None:
        """See Reporter. The loss shown is an exponential mean, as single batches jump."""
        if result.updated:
            self._mean = _smooth(self._mean, result.loss)
            self._mean_steps = _smooth(self._mean_steps, result.mean_steps)
        shown = "–" if self._mean is None else f"{self._mean:.3f}"
        steps = "" if self._mean_steps is None else f"  steps {self._mean_steps:.2f}"
        rate = f"{tokens_per_second:,.0f} tokens/s"
        if result.mfu is not None:
            self._mean_mfu = _smooth(self._mean_mfu, result.mfu)
            rate += f"  MFU {self._mean_mfu:.0%}"
        self._progress.update(self._task, completed=result.step, loss=shown, steps=steps, rate=rate)

    def evaluation(
        self, step: int, loss: float, bits_per_byte: float | None, is_best: bool, mean_steps: float | None = None
    ) -> None:
        """See Reporter."""
        self._progress.update(self._task, valid=f"{loss:.3f}")
        if not ERRORS.is_terminal:
            bits = "" if bits_per_byte is None else f", {bits_per_byte:.4f} bits per byte"
            depth = "" if mean_steps is None else f", {mean_steps:.2f} steps per token"
            line = f"{self.name}: step {step}, validation {loss:.4f} nats per token{bits}{depth}"
            ERRORS.print(line, highlight=False, markup=False)

    def stop(self) -> None:
        """See Reporter."""
        self._progress.stop()


class _StudyProgress(Progress):
    """A bar, and a line below it on what is going on: beside the bar there is no room in a terminal of 80 columns."""

    running = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """See Progress."""
        yield self.make_tasks_table(self.tasks)
        if self.running:
            yield Text(self.running, style="dim", no_wrap=True, overflow="ellipsis")


class StudyBar(Watch):
    """A bar of all runs, with the steps of those that are going on; lines about runs that ended stay above it."""

    def __init__(self, name: str) -> None:
        self._progress = _StudyProgress(
            TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True, max_width=24)),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[over]} of {task.fields[runs]} runs"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=ERRORS,
            transient=True,
            speed_estimate_period=600,  # runs of large and small models take turns
        )
        self._task = self._progress.add_task(escape(name), total=None, over=0, runs="–")
        self.wants_steps = ERRORS.is_terminal

    def tell(self, line: str) -> None:
        """See Watch."""
        ERRORS.print(line, highlight=False, markup=False)

    def now(self, over: int, total: int, running: Sequence[Running]) -> None:
        """See Watch."""
        parts = sum(one.step / one.steps for one in running if one.steps)
        self._progress.running = "; ".join(f"{one.name}: {one.told}" for one in running)
        self._progress.update(self._task, total=total, completed=over + parts, over=over, runs=total, refresh=True)
        self._progress.start()

    def stop(self) -> None:
        """See Watch."""
        if self._progress.live.is_started:
            self._progress.stop()


def corpora_table(corpora: Sequence[Usage]) -> Table:
    """What a run read of each corpus."""
    table = Table("corpus", "tokens", "share", "epochs", title="read", title_justify="left")
    for usage in corpora:
        table.add_row(escape(usage.path), f"{usage.tokens:,}", f"{usage.share:.2%}", f"{usage.epochs:.2f}")
    return table


def profile_table(profile: Profile) -> Table:
    """The dearest operations."""
    title = (
        f"steps {profile.first} to {profile.last} of this process: {profile.seconds:.2f} s; time on the {profile.clock}"
    )
    table = Table("operation", "calls", "own ms", "share", title=title, title_justify="left")
    for operation in profile.operations:
        table.add_row(
            escape(operation.name), f"{operation.calls:,}", f"{operation.milliseconds:.2f}", f"{operation.share:.1%}"
        )
    return table


def _smooth(mean: float | None, value: float | None) -> float | None:
    """Exponential mean; None as long as there is no value."""
    return value if mean is None or value is None else 0.9 * mean + 0.1 * value
