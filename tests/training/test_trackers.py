"""Report R61: trackers that fail, hang or are slow, and runs that are killed and resumed."""

import importlib.machinery
import importlib.util
import json
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hrmlm.errors import UserError
from hrmlm.training import delivery, trackers
from hrmlm.training.delivery import Delivery, Line, Mark
from hrmlm.training.metrics import read_metrics
from hrmlm.training.trackers import TRACKERS, Identity
from hrmlm.training.train import train
from tests.training.helpers import Stop, StopAfter, kill_in_backward, record, run_child, tiny

TRACKED = {"training.trackers": ("tensorboard",)}
NAMES = ("tensorboard", "wandb", "trackio")


class Journal:
    """A tracker that keeps its lines in a file, refuses steps that go back, and fails or hangs where it is told to.

    buffered: lines of the last step are only in memory until a later step comes.
    """

    def __init__(self, path: Path, trouble: str = "", hangs: bool = False, buffered: bool = False) -> None:
        self.path, self.trouble, self.hangs, self.buffered = path, trouble, hangs, buffered
        self.settling: float | None = 0.0 if buffered else None
        self.highest: int | None = None
        self.waiting: list[str] = []
        self.step = max([line["step"] for line in journal(path)], default=-1)
        self._meet("init")

    def _meet(self, place: str) -> None:
        if self.trouble == place and self.hangs:
            threading.Event().wait()
        if self.trouble == place:
            raise ConnectionError("no network")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._meet(f"log {step}")
        assert step >= self.step, "steps go back"
        if step > self.step:
            self._write()
        self.step = step
        self.waiting.append(json.dumps({"step": step, **values}) + "\n")
        if not self.buffered:
            self._write()

    def _write(self) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(self.waiting)
        self.waiting = []

    def close(self) -> None:
        self._meet("close")
        self._write()


