"""Looking at a few steps closely: the run is the same, the trace can be read, the table adds up."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hrmlm.cli import main
from hrmlm.errors import UserError
from hrmlm.training.profiling import DEAREST, Profile
from hrmlm.training.train import train
from tests.training.helpers import Stop, StopAfter, assert_clean, assert_same_run, tiny


def trace_of(profile: Profile) -> list[dict[str, Any]]:
    assert profile.trace is not None
    with gzip.open(profile.trace, "rt") as file:
        return json.load(file)["traceEvents"]


def test_the_run_is_the_same_and_the_trace_covers_the_steps(data: Path, tmp_path: Path) -> None:
    recipe = tiny(data, "transformer", **{"model.dropout": 0.1, "training.eval_every": 0, "training.save_every": 0})
    train(recipe, tmp_path / "plain")
    profile = Profile(2, 3)
    train(recipe, tmp_path / "profiled", profile=profile)
    assert_same_run(tmp_path / "profiled", tmp_path / "plain")
    assert_clean(tmp_path / "profiled")
    assert profile.trace == str(tmp_path / "profiled" / "profile" / "steps-2-3.json.gz")
    events = trace_of(profile)
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    assert "aten::mm" in names
    assert [path.name for path in (tmp_path / "profiled" / "profile").iterdir()] == ["steps-2-3.json.gz"]
    operations = profile.operations
    assert len(operations) == DEAREST
    assert [o.milliseconds for o in operations] == sorted((o.milliseconds for o in operations), reverse=True)
    assert 0 < sum(o.share for o in operations) <= 1.0 + 1e-9
    assert all(
        o.share == pytest.approx(o.milliseconds * operations[0].share / operations[0].milliseconds) for o in operations
    )
    assert profile.seconds > sum(o.milliseconds for o in operations) / 1000 / max(1, torch.get_num_threads()) * 0.5


def test_calls_are_counted(tmp_path: Path) -> None:
    """Against operations whose number is known."""

    def steps():
        for _ in range(5):
            for _ in range(7):
                torch.ones(3).tanh()
            yield None

    profile = Profile(2, 3)
    assert len(list(profile.watch(steps(), tmp_path / "p"))) == 5
    assert {o.name: o.calls for o in profile.operations}["aten::tanh"] == 14
    assert (profile.first, profile.last, profile.clock) == (2, 3, "cpu")


def test_a_run_that_ends_among_the_steps_keeps_what_it_has(data: Path, tmp_path: Path) -> None:
    profile = Profile(3, 40)
    with pytest.raises(Stop):
        train(tiny(data, "transformer"), tmp_path / "run", profile=profile, reporter=StopAfter(3))
    assert trace_of(profile)
    assert (tmp_path / "run" / "profile").is_dir()
    resumed = Profile(1, 1)
    train(tiny(data, "transformer"), tmp_path / "run", resume=True, profile=resumed)
    assert trace_of(resumed)
    train(tiny(data, "transformer"), tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run" / "profile").exists()


def test_steps_that_do_not_come_or_make_no_sense(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"begins with step 7 of this process, which does 6"):
        train(tiny(data, "transformer"), tmp_path / "run", profile=Profile(7, 9))
    assert not (tmp_path / "run").exists()
    with pytest.raises(Stop):
        train(tiny(data, "transformer"), tmp_path / "run", reporter=StopAfter(5))
    with pytest.raises(UserError, match=r"begins with step 3 of this process, which does 2"):
        train(tiny(data, "transformer"), tmp_path / "run", resume=True, profile=Profile(3, 4))
    for text in ("", "0:3", "5:4", "a", "1:2:3", "-1:2", "9" * 5000, "\u0663"):
        with pytest.raises(UserError, match="such as 5:10"):
            Profile.parse(text)
    assert (Profile.parse("5:10"), Profile.parse("3")) == (Profile(5, 10), Profile(3, 3))


def test_command(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tiny(data, "transformer").to_dict()))
    for option, steps in (("--json", "2:2"), ("--overwrite", "3")):
        with pytest.raises(SystemExit) as ended:
            main(["train", str(file), "--out", str(tmp_path / "run"), "--profile", "--profile-steps", steps, option])
        assert ended.value.code == 0
        told = capsys.readouterr().out
        if option == "--json":
            result = json.loads(told)["profile"]
            assert [result["first"], result["last"], len(result["operations"])] == [2, 2, DEAREST]
            assert Path(result["trace"]).is_file()
    with pytest.raises(SystemExit) as ended:
        main(["train", str(file), "--out", str(tmp_path / "other"), "--profile-steps", "3"])
    assert (ended.value.code, (tmp_path / "other").exists()) == (2, False)
    assert "add --profile" in capsys.readouterr().err
    assert "steps 3 to 3 of this process" in told
    assert "aten::" in told
    assert "trace: " in told
