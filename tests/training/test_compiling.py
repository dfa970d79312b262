"""Compiled training: one graph serves every depth and every slot, the numbers and the names stay."""

from typing import Any

import pytest
import torch

from hrmlm.data.batch import Batch
from hrmlm.models import LanguageModel, build_model
from hrmlm.training.compiling import compile_model
from tests.families import FAMILIES
from tests.training.helpers import tiny, tiny_trainer
from tests.training.test_accumulation import batch

DEPTH = {
    "transformer": "n_layers",
    "universal": "n_steps",
    "hrm_lm": "n_cycles",
    "cosmicfish": "max_steps",
    "memory_hrm": "iterations",
}
"""The setting that is the depth of a family."""
GRAPHS = {
    "transformer": 1,
    "universal-options": 2,  # before the gradient window, and in it
    "universal-halting": 8,  # keys of stopped positions are kept outside: a block is cut in parts
    "hrm_lm-passes": 3,  # input block, fast and slow cell
    "hrm_lm-window": 5,  # both cells also before the window
    "cosmicfish": 8,
    "memory_hrm": 1,
    "memory_hrm-options": 2,  # the first iteration, and every other one
    "memory_hrm-halting": 8,
}
"""The most graphs of a family whose depth is 6."""
IDS_BL = torch.randint(0, 64, (2, 21), generator=torch.Generator().manual_seed(1))


class Counting:
    """A backend that makes no code and counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _forget() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(model: LanguageModel, depth: int) -> None:
    """A training pass of this depth, on windows of whole segments."""
    model(IDS_BL[:, :-1], depth=depth).logits.square().mean().backward()


@pytest.mark.parametrize("family", GRAPHS)
def test_no_graph_is_added_by_depth_or_slot(family: str) -> None:
    settings = FAMILIES[family]
    model = build_model({**settings, DEPTH[settings["family"]]: 6}).train()
    counting = Counting()
    assert compile_model(model, "application", counting)
    for part in model.losses(Batch(IDS_BL[:, :-1], IDS_BL[:, 1:])):
        part.objective.backward()
    run(model, 6)
    before = counting.graphs
    assert 0 < before <= GRAPHS[family]
    for depth in range(1, 7):
        run(model, depth)
        assert counting.graphs == before, depth


@pytest.mark.parametrize(
    ("what", "family", "precision"),
    [
        ("block", "hrm_lm-window", "float32"),
        ("application", "hrm_lm-exits", "float32"),
        ("application", "hrm_lm-exits", "bfloat16"),
        ("application", "hrm_lm-exits", "bfloat16_weights"),
    ],
)
def test_compiled_steps_are_the_same_steps(
    what: str, family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting, real = Counting(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: real(function, backend=counting))
    changes = {"training.precision": precision, "model.exit_probability": 0.5}
    trainers = [tiny_trainer(lambda a, b: [], family, **changes, **{"training.compile": c}) for c in ("none", what)]
    losses = [[trainer.step(step, [batch(16, length=16)]).loss for step in range(1, 5)] for trainer in trainers]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6 if precision == "float32" else 1e-2)
    assert counting.graphs > 0
    assert list(trainers[0].model.state_dict()) == list(trainers[1].model.state_dict())
    done = counting.graphs
    with torch.no_grad():
        trainers[1].model.eval()(batch(9, length=9).inputs_BL)
    assert counting.graphs == done, "evaluation is not compiled"


@pytest.mark.parametrize(("given", "meant"), [(True, "block"), (False, "none"), ("application", "application")])
def test_true_and_false_of_older_recipes(given: Any, meant: str) -> None:
    assert tiny(None, **{"training.compile": given}).training.compile == meant