def journal(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []


def steps_of(path: Path, name: str = "step/loss") -> list[int]:
    return [line["step"] for line in journal(path) if name in line]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a Journal in the place of tensorboard."""

    def put(path: Path, **settings: Any) -> None:
        monkeypatch.setitem(TRACKERS, "tensorboard", lambda identity: Journal(path, **settings))

    return put


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("trouble", ["init", "log 5", "close", ""])
def test_trouble_never_stops_training(
    trouble: str,
    hangs: bool,
    data: Path,
    tmp_path: Path,
    use: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(delivery, "CLOSE_SECONDS", 0.3)
    use(tmp_path / "journal", trouble=trouble, hangs=hangs)
    started = time.monotonic()
    assert train(tiny(data, **TRACKED), tmp_path / "run").step == 6
    assert time.monotonic() - started < 30
    assert [line["step"] for line in record(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in record(tmp_path / "run", "eval")] == [3, 6]
    told = capsys.readouterr().err
    assert told.count("warning: tracker tensorboard") == told.count("warning:") == bool(trouble)
    if trouble:
        assert ("did not finish" if hangs else "ConnectionError: no network") in told


@pytest.mark.parametrize("name", NAMES)
def test_a_log_directory_that_cannot_be_written(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every tracker fails like this one: permissions do not stop the superuser, a full disk is hard to have."""

    def full(identity: Identity) -> Any:
        raise OSError(28, "No space left on device", str(identity.run))

    monkeypatch.setitem(TRACKERS, name, full)
    monkeypatch.setattr(trackers, "check_trackers", lambda names: None)
    monkeypatch.setattr("hrmlm.training.setup.check_trackers", lambda names: None)
    assert train(tiny(data, **{"training.trackers": (name,)}), tmp_path / "run").step == 6
    assert len(record(tmp_path / "run")) == 6
    assert capsys.readouterr().err.count("warning:") == 1


def test_a_place_taken_by_something_else(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The directory of the marks is a file: TensorBoard is switched off, nothing else."""
    pytest.importorskip("tensorboard")
    with pytest.raises(Stop):
        train(tiny(data), tmp_path / "run", reporter=StopAfter(3))
    (tmp_path / "run" / "trackers").write_text("in the way")
    assert train(tiny(data, **TRACKED), tmp_path / "run", resume=True).step == 6
    assert [line["step"] for line in record(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr().err.count("warning:") == 1


def test_a_slow_tracker_costs_lines_not_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(delivery, "WAITING_LINES", 3)
    monkeypatch.setattr(delivery, "CLOSE_SECONDS", 0.2)
    slow = Delivery(
        "slow", lambda: Journal(tmp_path / "j", "log 1", hangs=True), Mark(tmp_path / "t" / "slow.json", "x")
    )
    started = time.monotonic()
    for step in range(1, 10_001):
        slow.log("step", step, {"loss": 1.0})
    assert time.monotonic() - started < 5
    slow.close()
    assert slow._lines.qsize() <= 5
    assert capsys.readouterr().err.count("warning:") == 1


@pytest.mark.parametrize("buffered", [False, True])
def test_killed_and_resumed_each_step_is_told_once(
    buffered: bool, data: Path, tmp_path: Path, use: Callable[..., None]
) -> None:
    """Kill at step 57, saves every 50, resume to 100."""
    every = {"training.steps": 100, "training.save_every": 50, "training.eval_every": 10, "training.eval_tokens": 40}
    recipe = tiny(data, "transformer", **TRACKED, **every)
    run, path = tmp_path / "run", tmp_path / "journal"
    use(path, buffered=buffered)

    def killed() -> None:
        kill_in_backward(57, 0)
        train(recipe, run)

    assert run_child(killed) == -9
    first = json.loads((run / "trackers" / "tensorboard.json").read_text())
    told = steps_of(path)
    assert told == list(range(1, len(told) + 1))
    assert 0 < len(told) <= 56
    train(recipe, run, resume=True)
    assert [line["step"] for line in record(run)] == list(range(1, 101))
    assert sum(bool(line.get("superseded")) for line in read_metrics(run / "metrics.jsonl", True)) == 6
    assert steps_of(path) == list(range(1, 101))
    assert steps_of(path, "eval/loss") == list(range(10, 101, 10))
    losses = [line["step/loss"] for line in journal(path) if "step/loss" in line]
    assert losses == [line["loss"] for line in record(run)]
    last = json.loads((run / "trackers" / "tensorboard.json").read_text())
    assert (last["id"], last["step"], sorted(last["events"])) == (first["id"], 100, ["eval", "step"])


def test_a_tracker_that_failed_or_came_late_catches_up(data: Path, tmp_path: Path, use: Callable[..., None]) -> None:
    run, path = tmp_path / "run", tmp_path / "journal"
    use(path, trouble="log 3")
    with pytest.raises(Stop):
        train(tiny(data, **TRACKED), run, reporter=StopAfter(5))
    assert steps_of(path) == [1, 2]
    use(path)
    train(tiny(data, **TRACKED), run, resume=True)
    assert steps_of(path) == [1, 2, 3, 4, 5, 6]
    other = tmp_path / "other"
    use(other)
    (run / "trackers" / "tensorboard.json").unlink()  # as if it had never been asked for
    train(tiny(data, **TRACKED, **{"training.steps": 8}), run, resume=True)
    assert steps_of(other) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_what_a_tracker_says_that_it_has_counts(tmp_path: Path) -> None:
    class Account(Journal):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.highest = 4

    for marked in (-1, 2, 4, 9):
        mark = Mark(tmp_path / "trackers" / "x.json", "id", marked, ["step"])
        path = tmp_path / str(marked)
        told = Delivery(
            "x", lambda path=path: Account(path), mark, [Line("step", n, {"step/loss": 1.0}) for n in range(7)]
        )
        told.close()
        assert steps_of(path) == [5, 6]


def test_a_damaged_mark_begins_a_new_tracker_run(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for content in ("", "{", "[]", '{"id": "a"}', '{"id": "a", "step": "x", "events": []}'):
        file.write_text(content)
        assert Mark.open(file, "new") == Mark(file, "new")


def test_overwriting_begins_a_new_tracker_run(data: Path, tmp_path: Path, use: Callable[..., None]) -> None:
    ids = []
    for n in range(2):
        use(tmp_path / f"journal-{n}")
        train(tiny(data, **TRACKED), tmp_path / "run", overwrite=n > 0)
        ids.append(json.loads((tmp_path / "run" / "trackers" / "tensorboard.json").read_text())["id"])
        assert steps_of(tmp_path / f"journal-{n}") == [1, 2, 3, 4, 5, 6]
    assert ids[0] != ids[1]


def test_tensorboard_keeps_each_step_once_over_two_sessions(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(Stop):  # after the save of step 4 and one more step
        train(tiny(data, **TRACKED), tmp_path / "run", reporter=StopAfter(5))
    train(tiny(data, **TRACKED), tmp_path / "run", resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    written = [(e.step, e.value) for e in events.Scalars("step/loss")]
    assert written == [(line["step"], pytest.approx(line["loss"])) for line in record(tmp_path / "run")]
    assert [e.step for e in events.Scalars("eval/loss")] == [3, 6]


@pytest.mark.parametrize("name", NAMES)
def test_missing_package_is_told_before_anything_is_written(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"pip install 'hrmlm\[{name}\]'"):
        train(tiny(data, **{"training.trackers": (name,)}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("names", [(), ("tensorboard",)])
def test_nothing_reaches_for_the_network(
    names: tuple[str, ...], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        pytest.importorskip(name)
    asked = []

    def refused(*arguments: Any, **settings: Any) -> Any:
        asked.append(arguments)
        raise OSError("no network here")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    train(tiny(data, **{"training.trackers": names}), tmp_path / "run")
    assert asked == []


def test_without_trackers_nothing_is_imported(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch.utils.tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, module, None)
    train(tiny(data, **{"training.steps": 1}), tmp_path / "run")
    assert not (tmp_path / "run" / "trackers").exists()


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with as much of wandb as is used. `started` holds the settings of each start."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.started = []  # type: ignore[attr-defined]

    class Run:
        resumed, step = False, 0  # as offline

        def __init__(self) -> None:
            self.journal = Journal(tmp_path / "journal")

        def log(self, values: dict[str, float], step: int) -> None:
            self.journal.log(step, values)

        def finish(self) -> None:
            self.journal.close()

    def init(**settings: Any) -> Run:
        module.started.append(settings)  # type: ignore[attr-defined]
        return Run()

    module.Settings = dict  # type: ignore[attr-defined]
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")  # put back at the end
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    return module


@pytest.mark.parametrize("mode", [None, "online"])
def test_wandb_is_offline_unless_asked_and_goes_on_in_the_same_run(
    mode: str | None, wandb: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    recipe, run = tiny(data, **{"training.trackers": ("wandb",)}), tmp_path / "run"
    with pytest.raises(Stop):
        train(recipe, run, reporter=StopAfter(5))
    train(recipe, run, resume=True)
    first, second = wandb.started
    assert first["mode"] == second["mode"] == (mode or "offline")
    assert first["id"] == second["id"] == json.loads((run / "trackers" / "wandb.json").read_text())["id"]
    assert first["resume"] == second["resume"] == "allow"
    assert first["config"]["training"]["steps"] == 6
    assert first["settings"]["console"] == "off"
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    assert steps_of(tmp_path / "journal") == [1, 2, 3, 4, 5, 6]
    assert secret not in json.dumps([first, second], default=str)
    for file in run.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()


def test_real_wandb_offline(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    recipe, run = tiny(data, **{"training.trackers": ("wandb",)}), tmp_path / "run"
    with pytest.raises(Stop):
        train(recipe, run, reporter=StopAfter(5))
    train(recipe, run, resume=True)
    mark = json.loads((run / "trackers" / "wandb.json").read_text())
    assert (mark["step"], sorted(mark["events"])) == (6, ["eval", "step"])
    files = sorted((run / "wandb").glob(f"offline-run-*-{mark['id']}*/*.wandb"))
    assert 1 <= len(files) <= 2  # one folder for each session, or one where they begin in the same second
    assert all(b"step/loss" in file.read_bytes() for file in files)
    for file in (run / "wandb").rglob("*"):
        assert not file.is_file() or b"0123456789abcdef0123456789abcdef" not in file.read_bytes()


def test_real_trackio_local(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: the package reads the place of its database when it is imported."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("the extra trackio is not installed")
    import sqlite3

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    recipe, run = tiny(data, **{"training.trackers": ("trackio",)}), tmp_path / "run"

    def interrupted() -> None:
        with pytest.raises(Stop):
            train(recipe, run, reporter=StopAfter(5))

    assert run_child(interrupted) == 0
    assert run_child(lambda: train(recipe, run, resume=True)) == 0
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics, run_name from metrics order by id").fetchall()
    assert {name for _, _, name in rows} == {f"run-{json.loads((run / 'trackers' / 'trackio.json').read_text())['id']}"}
    losses = [(step, json.loads(values)["step/loss"]) for step, values, _ in rows if "step/loss" in json.loads(values)]
    assert losses == [(line["step"], pytest.approx(line["loss"])) for line in record(run)]
