"""The page of every family names every option with its default, and its examples run."""

import re
from pathlib import Path

import pytest
import yaml

from hrmlm.models import families, model_config

PAGES = Path(__file__).parents[2] / "docs" / "families"
UNSET = {"all", "from the data", "n_heads", "one per 64 channels", "4·D", "unset"}  # what stands for None


def _page(family: str) -> str:
    return (PAGES / f"{family}.md").read_text("utf-8")


@pytest.mark.parametrize("family", families())
def test_every_option_is_documented_with_its_default(family: str) -> None:
    fields = {name: f.default for name, f in families()[family][0].model_fields.items() if name != "family"}
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", _page(family), re.MULTILINE))
    assert documented.keys() == fields.keys()
    for name, text in documented.items():
        default = text.strip(" `")
        if fields[name] is None:
            assert default in UNSET, name
        elif isinstance(fields[name], float):  # YAML reads 1e-5 as a text
            assert float(default) == fields[name], name
        elif isinstance(fields[name], tuple):
            assert tuple(yaml.safe_load(default)) == fields[name], name
        else:
            assert yaml.safe_load(default) == fields[name], name


@pytest.mark.parametrize("family", families())
def test_examples_run(family: str) -> None:
    examples = _page(family).split("## Examples")[1]
    snippets = [
        re.sub(r"^ {4}", "", s, flags=re.MULTILINE) for s in re.findall(r"(?:^    .*\n|^\n)+", examples, re.MULTILINE)
    ]
    (program,) = [snippet for snippet in snippets if "import hrmlm" in snippet]
    exec(program, {})
    (recipe,) = [snippet for snippet in snippets if "model:" in snippet]
    assert model_config(yaml.safe_load(recipe)["model"]).family == family
