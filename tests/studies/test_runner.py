"""Studies run to their end: killed and resumed, shared by processes, with failures marked and passed over."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from hrmlm.errors import UserError
from hrmlm.evaluation import timing
from hrmlm.studies import worker
from hrmlm.studies.collect import collect
from hrmlm.studies.directory import StudyDirectory
from hrmlm.studies.document import markdown
from hrmlm.studies.expand import expand
from hrmlm.studies.plan import ITERATIONS, WARMUP, measure_steps
from hrmlm.studies.report import build
from hrmlm.studies.runner import FixedRuns, _Child, _Runner, run_study
from hrmlm.studies.search import PRUNE_AFTER, TrialSource
from hrmlm.training.metrics import read_metrics
from hrmlm.training.trainer import StepResult, Trainer
from tests.studies.helpers import Told, run_here, search_here, settings, study
from tests.test_cli import Capture, call, refused
from tests.training.helpers import environment, record, steps_done, wait_for

ONE = {"evaluation": {"tokens": 100}, "seeds": [0]}


@contextmanager
def started(file: Path, out: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`hrmlm study run` in its own process; killed at the end if it is still there."""
    command = [sys.executable, "-m", "hrmlm", "study", "run", str(file), "--out", str(out), *options]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def written(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def results(out: Path) -> dict[str, float]:
    return {path.parent.name: json.loads(path.read_text())["loss"] for path in out.glob("runs/*/result.json")}


def test_killed_in_the_middle_and_resumed(data: Path, tmp_path: Path) -> None:
    """kill -9 of everything while the second of two runs trains: the first is kept, the second goes on."""
    long = settings(data, **ONE, budget={"steps": 200})
    long["base"]["training"] |= {"eval_every": 0, "save_every": 20}
    file, out = written(tmp_path / "s.yaml", long), tmp_path / "out"
    first, second = expand(study(data, **{**long, "base": long["base"]})).runs()
    train = out / "runs" / second.id / "train"
    with started(file, out) as process:
        wait_for(lambda: steps_done(train) >= 30, 120)
        (claim,) = (out / "claims").glob("*.claim")
        process.kill()
        os.kill(json.loads(claim.read_text())["process"], signal.SIGKILL)
        process.wait()
    assert results(out).keys() == {first.id}
    before = (out / "runs" / first.id / "result.json").stat().st_mtime_ns
    outcome = run_study(study(data, **long), out)
    assert (outcome.done, outcome.total, outcome.failed, outcome.stopped_by) == (2, 2, {}, None)
    assert (out / "runs" / first.id / "result.json").stat().st_mtime_ns == before, "a finished run was repeated"
    events = [line["event"] for line in read_metrics(train / "metrics.jsonl", superseded=True)]
    assert events.count("resume") == 1
    assert [line["step"] for line in record(train)] == list(range(1, 201)), "each step once, in order (R61)"

    run_here(study(data, **long), tmp_path / "reference")
    assert results(out) == results(tmp_path / "reference"), "as if nothing had happened"
    assert not list((out / "claims").glob("*.claim"))


def test_the_run_of_a_killed_study_does_not_go_on_alone(data: Path, tmp_path: Path) -> None:
    """kill -9 of the study process alone: its run notices, saves and stops, and its claim becomes free."""
    long = settings(data, **ONE, budget={"steps": 100_000})
    long["base"]["training"] |= {"eval_every": 0, "save_every": 0}
    file, out = written(tmp_path / "s.yaml", long), tmp_path / "out"
    with started(file, out) as process:
        wait_for(lambda: any(steps_done(path / "train") >= 3 for path in out.glob("runs/*")), 120)
        process.kill()
        process.wait()
        wait_for(lambda: StudyDirectory(out).claims.held() == [], 30)
    (run,) = out.glob("runs/*/train")
    assert list((run / "checkpoints").iterdir()), "it was saved"


@pytest.mark.parametrize("stopped", [False, True])
def test_each_run_that_ends_is_told_once_and_counted_in_turn(stopped: bool, data: Path, tmp_path: Path) -> None:
    """A result lies on the disk a while before its process ends, and perhaps the study is stopped in between."""
    values = study(data, evaluation={"tokens": 50}, seeds=1, budget={"steps": 0})
    runs = run_here(values, tmp_path).runs()
    place, watch = StudyDirectory(tmp_path), Told()
    runner = _Runner(place, FixedRuns(runs, place), 2, watch)
    for run in runs:
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        runner.children[run.id] = _Child(run, place.claims.take(run.id) or "", process)
    runner._stop_children() if stopped else runner._reap()
    assert [line.split(",")[0] for line in watch.lines] == ["1/2 hrm", "2/2 plain"]
    assert place.claims.held() == []


def test_two_processes_share_a_study(data: Path, tmp_path: Path) -> None:
    values = settings(data, evaluation={"tokens": 100}, seeds=2, budget={"steps": 60})
    file, out = written(tmp_path / "s.yaml", values), tmp_path / "out"
    with started(file, out) as one, started(file, out, "--jobs", "2") as two:
        told = [process.communicate(timeout=240)[1].decode() for process in (one, two)]
        assert [one.returncode, two.returncode] == [0, 0], told
    runs = expand(study(data, **values)).runs()
    assert results(out).keys() == {run.id for run in runs}
    for run in runs:
        lines = read_metrics(out / "runs" / run.id / "train" / "metrics.jsonl", superseded=True)
        events = [line["event"] for line in lines]
        assert (events.count("start"), events.count("resume"), events.count("step")) == (1, 0, 60), "done twice"
    finished = [sum("nats per token" in line for line in text.splitlines()) for text in told]
    assert sum(finished) == 4
    assert all(finished), "both should have had something to do"


def test_failed_runs_are_marked_and_the_others_go_on(data: Path, tmp_path: Path, capsys: Capture) -> None:
    values = settings(data, **ONE, budget={"steps": 12})
    values["arms"]["hrm"]["optimizer"] = {"lr": 1e30}
    file, out = written(tmp_path / "s.yaml", values), tmp_path / "out"
    assert call("study", "run", file, "--out", out, "--json") == 1
    output = capsys.readouterr()
    outcome = json.loads(output.out)
    assert (outcome["done"], outcome["total"]) == (1, 2)
    ((run_id, message),) = outcome["failed"].items()
    assert run_id.startswith("hrm-")
    assert "is not finite" in message
    assert f"failed: {run_id}: {message}" in output.err
    error = json.loads((out / "runs" / run_id / "error.json").read_text())
    assert error["error"] == "TrainingDiverged"
    assert "Traceback" in error["traceback"]
    stamp = (out / "runs" / run_id / "error.json").stat().st_mtime_ns
    assert call("study", "run", file, "--out", out) == 1
    assert (out / "runs" / run_id / "error.json").stat().st_mtime_ns == stamp, "failed runs are not tried again unasked"
    assert call("study", "report", out) == 0
    assert "1 failed" in capsys.readouterr().out
    StudyDirectory(out).forget(run_id)
    run_here(study(data, **values), out)
    assert (out / "runs" / run_id / "error.json").stat().st_mtime_ns > stamp


def test_more_seeds_later_keep_what_is_there(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_here(study(data, seeds=1, budget={"steps": 3}), out)
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    run_here(study(data, seeds=2, budget={"steps": 3}), out)
    assert len(results(out)) == 4
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_measurements_are_added_to_finished_runs_without_training_again(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_here(study(data, **ONE, budget={"steps": 3}), out)
    run_here(study(data, **ONE, budget={"steps": 3}, measure=["latency"]), out)
    for path in out.glob("runs/*"):
        assert json.loads((path / "result.json").read_text())["measures"]["latency"]["cached_ms"] > 0
        assert [line["step"] for line in record(path / "train")] == [1, 2, 3]


def test_fresh_weights_are_measured_without_training(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_here(study(data, **ONE, budget={"steps": 0}, measure=["latency"]), out)
    for path in out.glob("runs/*"):
        result = json.loads((path / "result.json").read_text())
        assert (result["steps"], result["tokens"], result["training"]) == (0, 0, None)
        assert not (path / "train").exists()


def test_a_directory_of_something_else_is_left_alone(data: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="is not a study directory; choose another --out"):
        run_study(study(data), tmp_path)
    run_here(study(data, **ONE, budget={"steps": 1}), tmp_path / "out")
    with pytest.raises(UserError, match="holds the study 'tiny', not 'other'"):
        run_study(study(data, name="other"), tmp_path / "out")
    claims = StudyDirectory(tmp_path / "out").claims
    assert claims.take("somebody")
    with pytest.raises(UserError, match=r"is being run with other settings \(budget.steps\)"):
        run_study(study(data, **ONE, budget={"steps": 2}), tmp_path / "out")


def test_nothing_is_written_for_a_study_that_cannot_be_run(data: Path, tmp_path: Path, capsys: Capture) -> None:
    values = settings(data, baseline="x", budget={"steps": 5})
    values["arms"]["hrm"]["model"]["n_cycels"] = 3
    file = written(tmp_path / "s.yaml", values)
    told = refused(capsys, "study", "run", file, "--out", tmp_path / "out")
    assert "2 mistakes, nothing was started: (1)" in told
    assert "n_cycels" in told
    assert not (tmp_path / "out").exists()
    assert "is not a study directory" in refused(capsys, "study", "report", tmp_path)


def test_a_device_that_is_not_there(data: Path, tmp_path: Path, capsys: Capture) -> None:
    values = settings(data)
    values["base"]["training"]["device"] = "meta"
    file = written(tmp_path / "s.yaml", values)
    assert "training.device 'meta' cannot be used" in refused(capsys, "study", "run", file, "--out", tmp_path / "out")
    assert call("study", "run", file, "--out", tmp_path / "out", "--dry-run", "--json") == 0, "a plan needs no device"
    output = capsys.readouterr()
    assert "no step was measured" in output.err
    assert json.loads(output.out)["conditions"][0]["step_seconds"] is None


def test_dry_run_tells_runs_parameters_flops_and_time(data: Path, tmp_path: Path, capsys: Capture) -> None:
    file = written(tmp_path / "s.yaml", settings(data))
    assert call("study", "run", file, "--out", tmp_path / "out", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    expansion = expand(study(data))
    assert [run["id"] for run in plan["runs"]] == [run.id for run in expansion.runs()]
    for line in plan["conditions"]:
        cost = expansion.by_label[line["condition"]].cost
        assert line["parameters"] == cost.parameters
        assert line["training_flops"] == pytest.approx(8 * 32 * cost.training_flops_per_token)
        assert line["step_seconds"] > 0
        assert line["seconds_per_run"] >= 8 * line["step_seconds"]
    assert not (tmp_path / "out").exists()
    assert call("study", "run", file, "--out", tmp_path / "out", "--dry-run", "--no-measure") == 0
    assert "No time estimate" in capsys.readouterr().out


def test_step_times_are_medians_without_the_first_rounds(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known delay comes out, a first step of 2 s does not move it (R60), on a clock of our own."""
    now, seen = [0.0], list[int]()
    step = Trainer.step

    def slow(self: Trainer, number: int, micro_batches: Any) -> StepResult:
        result = step(self, number, micro_batches)
        now[0] += 2.0 if number == 1 else 0.05
        seen.append(number)
        return result

    monkeypatch.setattr(Trainer, "step", slow)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    expansion = expand(study(data))
    found = measure_steps(expansion.conditions, expansion)
    assert {label: timing.median for label, timing in found.items()} == pytest.approx({"hrm": 0.05, "plain": 0.05})
    assert seen == [n for n in range(1, ITERATIONS + 1) for _ in range(2)], "interleaved"
    assert all(len(timing.seconds) == ITERATIONS - WARMUP for timing in found.values())


def test_search_without_optuna_says_what_to_install(data: Path) -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        values = study(data, search={"engine": "tpe", "space": {"optimizer.lr": [1e-3, 1e-2]}})
        with pytest.raises(UserError, match=r"pip install 'hrmlm\[study\]'"):
            TrialSource.check(values)
    else:
        pytest.skip("Optuna is installed")


SPACE = {"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}}
WITH_OPTUNA = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="the search by TPE needs the extra `study`"
)


def searched(trials: int, space: dict[str, Any] = SPACE, **changes: Any) -> dict[str, Any]:
    return {**ONE, **changes, "search": {"engine": "tpe", "trials": trials, "space": space}}


ONE_ARM = {"hrm": settings(None)["arms"]["hrm"]}


@WITH_OPTUNA
def test_a_killed_search_goes_on_and_two_processes_share_one(data: Path, tmp_path: Path) -> None:
    values = settings(data, **searched(3, budget={"steps": 60}, arms=ONE_ARM))
    values["base"]["training"] |= {"eval_every": 30, "save_every": 10}
    file, out = written(tmp_path / "s.yaml", values), tmp_path / "out"
    with started(file, out) as process:
        wait_for(lambda: any(steps_done(path) >= 12 for path in out.glob("runs/*/train")), 120)
        process.kill()  # its run notices, saves and stops
        process.wait()
    with started(file, out) as first, started(file, out) as second:
        codes = (first.wait(240), second.wait(240))
    assert codes == (0, 0), [path.read_text() for path in out.glob("runs/*/error.json")]
    found = [json.loads(path.read_text()) for path in out.glob("runs/*/result.json")]
    assert sorted(result["trial"] for result in found) == [0, 1, 2]
    for path in out.glob("runs/*/train"):
        steps = [line["step"] for line in record(path)]
        assert steps == list(range(1, len(steps) + 1)), "a killed trial goes on where it was"
    assert run_study(study(data, **values), out).total == 3, "a finished search asks for nothing more"


@WITH_OPTUNA
def test_each_arm_is_searched_with_as_many_trials(data: Path, tmp_path: Path) -> None:
    source = search_here(study(data, **searched(3, budget={"steps": 4})), tmp_path)
    assert sorted((run.condition, run.trial) for run in source.all_runs()) == [
        (arm, trial) for arm in ("hrm", "plain") for trial in range(3)
    ]
    assert len({run.recipe.optimizer.lr for run in source.all_runs()}) == 3, "both arms get the same draws"
    labels = [condition.label.split(":")[0] for condition in collect(tmp_path).conditions]
    assert labels == [f"{arm}, trial {trial}" for arm in ("hrm", "plain") for trial in range(3)]


@WITH_OPTUNA
def test_a_stopped_search_tells_how_many_trials_there_will_be(data: Path, tmp_path: Path) -> None:
    values = study(data, **searched(3, budget={"steps": 4}))
    place, watch = StudyDirectory(tmp_path), Told()
    place.store(values)
    source = TrialSource(expand(values), place, None)
    (run, *_) = source.open_runs()
    place.describe(run)
    token = place.claims.take(run.id)
    assert worker.main(str(tmp_path), run.id, token or "") == worker.DONE
    runner = _Runner(place, source, 1, watch)
    runner._ended(_Child(run, token or "", subprocess.Popen([sys.executable, "-c", ""])), worker.DONE)
    outcome = runner._outcome()
    arms = len(values.arms)
    assert (outcome.done, outcome.total) == (1, 3 * arms)
    assert watch.lines[0].startswith(f"1/{3 * arms} {run.condition}, trial 0: ")


@WITH_OPTUNA
def test_two_processes_may_tell_of_the_same_trial(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is faster, after this one has seen that the trial is not finished."""
    import optuna

    storage = optuna.storages.JournalStorage
    real = storage.set_trial_state_values

    def overtaken(self: Any, trial: int, state: Any, values: Any = None) -> bool:
        real(self, trial, state, values)
        if state.is_finished():
            return real(self, trial, state, values)  # too late
        return True

    monkeypatch.setattr(storage, "set_trial_state_values", overtaken)
    search_here(study(data, **searched(2, budget={"steps": 4}, arms=ONE_ARM)), tmp_path)
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 2


@WITH_OPTUNA
def test_trials_that_fail_are_tried_again_with_the_same_values(data: Path, tmp_path: Path) -> None:
    space = {"optimizer.lr": {"low": 1e29, "high": 1e30, "log": True}}
    values = study(data, **searched(2, space, budget={"steps": 4}))

    def tried(**options: bool) -> dict[str, float]:
        runs = search_here(values, tmp_path, **options).all_runs()
        assert all(StudyDirectory(tmp_path).error(run.id) for run in runs)
        return {run.id: run.recipe.optimizer.lr for run in runs}

    first = tried()
    assert len(first) == 4
    assert tried() == first, "failed trials are not tried again unasked"
    again = tried(retry_failed=True)
    assert sorted(again.values()) == sorted(first.values())
    assert tried() == again


@WITH_OPTUNA
def test_equal_trials_share_a_run_and_end(data: Path, tmp_path: Path) -> None:
    values = study(data, **searched(4, {"optimizer.lr": [1e-3]}, budget={"steps": 4}, arms=ONE_ARM))
    assert len(search_here(values, tmp_path).all_runs()) == 4
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 1


@WITH_OPTUNA
def test_hopeless_trials_are_pruned_and_reported(data: Path, tmp_path: Path) -> None:
    space = {"optimizer.lr": {"low": 1e-9, "high": 1e-2, "log": True}}
    values = study(data, **searched(8, space, budget={"steps": 16}, arms=ONE_ARM))
    rates = {run.id: run.recipe.optimizer.lr for run in search_here(values, tmp_path).all_runs()}
    found = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/result.json")]
    pruned = [result for result in found if result.get("pruned")]
    assert 0 < len(pruned) <= len(found) - PRUNE_AFTER
    assert max(rates, key=rates.__getitem__) not in {result["id"] for result in pruned}
    for result in pruned:
        assert steps_done(tmp_path / "runs" / result["id"] / "train") < 16
    findings = collect(tmp_path)
    assert f"8 of 8 runs are finished, {len(pruned)} of them pruned" in findings.summary()[0]
    labels = [condition.label for condition in findings.conditions if condition.pruned]
    assert sorted(labels) == sorted(f"hrm, trial {r['trial']}: lr={rates[r['id']]:.3g}" for r in pruned)
    assert markdown("r", build(findings)).count("| pruned |") == len(pruned)
