"""Model FLOPs utilisation (Chowdhery et al. 2022): useful training FLOPs per second as a share of the peak."""

import math

import torch

from hrmlm.evaluation.cost import cost
from hrmlm.models import LanguageModel

PEAKS: dict[str, tuple[float, float]] = {
    "GB200": (2500e12, 80e12),
    "B200": (2250e12, 75e12),
    "H200 NVL": (836e12, 60e12),
    "H200": (989e12, 67e12),
    "H100 NVL": (835e12, 60e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
    "MI300X": (1307e12, 163.4e12),
}
"""FLOP/s of matrix products by a part of the device's name: bfloat16 and float32, dense, from the makers' data sheets.

The first part that fits counts, so special kinds stand before the general one."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of a device for a `training.precision`; None where it is not known, as of CPUs and parts of GPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if precision == "float32" and torch.get_float32_matmul_precision() != "highest":
        return None  # TensorFloat-32 has a peak of its own
    return named_peak(name, precision)


def named_peak(name: str, precision: str) -> float | None:
    """Peak FLOP/s of the device of this name."""
    words = f" {name.replace('-', ' ')} "  # whole words, or an L4 would be found in an L40
    if " MIG " in words:
        return None
    peaks = next((peaks for part, peaks in PEAKS.items() if f" {part} " in words), None)
    return None if peaks is None else peaks[1 if precision == "float32" else 0]


class Utilisation:
    """Of one run. length: tokens per window; peak: FLOP/s of one process's device (None: not known)."""

    def __init__(self, model: LanguageModel, length: int, peak: float | None, processes: int = 1) -> None:
        self.model, self.length = model, length
        self.peak = None if peak is None else peak * processes
        self._flops: dict[int, float] = {}

    def flops_per_token(self, depth: float) -> float:
        """Training FLOPs per token at a depth, by the rule of `hrmlm.evaluation.cost`; a mean depth lies between."""
        low, share = math.floor(depth), depth % 1
        if share == 0:
            return self._at(low)
        return (1 - share) * self._at(low) + share * self._at(low + 1)

    def _at(self, depth: int) -> float:
        if depth not in self._flops:
            self._flops[depth] = cost(self.model, self.length, depth).training_flops_per_token
        return self._flops[depth]

    def of(self, depth: float, tokens_per_second: float) -> float | None:
        """Share of the peak, 0 to 1; None where the peak is not known or nothing was trained.

        depth: cycles or steps that ran, the mean over positions where they differ; tokens_per_second: of all processes.
        """
        if self.peak is None or depth < 1:
            return None
        return self.flops_per_token(depth) * tokens_per_second / self.peak
