"""Cached decoding equals the full forward, however the text is fed (R33)."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import hrmlm
from hrmlm.checkpoint import save_checkpoint
from hrmlm.inference import generate
from hrmlm.models import LanguageModel
from hrmlm.models.cache import KVCache
from tests.inference.helpers import BYTES, each_family, greedy, small_model

TOKENS_L = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(3))


def _feed(model: LanguageModel, cache: KVCache, tokens_L: Tensor, chunk: int) -> Tensor:
    """Logits (L, V) of tokens fed in chunks."""
    with torch.no_grad():
        parts = [model(part_L[None], cache=cache).logits[0] for part_L in tokens_L.split(chunk)]
    return torch.cat(parts)


@each_family
def test_chunks_of_any_size_give_the_same_logits(family: str) -> None:
    model = small_model(family)
    with torch.no_grad():
        whole_LV = model(TOKENS_L[None]).logits[0]
    for chunk in (len(TOKENS_L), 1, 3):
        cache = model.new_cache(1, len(TOKENS_L))
        torch.testing.assert_close(_feed(model, cache, TOKENS_L, chunk), whole_LV, atol=1e-4, rtol=0)
        assert cache.lengths_B.tolist() == [len(TOKENS_L)]
        assert cache.n_slots == len(model.schedule())


@each_family
def test_crop_and_continue_equals_a_fresh_run(family: str) -> None:
    model = small_model(family)
    other_L = TOKENS_L.flip(0)
    cache = model.new_cache(1, 20)
    _feed(model, cache, TOKENS_L, 20)
    cache.crop(16)
    continued_LV = _feed(model, cache, other_L[:4], 2)
    with torch.no_grad():
        fresh_LV = model(torch.cat([TOKENS_L[:16], other_L[:4]])[None]).logits[0, 16:]
    torch.testing.assert_close(continued_LV, fresh_LV, atol=1e-4, rtol=0)


@each_family
def test_64_greedy_tokens_with_and_without_cache(family: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    save_checkpoint(path, small_model(family), tokenizer=BYTES)
    options = {"temperature": 0, "max_new_tokens": 64}
    cached, full = (hrmlm.generate(path, "T", cache=cache, **options)[0] for cache in (True, False))
    assert len(cached.ids) == 64
    assert cached.ids == full.ids
    assert len(set(cached.ids)) > 3, "a model that repeats one token would prove little"
    torch.testing.assert_close(torch.tensor(cached.logprobs), torch.tensor(full.logprobs), atol=1e-4, rtol=0)


@each_family
@pytest.mark.parametrize("cache", [True, False])
def test_logprobs_are_those_of_the_model(family: str, cache: bool) -> None:
    model = small_model(family)
    result = generate(model, BYTES, "Once upon", greedy(8, cache=cache))[0]
    with torch.no_grad():
        logprobs_LV = model(torch.tensor([result.prompt_ids + result.ids])).logits[0].log_softmax(-1)
    start = len(result.prompt_ids) - 1
    expected = [float(logprobs_LV[start + i, token]) for i, token in enumerate(result.ids)]
    assert result.logprobs == pytest.approx(expected, abs=1e-4)
