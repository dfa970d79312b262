"""A run that was killed and resumed ends bit for bit like one that was not (R15)."""

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hrmlm.training.metrics import read_metrics
from hrmlm.training.recipe import Recipe
from hrmlm.training.run import RunDirectory
from hrmlm.training.train import train
from tests.families import FAMILIES
from tests.training.helpers import (
    FAMILY,
    RANDOM,
    Stop,
    StopAfter,
    assert_clean,
    assert_same_run,
    environment,
    exits,
    kill_in_backward,
    record,
    run_child,
    settings,
    steps_done,
    tiny,
    wait_for,
)

Straight = Callable[[str], Path]


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """A function: family → directory of a run that nothing interrupted."""

    @cache
    def run(family: str) -> Path:
        out = tmp_path_factory.mktemp("straight") / family
        train(random_recipe(data, family), out)
        return out

    return run


def random_recipe(data: Path, family: str, **changes: Any) -> Recipe:
    """Dropout, accumulation and exit sampling: everything in which chance has a part."""
    return tiny(data, family, **RANDOM, **exits(family), **changes)


def killed(recipe: Recipe, out: Path, step: int, index: int) -> None:
    kill_in_backward(step, index)
    train(recipe, out)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_resumes_exactly(family: str, data: Path, straight: Straight, tmp_path: Path) -> None:
    recipe, out = random_recipe(data, family), tmp_path / "stopped"
    with pytest.raises(Stop):
        train(recipe, out, reporter=StopAfter(4))
    assert steps_done(out) == 4
    assert RunDirectory(out).newest().step == 3  # saved as the best of the evaluation after step 3
    train(recipe, out, resume=True)
    assert_same_run(out, straight(family))


def test_depths_are_sampled_and_repeat(data: Path, tmp_path: Path) -> None:
    train(tiny(data, **exits("hrm_lm-window")), tmp_path / "run")
    assert len({line["depth"] for line in record(tmp_path / "run")}) > 1


@pytest.mark.parametrize(
    ("family", "step", "index"), [("hrm_lm-passes", 6, 1), ("hrm_lm-window", 2, 0), ("transformer", 4, 2)]
)
def test_process_killed_inside_an_accumulation_window(
    family: str, step: int, index: int, data: Path, straight: Straight, tmp_path: Path
) -> None:
    recipe, out = random_recipe(data, family), tmp_path / "killed"
    assert run_child(killed, recipe, out, step, index) == -signal.SIGKILL
    assert steps_done(out) == step - 1
    train(recipe, out, resume=True)
    assert_same_run(out, straight(family))
    assert_clean(out)


def test_killed_twice_once_before_the_first_checkpoint(data: Path, straight: Straight, tmp_path: Path) -> None:
    recipe, out = random_recipe(data, FAMILY), tmp_path / "killed"
    run_child(killed, recipe, out, 1, 1)
    assert RunDirectory(out).checkpoints() == []
    with pytest.raises(Stop):
        train(recipe, out, resume=True, reporter=StopAfter(5))
    train(recipe, out, resume=True)
    assert_same_run(out, straight(FAMILY))


def test_record_holds_each_step_once_in_order_and_keeps_the_superseded(data: Path, tmp_path: Path) -> None:
    recipe = tiny(data)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", reporter=StopAfter(5))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "step": 6, "lo')  # the kill came in the middle of a line
    train(recipe, tmp_path / "run", resume=True)
    assert [line["step"] for line in record(tmp_path / "run")] == list(range(1, 7))
    assert [line["step"] for line in record(tmp_path / "run", "eval")] == [3, 6]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl", superseded=True)
    assert [line["step"] for line in lines if line.get("superseded")] == [5]
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
    assert (again.loss, again.best_step, again.step) == (first.loss, first.best_step, 6)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before
    assert [line["step"] for line in record(tmp_path / "run", "eval")] == [3, 6]


def test_killed_before_best_was_recorded(data: Path, tmp_path: Path) -> None:
    recipe, out = tiny(data), tmp_path / "run"
    with pytest.raises(Stop):
        train(recipe, out, reporter=StopAfter(4))
    (out / "best.json").unlink()
    with pytest.raises(Stop):
        train(recipe, out, resume=True, reporter=StopAfter(5))
    assert RunDirectory(out).best_step() == 3


def test_command_line_killed_from_outside_and_resumed(data: Path, tmp_path: Path) -> None:
    """The whole way, in fresh interpreters."""
    changes = {**RANDOM, "training.steps": 20, "training.save_every": 5, "training.eval_every": 0}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings(data, **changes, **exits("hrm_lm-window"))))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "hrmlm", "train", str(tmp_path / "tiny.yaml"), "--out", str(out)]
    with subprocess.Popen(command, env=environment()) as process:
        wait_for(lambda: steps_done(out) >= 7)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert steps_done(out) < 20
    subprocess.run([*command, "--resume"], env=environment(), check=True, capture_output=True, timeout=120)
    train(tiny(data, **changes, **exits("hrm_lm-window")), tmp_path / "straight")
    assert_same_run(out, tmp_path / "straight")
