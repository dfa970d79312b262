"""What a cache policy means, computed without a cache: keys and values are put in place by hand.

`Rewritten` stands where attention hands over new keys and values of all positions (ForwardCall.history).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hrmlm.models import LanguageModel

Pair = tuple[Tensor, Tensor]


class Rewritten:
    """Attention of slot s sees what `rewrite(s, new keys, new values)` gives it."""

    def __init__(self, rewrite: Callable[[int, Tensor, Tensor], Pair]) -> None:
        self._rewrite = rewrite

    def mix(self, slot: int, k_BHLK: Tensor, v_BHLK: Tensor, running_BL: Tensor | None) -> Pair:
        return self._rewrite(slot, k_BHLK, v_BHLK)


def _forward(model: LanguageModel, tokens_BL: Tensor, depth: int | None, history: Rewritten) -> Tensor:
    call = model.prepare(tokens_BL, depth=depth)
    call.history = history
    states = model.begin(tokens_BL, call)
    for index in range(call.cycles * model.n_passes):
        states = model.cycle(index, states, call)
    return model.readout(model.finish(model.read(states), call))


@torch.no_grad()
def reads_of_cycle(model: LanguageModel, tokens_BL: Tensor, depth: int | None, source: Callable[[int], int]) -> Tensor:
    """Logits where cycle i reads keys and values of cycle source(i), its own position's included."""
    first, stride = model.cycle_slots
    seen: dict[int, Pair] = {}

    def rewrite(slot: int, k: Tensor, v: Tensor) -> Pair:
        seen[slot] = (k, v)
        cycle, offset = divmod(slot - first, stride)
        return seen[slot] if slot < first else seen[first + source(cycle) * stride + offset]

    return _forward(model, tokens_BL, depth, Rewritten(rewrite))


@torch.no_grad()
def reads_of_last(model: LanguageModel, tokens_BL: Tensor, depth: int | None) -> Tensor:
    """Logits where earlier positions show the keys and values of the last cycle they ran, position by position."""
    first, stride = model.cycle_slots
    final: dict[int, list[Pair]] = {}  # by place: those of earlier positions
    logits = []
    for t in range(tokens_BL.shape[1]):
        newest: dict[int, Pair] = {}

        def rewrite(slot: int, k: Tensor, v: Tensor, newest: dict[int, Pair] = newest) -> Pair:
            place = slot - 1000 if slot < first else (slot - first) % stride
            newest[place] = (k[:, :, -1:], v[:, :, -1:])  # a later cycle overwrites it
            pairs = [*final.get(place, []), newest[place]]
            return torch.cat([k for k, _ in pairs], dim=2), torch.cat([v for _, v in pairs], dim=2)

        logits.append(_forward(model, tokens_BL[:, : t + 1], depth, Rewritten(rewrite))[:, -1:])
        for place, pair in newest.items():
            final.setdefault(place, []).append(pair)
    return torch.cat(logits, dim=1)


def reference(model: LanguageModel, tokens_BL: Tensor, policy: str, depth: int | None) -> Tensor:
    """Logits (B, L, V) under a policy given by name."""
    if policy == "last":
        return reads_of_last(model, tokens_BL, depth)
    k = {"full": 1, "first": 10**6}.get(policy) or int(policy.removeprefix("every:"))
    return reads_of_cycle(model, tokens_BL, depth, lambda cycle: k * (cycle // k))
