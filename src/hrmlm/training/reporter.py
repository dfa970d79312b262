"""What a training run tells while it goes on, and how it ended."""

from dataclasses import dataclass

from hrmlm.data.corpora import Usage
from hrmlm.training.recipe import Recipe
from hrmlm.training.trainer import StepResult


class Reporter:
    """What a run tells while it goes on; the command line's draws progress bars, this one is silent."""

    def start(self, recipe: Recipe, done: int, notes: list[str]) -> None:
        """Before the first step; `done` steps were done earlier."""

    def step(self, result: StepResult, tokens_per_second: float) -> None:
        """After every step."""

    def evaluation(
        self, step: int, loss: float, bits_per_byte: float | None, is_best: bool, mean_steps: float | None = None
    ) -> None:
        """After every evaluation. mean_steps: outer steps per validation token, of models that decide their depth."""

    def stop(self) -> None:
        """At the end, whatever the reason."""


@dataclass
class RunResult:
    """How a run ended. stopped_by: name of the signal that ended it early, None if it is complete; tokens_per_second:
    median over the steps of this process, evaluation and saving not included; corpora: what was read of each."""

    out: str
    step: int
    steps: int
    parameters: int
    tokens: int
    loss: float | None
    bits_per_byte: float | None
    best_step: int | None
    best_loss: float | None
    tokens_per_second: float
    seconds: float
    stopped_by: str | None
    corpora: list[Usage]
