"""SIGTERM and Ctrl-C: save, exit with code 0, go on later as if nothing had been."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from hrmlm.cli import main
from hrmlm.training.recipe import Recipe
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import Reporter, train
from hrmlm.training.trainer import StepResult
from tests.training.helpers import (
    Listener,
    assert_clean,
    assert_same_run,
    child,
    record,
    settings,
    steps_done,
    tiny,
    wait_for,
)

LONG = {"training.steps": 4000, "training.save_every": 0, "training.eval_every": 0, "model.context": 16}


class SignalAt(Listener):
    """Gets a signal right after a step."""

    def __init__(self, step: int, number: signal.Signals) -> None:
        super().__init__()
        self.at, self.number = step, number

    def step(self, result: StepResult, tokens_per_second: float) -> None:
        if result.step == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("step", "number"), [(1, signal.SIGINT), (3, signal.SIGTERM), (6, signal.SIGINT)])
def test_signal_after_a_step(step: int, number: signal.Signals, data: Path, tmp_path: Path) -> None:
    """Also where an evaluation was due just then (3), and after the last step (6): it is made up for."""
    recipe = tiny(data)
    train(recipe, tmp_path / "straight")
    result = train(recipe, tmp_path / "run", reporter=SignalAt(step, number))
    assert (result.step, result.stopped_by) == (step, number.name)
    assert RunDirectory(tmp_path / "run").newest().step == step
    assert record(tmp_path / "run", "stop")[-1]["reason"] == number.name
    assert not (tmp_path / "run" / "result.json").exists()
    assert train(recipe, tmp_path / "run", resume=True).stopped_by is None
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_handlers_are_put_back(data: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    train(tiny(data, **{"training.steps": 1}), tmp_path / "run")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, 2), (signal.SIGINT, 0)])
def test_command_line_saves_and_exits_with_code_0(
    number: signal.Signals, workers: int, data: Path, tmp_path: Path
) -> None:
    """The signal goes to the whole process group, as from a terminal or a cluster's scheduler."""
    changes: dict[str, Any] = {**LONG, "data.workers": workers}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(settings(data, **changes)))
    out = tmp_path / "run"
    with child(main, ["train", str(tmp_path / "r.yaml"), "--out", str(out)], group=True) as process:
        wait_for(lambda: steps_done(out) >= 3)
        os.killpg(process.pid, number)
        process.join(60)
        assert process.exitcode == 0
    assert RunDirectory(out).newest().step == steps_done(out) < 4000
    assert_clean(out)


def test_second_signal_ends_at_once(data: Path, tmp_path: Path) -> None:
    class Impatient(Reporter):
        def step(self, result: StepResult, tokens_per_second: float) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny(data), tmp_path / "run", reporter=Impatient())
    assert_clean(tmp_path / "run")


def test_only_the_main_thread_handles_signals(data: Path, tmp_path: Path) -> None:
    import threading

    recipe: Recipe = tiny(data, **{"training.steps": 1})
    results = []
    thread = threading.Thread(target=lambda: results.append(train(recipe, tmp_path / "run")))
    thread.start()
    thread.join()
    assert results[0].step == 1
