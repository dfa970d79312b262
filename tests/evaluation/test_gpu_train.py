"""The GPU benchmark at toy size on the CPU, and the comparison with an older version (R60)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hrmlm.data.prepare import prepare
from hrmlm.evaluation.cost import cost_of
from tests.benchmarks import load_benchmark

ROOT = Path(__file__).resolve().parents[2]
TOY = "--device cpu --widths 32 --length 16 --batch-size 4 --steps 24 --warmup 4 --workers 0 --compile none"
SMALL = TOY.split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    text = "\n\n".join(f"{number}: the dog sleeps on in the sun." for number in range(300))
    (directory / "text.txt").write_text(text)
    prepare([str(directory / "text.txt")], directory / "data", tokenizer="bytes", separator="\n\n")
    return directory / "data"


def test_trains_all_models_and_tells(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = load_benchmark("gpu_train")
    benchmark.main([*SMALL, "--data", str(data), "--peak-flops", "1e10", "--set", "optimizer.clip=2"])
    output = capsys.readouterr().out
    assert "none of them padding" in " ".join(output.split())
    values = json.loads(output.splitlines()[-1])
    expected = [(32, "hrm_lm"), (32, "transformer"), (32, "universal")]
    assert [(row["d_model"], row["model"]) for row in values["rows"]] == expected
    for row in values["rows"]:
        assert row["spans"] == 2
        assert row["spread"] >= 0
        assert 0 < row["last_loss"] < row["first_loss"]
        settings = benchmark.recipe(benchmark.parse(SMALL), row["model"], row["d_model"], 257).model
        flops = cost_of(settings, 16).training_flops_per_token
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / 1e10)
        assert row["peak_memory_bytes"] is None


def test_what_does_not_fit_gets_smaller_batches(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load_benchmark("gpu_train")
    options = benchmark.parse([*SMALL, "--data", str(data)])
    tried = []

    def measured(options: Any, data: Any, settings: Any) -> dict[str, Any]:
        tried.append((settings.training.batch_size, settings.training.accumulation))
        if settings.training.batch_size > fits:
            raise torch.OutOfMemoryError
        return {"fits": True}

    monkeypatch.setattr(benchmark, "measured", measured)
    prepared = benchmark.open_data(options, data)
    fits = 1
    assert benchmark.fitted(options, prepared, "hrm_lm", 32) == {"fits": True}
    assert tried == [(4, 1), (2, 2), (1, 4)]
    fits = 0
    assert benchmark.fitted(options, prepared, "hrm_lm", 32) == {"fits": False}


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load_benchmark("gpu_train").main([*SMALL, "--warmup", "20"])
    assert stopped.value.code == 2
    assert "fewer than the 10 that are timed together" in capsys.readouterr().err


def test_versions_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against itself, slowed down by a known amount."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    trainer = tmp_path / "src/hrmlm/training/trainer.py"
    text = trainer.read_text()
    begin = "        started = time.perf_counter()\n"
    assert text.count(begin) == 1
    trainer.write_text(text.replace(begin, f"{begin}        time.sleep(0.3)\n"))
    arguments = "--d-model 32 --length 16 --vocab-size 64 --threads 1 --rounds 3 --warmup 1 --steps 2 --models hrm_lm"
    load_benchmark("against").main([str(tmp_path / "src"), *arguments.split()])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]["hrm_lm"]
    seconds = {name: 4 * 16 / rate for name, rate in row["tokens_per_second"].items()}
    assert seconds["older"] - seconds["this"] > 0.2  # a machine that is busy with other work may add to both
    assert row["this_over_older"] > 1
    assert row["last_loss"]["this"] == row["last_loss"]["older"]


def test_what_is_no_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_benchmark("against").main([str(tmp_path)])
    assert "holds no hrmlm" in capsys.readouterr().err
