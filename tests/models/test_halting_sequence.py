"""Halting by sequence, for released checkpoints: what it does, and that it says what it is not."""

import pytest
import torch

from hrmlm.errors import UserError
from hrmlm.models import LanguageModel
from tests.models.helpers import lively_model, random_batch, random_tokens


def sequence_model(**changes: object) -> LanguageModel:
    model = lively_model("cosmicfish", halting="sequence", max_steps=6, **changes)
    with torch.no_grad():
        model.halting.q.weight.mul_(3.0)
        model.halting.q.bias.copy_(torch.tensor([-0.5, 0.0]))
    return model.double()


@torch.no_grad()
def test_rows_are_frozen_where_they_stop() -> None:
    """O2: a row alone, in a batch and in any order; and steps differ."""
    model = sequence_model()
    tokens_BL = random_tokens(model, 12, 4)
    together = model(tokens_BL)
    assert len(together.steps_BL.unique()) > 2
    backwards = model(tokens_BL.flip(0))
    for row in range(12):
        alone = model(tokens_BL[row : row + 1])
        for out, place in ((together, row), (backwards, 11 - row)):
            torch.testing.assert_close(out.logits[place], alone.logits[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(out.halting_logits_B2[place], alone.halting_logits_B2[0], atol=1e-9, rtol=0)
            assert torch.equal(out.steps_BL[place], alone.steps_BL[0])


@torch.no_grad()
def test_padding_takes_no_part_in_the_mean() -> None:
    model = sequence_model()
    tokens_BL, lengths_B = random_tokens(model, 12, 9), torch.arange(12) % 9 + 1
    padded = model(tokens_BL, lengths_B=lengths_B)
    for row, length in enumerate(lengths_B.tolist()):
        alone = model(tokens_BL[row : row + 1, :length])
        torch.testing.assert_close(padded.logits[row, :length], alone.logits[0], atol=1e-5, rtol=0)
        assert int(padded.steps_BL[row, 0]) == int(alone.steps_BL[0, 0])


@torch.no_grad()
def test_it_is_not_causal() -> None:
    """O3: later tokens decide how deep earlier ones are processed. With a fixed depth they do not."""
    model = sequence_model()
    tokens_BL = random_tokens(model, 60, 4)
    changed_BL = tokens_BL.clone()
    changed_BL[:, -1] = (changed_BL[:, -1] + 7) % 64
    before, after = model(tokens_BL), model(changed_BL)
    moved = (before.steps_BL != after.steps_BL)[:, 0]
    assert bool(moved.any())
    assert float((before.logits - after.logits)[moved, 0].abs().max()) > 1e-3
    before, after = model(tokens_BL, depth=3), model(changed_BL, depth=3)
    torch.testing.assert_close(before.logits[:, :-1], after.logits[:, :-1], atol=1e-6, rtol=0)


@torch.no_grad()
def test_counting_and_the_bias() -> None:
    """Steps before the one that stopped; 0.35 in favour of halting outside training, a recorded setting (O4)."""
    for bias, expected in ((0.35, 0), (0.0, 6)):
        model = sequence_model(sequence_bias=bias)
        model.halting.q.weight.zero_()
        model.halting.q.bias.copy_(torch.tensor([-0.1, 0.0]))
        tokens_BL = random_tokens(model, 2, 3)
        assert model(tokens_BL).steps_BL.unique().tolist() == [expected]
        assert model.train()(tokens_BL).steps_BL.unique().tolist() == [6]
        assert model.eval()(tokens_BL, depth=2).steps_BL.unique().tolist() == [2]
    assert model.config.model_dump()["sequence_bias"] == 0.0


def test_it_is_neither_trained_nor_cached() -> None:
    model = sequence_model()
    with pytest.raises(UserError, match="halting: token"):
        model.losses(random_batch(model))
    with pytest.raises(UserError, match="--no-cache"):
        model.new_cache(1, 5)
    other = lively_model("cosmicfish", max_steps=6).double()
    with pytest.raises(UserError, match="--no-cache"):
        model(random_tokens(model, 1, 3), cache=other.new_cache(1, 5))
    with pytest.raises(UserError, match="does not learn when to stop"):
        model(random_tokens(model, 1, 3), halt_threshold=0.5)


@torch.no_grad()
def test_statistics() -> None:
    model = sequence_model()
    out = model(random_tokens(model, 12, 4), stats=True)
    assert [record.name for record in out.stats] == [application.name for application in model.schedule()]
    for record in out.stats:
        if record.name.startswith("step "):
            ran = torch.clamp(out.steps_BL + 1, max=6) >= int(record.name.split()[1])
            assert torch.equal(record.rms_BL > 0, ran)
