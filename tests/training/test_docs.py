"""docs/train.md names every key of a recipe with its default."""

import re
from pathlib import Path

import pytest
import yaml

from hrmlm.training.recipe import DataConfig, OptimizerConfig, ParallelConfig, ScheduleConfig, TrainingConfig
from hrmlm.training.run import difference
from hrmlm.training.train import FIXED_ON_RESUME

PAGE = (Path(__file__).parents[2] / "docs" / "train.md").read_text("utf-8")
SECTIONS = {
    "data": DataConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "parallel": ParallelConfig,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_documented_with_its_default(section: str) -> None:
    text = PAGE.split(f"### `{section}`")[1].split("\n#")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.MULTILINE))
    defaults = SECTIONS[section]().model_dump(mode="json")
    documented = {key: float(value) if "e-" in value else yaml.safe_load(value) for key, value in rows.items()}
    for key, value in defaults.items():
        if value is None and documented.get(key) == "none":
            documented[key] = None
    assert difference(documented, defaults) == {}


def test_what_cannot_change_is_documented() -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| cannot change")]
    assert all(f"`{key}*`" in row or f"`{key}`" in row for key in FIXED_ON_RESUME)
