"""Prepared data, and a study that was run once."""

from pathlib import Path

import pytest

from hrmlm.studies import worker
from tests.studies.helpers import run_here, study
from tests.training.conftest import prepared


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 25,000 bytes, tokenizer `bytes` (257 ids)."""
    return prepared(tmp_path_factory.mktemp("study-data"), 300)


@pytest.fixture(scope="session")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study directory of two arms and three seeds, finished, with all measurements."""
    out = tmp_path_factory.mktemp("study") / "out"
    published = [
        {"condition": "plain", "value": 4.5, "what": "a figure", "setting": "somewhere else", "source": "a paper"}
    ]
    worker.LOOK_SECONDS = 0.01
    run_here(study(data, measure=["roles", "latency"], baseline="plain", published=published), out)
    return out
