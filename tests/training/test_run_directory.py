"""Nothing of a run is overwritten without being asked, and one process at a time trains in it."""

from pathlib import Path

import pytest

from hrmlm.errors import UserError
from hrmlm.training.recipe import load_recipe
from hrmlm.training.run import RunDirectory, resolve_checkpoint
from hrmlm.training.train import train
from tests.training.helpers import Listener, child, record, run_child, steps_done, tiny, wait_for

SHORT = {"training.steps": 2, "training.eval_every": 0, "training.save_every": 0}


def test_existing_run_is_refused_unless_asked(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny(data, **SHORT), out)
    with pytest.raises(UserError, match=r"exists already.*--resume.*--overwrite"):
        train(tiny(data, **SHORT), out)
    (out / "tensorboard").mkdir()
    (out / "tensorboard" / "events").write_text("old")
    assert train(tiny(data, **{**SHORT, "training.steps": 3}), out, overwrite=True).step == 3
    assert [line["step"] for line in record(out)] == [1, 2, 3]
    assert not (out / "tensorboard").exists()
    assert [path.name for path in RunDirectory(out).checkpoints()] == ["step-00000003"]


@pytest.mark.parametrize("content", ["thesis.tex", "checkpoints/model.pt", "recipe.yaml", "metrics.jsonl"])
def test_overwrite_refuses_what_is_no_run(content: str, data: Path, tmp_path: Path) -> None:
    precious = tmp_path / "work" / content
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(UserError):
            train(tiny(data), tmp_path / "work", **options)
    assert precious.read_text() == "years of work"
    assert [path for path in (tmp_path / "work").rglob("*") if path.is_file()] == [precious]


def test_overwrite_keeps_what_a_person_put_into_a_run(data: Path, tmp_path: Path) -> None:
    train(tiny(data, **SHORT), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "notes.txt").write_text("mine")
    train(tiny(data, **SHORT), tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "checkpoints" / "notes.txt").read_text() == "mine"
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="will not be overwritten"):
        train(tiny(data, **SHORT), tmp_path / "run", overwrite=True)


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}, {}])
def test_second_process_is_refused(options: dict[str, bool], data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with child(train, tiny(data, **{**SHORT, "training.steps": 10_000}), out):
        wait_for(lambda: steps_done(out) > 0)
        with pytest.raises(UserError, match=r"is in use|exists already"):
            train(tiny(data), out, **options)
        size = (out / "metrics.jsonl").stat().st_size
        wait_for(lambda: (out / "metrics.jsonl").stat().st_size > size)  # the first goes on


def test_two_processes_start_at_the_same_moment(data: Path, tmp_path: Path) -> None:
    def contend() -> None:
        run = RunDirectory(tmp_path / "run")
        run.path.mkdir(exist_ok=True)
        run.lock()

    first = RunDirectory(tmp_path / "run")
    first.create()
    assert run_child(contend) == 1
    first.close()
    assert run_child(contend) == 0


def test_recipe_in_the_run_repeats_it(data: Path, tmp_path: Path) -> None:
    recipe = tiny(data)
    train(recipe, tmp_path / "run")
    again = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
    assert again == recipe
    train(again, tmp_path / "again")
    assert record(tmp_path / "again") == record(tmp_path / "run")


def test_resume_without_a_run(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; start the run without --resume"):
        train(tiny(data), tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_left_overs_of_any_process_are_removed(data: Path, tmp_path: Path) -> None:
    import os

    train(tiny(data, **SHORT), tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    for owner in (os.getpid(), os.getppid(), 999_999_999):
        (checkpoints / f".partial-{owner}-step-00000003").mkdir()
        (tmp_path / "run" / f".partial-{owner}-best.json").write_text("{")
    listener = Listener()
    train(tiny(data, **{**SHORT, "training.steps": 3}), tmp_path / "run", resume=True, reporter=listener)
    assert [path.name for path in tmp_path.rglob(".partial-*")] == []


def test_a_run_stands_for_its_best_checkpoint(data: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    train(tiny(data), run.path)
    run.mark_best(4, 0.5)
    assert resolve_checkpoint(run.path).step == 4
    run.mark_best(6, 0.4)
    assert resolve_checkpoint(run.path).step == 6
    assert resolve_checkpoint(run.checkpoint_path(4)).step == 4
    (run.path / "best.json").unlink()
    assert resolve_checkpoint(run.path).step == 6
