"""The benchmark of decoding: its cards, its line of JSON, and that what it calls identical is (R60)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hrmlm.checkpoint import save_checkpoint
from hrmlm.data.prepare import prepare
from hrmlm.inference.packing import can_pack
from hrmlm.models.blocks import Linear
from tests.benchmarks import load_benchmark
from tests.inference.helpers import BYTES, small_model


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """The script as a module."""
    return load_benchmark("decode_latency")


SMALL = "--batches 1 2 --contexts 8 --vocab-size 64 --rounds 3 --warmup 1 --threads 1"


def test_cases(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--widths", "64", *SMALL.split()])
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    assert [(case["batch"], case["context"]) for case in result["cases"]] == [(1, 8), (2, 8)]
    for case in result["cases"]:
        assert all(row["milliseconds"] > 0 for row in case["rows"].values())
        assert ("hrm_lm, recomputed" in case["rows"]) == (case["batch"] == 1)
        body, bare = (case["rows"][name]["milliseconds"] for name in ("hrm_lm body", "bare products"))
        assert body > bare
        assert case["memory"]["hrm_lm"]["cache_bytes"] == 17 * 2 * 4 * 64 * case["batch"] * case["context"]
    assert result["peak_memory_mib"] > 0
    assert "aim" in output


@torch.no_grad()
def test_bare_products_are_all_matrices_of_the_schedule(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("hrm_lm", n_cycles=4, fast_steps=3)
    run = benchmark.bare_products(model, 2)
    read = []
    multiply = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: read.append(self.weight.numel()) or multiply(self, x))
    run()
    D = model.config.d_model
    assert sum(read) == 380 * D * D
    assert isinstance(model.fast.gate, nn.Linear)


def test_drafting(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not can_pack(small_model("hrm_lm")):
        pytest.skip("this build of torch cannot pack")
    (tmp_path / "text.txt").write_text("\n\n".join(f"text number {i} says something" for i in range(60)))
    prepare([str(tmp_path / "text.txt")], tmp_path / "data", tokenizer="bytes", separator="\n\n")
    save_checkpoint(tmp_path / "model", small_model("hrm_lm"), tokenizer=BYTES)
    where = ["--checkpoint", str(tmp_path / "model"), "--data", str(tmp_path / "data")]
    benchmark.main([*where, "--widths", "--tokens", "24", "--prompts", "2", *SMALL.split()])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["drafting"]
    assert result["identical"] is True
    assert result["speed_up"] > 0
    with pytest.raises(SystemExit):
        benchmark.main([*where[:2], "--widths"])
    assert "--data" in capsys.readouterr().err
