"""A run that was killed and resumed ends bit for bit like one that was not (R15)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hrmlm.training.metrics import read_metrics
from hrmlm.training.recipe import Recipe
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import train
from tests.families import FAMILIES
from tests.training.helpers import (
    RANDOM,
    Stop,
    StopAfter,
    assert_clean,
    assert_same_run,
    exits,
    kill_in_backward,
    record,
    run_child,
    settings,
    steps_done,
    tiny,
    wait_for,
)


def killed(recipe: Recipe, out: Path, step: int, index: int) -> None:
    kill_in_backward(step, index)
    train(recipe, out)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_resumes_exactly(family: str, data: Path, tmp_path: Path) -> None:
    recipe = tiny(data, family, **RANDOM, **exits(family))
    train(recipe, tmp_path / "straight")
    with pytest.raises(Stop):
        train(recipe, tmp_path / "stopped", reporter=StopAfter(5))
    assert steps_done(tmp_path / "stopped") == 5
    assert RunDirectory(tmp_path / "stopped").newest().step == 4  # the best of the evaluation of step 4
    train(recipe, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")


def test_depths_are_sampled_and_repeat(data: Path, tmp_path: Path) -> None:
    train(tiny(data, **exits("hrm_lm-window")), tmp_path / "run")
    assert len({line["depth"] for line in record(tmp_path / "run")}) > 1


@pytest.mark.parametrize(("step", "index"), [(6, 2), (5, 1), (2, 0)])
@pytest.mark.parametrize("family", ["hrm_lm-passes", "transformer"])
def test_process_killed_inside_an_accumulation_window(
    family: str, step: int, index: int, data: Path, tmp_path: Path
) -> None:
    recipe = tiny(data, family, **RANDOM, **exits(family))
    train(recipe, tmp_path / "straight")
    assert run_child(killed, recipe, tmp_path / "killed", step, index) == -signal.SIGKILL
    assert steps_done(tmp_path / "killed") == step - 1
    train(recipe, tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "killed", tmp_path / "straight")
    assert_clean(tmp_path / "killed")


def test_killed_twice(data: Path, tmp_path: Path) -> None:
    recipe = tiny(data, **RANDOM)
    train(recipe, tmp_path / "straight")
    run_child(killed, recipe, tmp_path / "killed", 4, 1)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "killed", resume=True, reporter=StopAfter(8))
    train(recipe, tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


def test_record_holds_each_step_once_in_order_and_keeps_the_superseded(data: Path, tmp_path: Path) -> None:
    recipe = tiny(data)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", reporter=StopAfter(6))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "step": 7, "lo')  # the kill came in the middle of a line
    train(recipe, tmp_path / "run", resume=True)
    assert [line["step"] for line in record(tmp_path / "run")] == list(range(1, 9))
    assert [line["step"] for line in record(tmp_path / "run", "eval")] == [4, 8]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl", superseded=True)
    assert [line["step"] for line in lines if line.get("superseded")] == [5, 6]
    assert [line["event"] for line in lines if line["event"] in ("start", "resume", "stop")] == [
        "start",
        "resume",
        "stop",
    ]


def test_resuming_a_complete_run_changes_nothing(data: Path, tmp_path: Path) -> None:
    recipe = tiny(data)
    first = train(recipe, tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    again = train(recipe, tmp_path / "run", resume=True)
    assert (again.loss, again.best_step, again.step) == (first.loss, first.best_step, 8)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before
    assert [line["step"] for line in record(tmp_path / "run", "eval")] == [4, 8]


def test_killed_before_best_was_recorded(data: Path, tmp_path: Path) -> None:
    recipe = tiny(data)
    train(recipe, tmp_path / "straight")
    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", reporter=StopAfter(5))
    (tmp_path / "run" / "best.json").unlink()
    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", resume=True, reporter=StopAfter(6))
    assert RunDirectory(tmp_path / "run").best_step() == 4
    train(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_command_line_killed_from_outside_and_resumed(data: Path, tmp_path: Path) -> None:
    """The whole way, in fresh interpreters."""
    changes = {**RANDOM, "training.steps": 60, "training.save_every": 7, "training.eval_every": 0}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings(data, **changes, **exits("hrm_lm-window"))))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "hrmlm", "train", str(tmp_path / "tiny.yaml"), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment) as process:
        wait_for(lambda: steps_done(out) >= 9)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert steps_done(out) < 60
    subprocess.run([*command, "--resume"], env=environment, check=True, capture_output=True, timeout=120)
    train(tiny(data, **changes, **exits("hrm_lm-window")), tmp_path / "straight")
    assert_same_run(out, tmp_path / "straight")
