"""MFU: FLOPs of the depth that ran times speed over the peak; and batches that are fetched ahead."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hrmlm.console import TrainingBar
from hrmlm.data.batch import Batch
from hrmlm.evaluation.cost import cost
from hrmlm.models import build_model
from hrmlm.training.metrics import read_metrics
from hrmlm.training.prefetch import ahead, prefetched
from hrmlm.training.train import train
from hrmlm.training.trainer import StepResult
from hrmlm.training.utilisation import PEAKS, Utilisation, named_peak, peak_flops
from tests.families import FAMILIES
from tests.training.helpers import record, tiny
from tests.training.test_accumulation import batch


@pytest.mark.parametrize("family", ["transformer", "hrm_lm-window", "universal-halting", "memory_hrm"])
def test_flops_of_the_depth_that_ran(family: str) -> None:
    model = build_model(FAMILIES[family])
    utilisation = Utilisation(model, 20, peak=1e9, processes=2)
    for depth in range(1, model.trained_depth + 1):
        flops = cost(model, 20, depth).training_flops_per_token
        assert utilisation.flops_per_token(depth) == flops
        assert utilisation.of(depth, 500.0) == pytest.approx(flops * 500 / 2e9)
    low, high = (utilisation.flops_per_token(depth) for depth in (1, 2))
    assert utilisation.flops_per_token(1.25) == pytest.approx(0.75 * low + 0.25 * high)
    assert Utilisation(model, 20, peak=None).of(1, 500.0) is None


@pytest.mark.parametrize(
    ("name", "bfloat16"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 836e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40", None),
        ("Some Other GPU", None),
    ],
)
def test_peaks_by_name(name: str, bfloat16: float | None) -> None:
    assert named_peak(name, "bfloat16") == named_peak(name, "bfloat16_weights") == bfloat16
    if bfloat16 is not None:
        float32 = named_peak(name, "float32")
        assert float32 is not None
        assert float32 < bfloat16


def test_a_cpu_has_no_peak_unless_it_is_given(data: Path, tmp_path: Path) -> None:
    assert peak_flops(torch.device("cpu"), "float32") is None
    assert all(bfloat16 > float32 for bfloat16, float32 in PEAKS.values())
    changes = {"model.exit_probability": 0.5, "training.steps": 8}
    train(tiny(data, **changes), tmp_path / "without")
    assert not any("mfu" in line for line in record(tmp_path / "without"))
    train(tiny(data, **changes, **{"training.peak_flops": 1e10}), tmp_path / "with")
    lines = [line for line in read_metrics(tmp_path / "with" / "metrics.jsonl") if line["event"] == "step"]
    model = build_model({**FAMILIES["hrm_lm-window"], "vocab_size": 257})
    assert len({line["depth"] for line in lines}) > 1
    for line in lines:
        flops = cost(model, 16, line["depth"]).training_flops_per_token
        assert line["mfu"] == pytest.approx(flops * line["tokens_per_second"] / 1e10, rel=1e-2, abs=1e-4)


def test_the_bar_shows_it_where_it_is_known() -> None:
    bar = TrainingBar("run")
    bar.start(tiny(None), 0, [])
    shown = []
    for mfu in (None, 0.5, 0.3):
        bar.step(StepResult(1, 1.0, 1, 1, 0.0, 0.0, 1, 1.0, mfu=mfu), 1234.0)
        shown.append(bar._progress.tasks[0].fields["rate"])
    bar.stop()
    assert shown == ["1,234 tokens/s", "1,234 tokens/s  MFU 50%", "1,234 tokens/s  MFU 48%"]


def test_batches_are_fetched_ahead_in_order() -> None:
    events: list[str] = []

    def numbers() -> Iterator[int]:
        for number in range(4):
            events.append(f"read {number}")
            yield number

    def start(number: int) -> int:
        events.append(f"start {number}")
        return 10 * number

    for number in ahead(numbers(), start, lambda number: number + 1):
        events.append(f"use {number}")
    assert [event for event in events if "use" in event] == ["use 1", "use 11", "use 21", "use 31"]
    for number in range(3):
        assert events.index(f"start {number + 1}") < events.index(f"use {10 * number + 1}")
        assert events.index(f"start {number + 1}") > events.index(f"use {10 * number - 9}") if number else True
    assert list(ahead([], start, start)) == []


def test_on_the_cpu_batches_stay_as_they_are() -> None:
    batches = [batch(5), batch(6), batch(7)]
    fetched = list(prefetched(batches, torch.device("cpu")))
    assert all(ours is theirs for ours, theirs in zip(fetched, batches, strict=True))


def test_targets_are_counted_before_a_batch_moves() -> None:
    """On a GPU counting would wait for the device. Here a device that holds no numbers stands in for it."""
    moved = batch(7).to("meta")
    assert moved.n_targets == 7
    with pytest.raises((RuntimeError, NotImplementedError)):
        _ = Batch(moved.inputs_BL, moved.targets_BL).n_targets


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_prefetched_batches_are_on_the_device() -> None:
    batches = [batch(5, seed=seed).pin_memory() for seed in range(5)]
    fetched = list(prefetched(batches, torch.device("cuda")))
    for ours, theirs in zip(fetched, batches, strict=True):
        assert ours.inputs_BL.is_cuda
        assert torch.equal(ours.inputs_BL.cpu(), theirs.inputs_BL)
        assert torch.equal(ours.targets_BL.cpu(), theirs.targets_BL)
