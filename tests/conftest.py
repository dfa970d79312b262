"""Shared fixtures: real corpora beside the checkout, where there are any."""

import os
from pathlib import Path

# Models in tests are tiny: a second thread only costs, and much where several processes share the cores. Here before
# torch is imported, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def shared() -> Path:
    """The folder of real corpora and reference values; tests that need it skip where it is missing."""
    if not SHARED.is_dir():
        pytest.skip("needs the folder shared/ beside the checkout")
    return SHARED


torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
