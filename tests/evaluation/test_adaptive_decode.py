"""The benchmark of decoding with learned depth: its prediction, and that it runs the steps it says (R35, R60)."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from hrmlm.evaluation.timing import Timing
from tests.benchmarks import load_benchmark
from tests.families import FAMILIES


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """The script as a module."""
    return load_benchmark("adaptive_decode")


def recipe(directory: Path, family: str) -> str:
    (directory / "r.yaml").write_text(yaml.safe_dump({"model": FAMILIES[family]}))
    return str(directory / "r.yaml")


def test_the_last_line_is_json(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = f"--length 16 --depths 1 2 4 --rounds 3 --warmup 1 --preset {recipe(tmp_path, 'cosmicfish')}"
    benchmark.main(small.split())
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    names = ["cached, 1 step", "cached, 2 steps", "cached, 4 steps", "recomputed, 1 step"]
    assert list(result["rows"]) == names
    assert all(row["milliseconds"] > 0 for row in result["rows"].values())
    assert math.isfinite(result["most_steps_against_prediction"])  # its value depends on the machine's mood
    assert "cached / recomputed at 1 step: 1/" in output


def test_prediction_and_share(benchmark: Any) -> None:
    options = benchmark.parse(["--depths", "1", "2", "4", "--repeats", "1"])
    seconds = {"cached, 1 step": 3.0, "cached, 2 steps": 5.0, "cached, 4 steps": 10.8, "recomputed, 1 step": 60.0}
    rounds = {name: Timing((value, 2 * value, value)) for name, value in seconds.items()}
    result = benchmark.summary(options, rounds)
    assert result["cached_share_of_recomputed"] == pytest.approx(1 / 20)
    assert (result["seconds_once"], result["seconds_per_step"]) == pytest.approx((1.0, 2.0))
    assert result["most_steps_against_prediction"] == pytest.approx(10.8 / 9)
    assert benchmark.line([1, 2, 4, 8], [3, 5, 9, 17]) == pytest.approx((1, 2))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--depths", "1", "2"], "--depths needs 1"),
        (["--rounds", "1"], "leave nothing to measure"),
        (["--preset", "nothing"], "unknown recipe"),
    ],
)
def test_mistakes_are_one_line(
    benchmark: Any, arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--preset", recipe(tmp_path, "cosmicfish"), "--length", "8", *arguments])
    assert stop.value.code == 2
    assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        benchmark.main(["--preset", recipe(tmp_path, "hrm_lm")])
    assert "does not learn when to stop" in capsys.readouterr().err
