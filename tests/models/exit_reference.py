"""Early exit position by position, as slowly as possible: each token alone runs until its own number says stop."""

import torch
from torch import Tensor

from hrmlm.models import LanguageModel


def change(model: LanguageModel, before_D: Tensor, after_D: Tensor) -> float:
    return float(torch.linalg.vector_norm(after_D - before_D) / torch.linalg.vector_norm(after_D))


def kl(model: LanguageModel, before_D: Tensor, after_D: Tensor) -> float:
    before, after = (torch.distributions.Categorical(logits=model.readout(x).double()) for x in (before_D, after_D))
    return float(torch.distributions.kl_divergence(after, before))


MEASURES = {"change": change, "kl": kl}


@torch.no_grad()
def numbers_of_first_cycle(model: LanguageModel, tokens_L: Tensor, name: str) -> list[float]:
    """What each position would compare after its first cycle."""
    call = model.prepare(tokens_L[None])
    states = model.begin(tokens_L[None], call)
    before_LD, after_LD = model.read(states)[0], model.read(model.cycle(0, states, call))[0]
    return [MEASURES[name](model, *pair) for pair in zip(before_LD, after_LD, strict=True)]


@torch.no_grad()
def run(model: LanguageModel, tokens_L: Tensor, name: str, limit: float) -> tuple[Tensor, list[int]]:
    """Logits (L, V) and cycles of every position."""
    cache = model.new_cache(1, len(tokens_L))
    first, stride = model.cycle_slots
    most = model.trained_depth * model.n_passes
    logits, cycles = [], []
    for position, token in enumerate(tokens_L):
        call = model.prepare(token.view(1, 1), cache=cache)
        states = model.begin(token.view(1, 1), call)
        for index in range(most):
            before_D = model.read(states)[0, 0]
            states = model.cycle(index, states, call)
            if MEASURES[name](model, before_D, model.read(states)[0, 0]) < limit:
                break
        for slot in range(first + (index + 1) * stride, cache.n_slots):  # later tokens see the last cycle it ran
            kept = first + index * stride + (slot - first) % stride
            for tensors in (cache.keys, cache.values):
                tensors[slot][:, :, position] = tensors[kept][:, :, position]
        logits.append(model.readout(model.finish(model.read(states), call))[0, 0])
        cycles.append(index + 1)
        cache.lengths_B = cache.lengths_B + 1
    return torch.stack(logits), cycles
