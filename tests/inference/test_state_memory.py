"""The measurement of endless generation: as many tokens as asked for, a state that does not grow."""

import json
from pathlib import Path

import pytest

from hrmlm.checkpoint import save_checkpoint
from tests.benchmarks import load_benchmark
from tests.families import FAMILIES
from tests.inference.helpers import BYTES, small_model

CARRYING = next(name for name in FAMILIES if small_model(name).carries_state)


def test_state_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_benchmark("state_memory")
    save_checkpoint(tmp_path / "model", small_model(CARRYING), tokenizer=BYTES)
    script.main([str(tmp_path / "model"), "--marks", "5", "90", "30"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["tokens"] for row in rows] == [5, 30, 90], "more than the context holds"
    assert len({row["state_bytes"] for row in rows}) == 1
    assert all(row["resident_mib"] > 50 for row in rows)
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "model"), "--marks", "0"])
    assert "from 1 on" in capsys.readouterr().err
