"""Claims: one owner each, taken over from the dead and from nobody else."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

from hrmlm.studies.claims import Claims, started, this_place
from tests.training.helpers import child, wait_for


def _take(directory: Path, names: list[str], queue: Any, hold: bool = False) -> None:
    claims = Claims(directory)
    queue.put([name for name in names if claims.take(name)])
    if hold:
        time.sleep(60)


def test_each_claim_is_taken_once_by_many_processes(tmp_path: Path) -> None:
    names = [f"run-{i}" for i in range(40)]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_take, args=(tmp_path, names, queue, True)) for _ in range(4)]
    for process in processes:
        process.start()
    taken = [name for _ in processes for name in queue.get(timeout=30)]
    for process in processes:
        process.kill()
        process.join()
    assert sorted(taken) == sorted(names)


def test_the_claim_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    queue = multiprocessing.get_context("fork").Queue()
    claims = Claims(tmp_path)
    with child(_take, tmp_path, ["run"], queue, True) as process:
        assert queue.get(timeout=30) == ["run"]
        assert claims.take("run") is None
        assert claims.held() == ["run"]
        os.kill(process.pid, signal.SIGSTOP)  # frozen for however long: its own machine knows that it lives
        os.utime(tmp_path / "run.claim", (0, 0))
        assert claims.take("run") is None
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        assert claims.held() == []
        assert claims.take("run") is not None


def test_a_killed_process_that_nobody_has_waited_for_is_dead(tmp_path: Path) -> None:
    queue = multiprocessing.get_context("fork").Queue()
    with child(_take, tmp_path, ["run"], queue, True) as process:
        queue.get(timeout=30)
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: started(process.pid) is None, 10)
        assert Claims(tmp_path).take("run") is not None


def _rewrite(directory: Path, **changes: Any) -> None:
    path = directory / "run.claim"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_process_number_that_was_used_again_is_no_owner(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    assert claims.take("run")
    _rewrite(tmp_path, started="1")
    assert claims.take("run") is not None


def test_claims_of_other_machines_are_stale_when_they_are_not_touched(tmp_path: Path) -> None:
    claims = Claims(tmp_path, stale_seconds=100)
    token = claims.take("run")
    assert token
    _rewrite(tmp_path, place=f"elsewhere/{this_place()}", process=1)
    assert claims.take("run") is None
    old = time.time() - 101
    os.utime(tmp_path / "run.claim", (old, old))
    assert claims.beat("run", token)  # it lives after all
    assert claims.take("run") is None
    os.utime(tmp_path / "run.claim", (old, old))
    assert claims.take("run") is not None
    assert not claims.beat("run", token), "the old owner must learn that the run is no longer its own"
    assert not claims.adopt("run", token)
    claims.release("run", token)
    assert claims.held() == ["run"], "the old owner must not release the claim of the new one"


def test_release_and_damaged_claims(tmp_path: Path) -> None:
    claims = Claims(tmp_path, stale_seconds=100)
    token = claims.take("run")
    assert token
    claims.release("run", token)
    assert claims.held() == []
    (tmp_path / "run.claim").write_text("{")
    assert claims.take("run") is None, "what cannot be read may be somebody's, until it is old"
    os.utime(tmp_path / "run.claim", (0, 0))
    assert claims.take("run") is not None
