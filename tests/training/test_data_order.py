"""What a run reads: each window once per epoch, in the same order whoever loads and however often killed (R24)."""

from pathlib import Path

import pytest

from hrmlm.data.batch import Batch
from hrmlm.data.tokens import PreparedData, TokenWindows
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import train
from hrmlm.training.trainer import StepResult, Trainer
from tests.training.helpers import Stop, StopAfter, run_child, tiny

STEPS = {"training.steps": 8, "training.batch_size": 3, "training.accumulation": 2, "training.eval_every": 0}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[list[int]]]]:
    """(step, windows) of every step a Trainer does."""
    steps: list[tuple[int, list[list[int]]]] = []
    step = Trainer.step

    def spy(self: Trainer, number: int, micro_batches: list[Batch]) -> StepResult:
        steps.append((number, [row for batch in micro_batches for row in batch.inputs_BL.tolist()]))
        return step(self, number, micro_batches)

    monkeypatch.setattr(Trainer, "step", spy)
    return steps


@pytest.mark.parametrize("workers", [0, 2])
def test_windows_before_and_after_a_kill_are_those_of_one_run(
    workers: int, short_data: Path, tmp_path: Path, seen: list[tuple[int, list[list[int]]]]
) -> None:
    recipe = tiny(short_data, **STEPS, **{"data.workers": workers, "training.save_every": 5})
    with pytest.raises(Stop):  # workers have made batches ahead by then
        train(recipe, tmp_path / "run", reporter=StopAfter(6))
    train(recipe, tmp_path / "run", resume=True)
    assert [number for number, _ in seen] == [1, 2, 3, 4, 5, 6, 6, 7, 8]
    assert seen[5] == seen[6]
    read = [window for _, windows in seen[:5] + seen[6:] for window in windows]

    data = PreparedData.open(short_data)
    order = TokenWindows(data.split("train"), 16, 3, seed=0)
    assert read == [row for index in range(16) for row in order[index].inputs_BL.tolist()]
    epoch = order.windows_per_epoch
    assert epoch < len(read), "the test must cross the end of an epoch"
    text = data.split("train")[:].tolist()
    starts = [next(i for i in range(len(text)) if text[i : i + 16] == window) for window in read[:epoch]]
    assert len(set(starts)) == epoch, "a window was repeated within an epoch"


def test_tokens_reported_are_tokens_read(
    short_data: Path, tmp_path: Path, seen: list[tuple[int, list[list[int]]]]
) -> None:
    result = train(tiny(short_data, **STEPS), tmp_path / "run")
    assert result.tokens == sum(len(window) for _, windows in seen for window in windows) == 8 * 3 * 2 * 16


def test_lock_is_free_as_soon_as_a_run_with_workers_is_killed(short_data: Path, tmp_path: Path) -> None:
    from tests.training.test_exact_resume import killed

    recipe = tiny(short_data, **{"data.workers": 2})
    run_child(killed, recipe, tmp_path / "run", 3, 0)
    train(recipe, tmp_path / "run", resume=True)
    assert RunDirectory(tmp_path / "run").newest().step == 6
