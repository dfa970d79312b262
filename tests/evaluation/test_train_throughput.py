"""The training benchmark: its FLOPs, its comparisons, its refusals (R60)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hrmlm.evaluation.cost import cost_of
from tests.benchmarks import load_benchmark

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "train_throughput.py"
SMALL = [
    "--d-model",
    "64",
    "--length",
    "32",
    "--batch-size",
    "2",
    "--vocab-size",
    "96",
    "--iterations",
    "3",
    "--warmup",
    "1",
]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """The script as a module."""
    return load_benchmark("train_throughput")


def test_it_ends_with_one_line_of_json_and_needs_no_other_library(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    threads = torch.get_num_threads()
    benchmark.main(SMALL)
    torch.set_num_threads(threads)
    output = capsys.readouterr().out
    assert "hrm_text skipped" in output
    assert "none of them padding" in " ".join(output.split())
    values = json.loads(output.splitlines()[-1])
    assert list(values["rows"]) == ["matrix products", "hrm_lm", "transformer"]
    row = values["rows"]["hrm_lm"]
    assert row["tokens_per_second"] == pytest.approx(64 / (row["milliseconds"] / 1000))
    assert values["hrm_lm / transformer"] > 0


def test_from_the_sources_alone_it_refuses_what_leaves_nothing_to_measure() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, SCRIPT, "--iterations", "2", "--warmup", "2"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert "leave nothing to measure" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_transformer_has_the_same_flops(benchmark: Any) -> None:
    for arguments in (SMALL, ["--cycles", "4", "--fast-steps", "3", "--gradient-window", "4"]):
        options = benchmark.parse(arguments)
        flops = [
            cost_of(settings).training_flops_per_token
            for settings in (benchmark.hrm_settings(options), benchmark.same_flops(options))
        ]
        assert flops[0] == pytest.approx(flops[1], rel=0.02)


@pytest.mark.parametrize("window", [[], ["--gradient-window", "3"]])
def test_flops_of_the_other_library_equal_an_independent_count(benchmark: Any, window: list[str]) -> None:
    pytest.importorskip("transformers")
    options = benchmark.parse([*SMALL, *window])
    contender = benchmark.hrm_text(options)
    if contender is None:
        pytest.skip("needs transformers >= 5.24")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        contender.step()
    assert counter.get_total_flops() == pytest.approx(contender.flops, rel=0.05)
