"""Small models of every family with lively predictions, and a sampler that says what a test wants said."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hrmlm.data.tokenizer import Tokenizer
from hrmlm.inference import GenerationOptions, Sampler
from hrmlm.models import LanguageModel, build_model
from tests.families import FAMILIES

BYTES = Tokenizer.bytes()
END = BYTES.end_of_text
ANY = next(iter(FAMILIES))  # for tests that do not depend on the family
each_family = pytest.mark.parametrize("family", FAMILIES)
limited = pytest.mark.parametrize(
    "family", [name for name in FAMILIES if build_model(FAMILIES[name]).sequence_limit < 1000]
)


def small_model(family: str, **changes: Any) -> LanguageModel:
    """A model over bytes whose greedy text varies: fresh weights alone repeat one token. It never ends by itself."""
    model = build_model({**FAMILIES[family], "vocab_size": BYTES.vocab_size, **changes})
    generator = torch.Generator().manual_seed(7)
    # More, and many post-norm steps, or writes to a memory, enlarge float32 rounding beyond 1e-4.
    spread = 1.0 if model.learns_depth or model.sequence_limit > 1000 else 1.5
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=spread * parameter.shape[-1] ** -0.5, generator=generator)
        model.embedding.weight.normal_(std=0.1, generator=generator)
        model.norm.weight.fill_(4.0)
        model.embedding.weight[END] = 0
    return model.eval()


def greedy(max_new_tokens: int, **options: Any) -> GenerationOptions:
    return GenerationOptions(temperature=0, max_new_tokens=max_new_tokens, **options)


def say(monkeypatch: pytest.MonkeyPatch, *scripts: Sequence[int]) -> None:
    """Make row i of the next batch draw the ids of scripts[i]; model, cache and the rest stay real."""

    class Script(Sampler):
        def __init__(self, options: Sequence[Any], device: Any = "cpu") -> None:
            super().__init__(options, device)
            self._scripts = [list(script) for script in scripts]

        def __call__(self, logits_BLV: Tensor, first: Sequence[int]) -> Tensor:
            assert len(logits_BLV) == len(self._scripts)
            L, rows = logits_BLV.shape[1], zip(self._scripts, first, strict=True)
            return torch.tensor([script[number : number + L] for script, number in rows])

        def select(self, rows_B: Tensor) -> None:
            super().select(rows_B)
            self._scripts = [self._scripts[row] for row in rows_B.tolist()]

    monkeypatch.setattr("hrmlm.inference.generation.Sampler", Script)
