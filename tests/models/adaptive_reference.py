"""Models of learned depth once more in float64: position by position in the text of their description.

A position that stopped keeps its state, and others see it as it was in its last step: here the *inputs* of its layers
are kept, from which the same keys and values follow.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.models.reference import Weights, attention, block, rms_norm

Layer = Callable[[str, Tensor], Tensor]


def post_norm(x_LD: Tensor, w: Weights, at: str, heads: int) -> Tensor:
    """Norms after the sums."""
    x_LD = rms_norm(x_LD + attention(x_LD, w, f"{at}attention.", heads, heads), w[f"{at}norm_attention.weight"])
    gate, up = (x_LD @ w[f"{at}mlp.gate_up.weight"].T).chunk(2, dim=-1)
    inner = (gate / (1 + torch.exp(-gate)) * up) @ w[f"{at}mlp.down.weight"].T
    return rms_norm(x_LD + inner, w[f"{at}norm_mlp.weight"])


def adaptive(
    step: Callable[[int, list[Tensor], Callable[[int, Tensor], Tensor]], list[Tensor]],
    states: list[Tensor],
    w: Weights,
    most: int,
    epsilon: float,
) -> tuple[Tensor, list[int], Tensor]:
    """Output (L, D), steps of every position, and the sum of steps + R."""
    length = len(states[0])
    running = [True] * length
    total, spent = [torch.zeros((), dtype=torch.float64)] * length, torch.zeros((), dtype=torch.float64)
    output = [torch.zeros_like(states[0][0])] * length
    steps, kept = [0] * length, {}
    for number in range(1, most + 1):
        mask = torch.tensor(running)[:, None]

        def hold(place: int, x_LD: Tensor, mask: Tensor = mask) -> Tensor:
            kept[place] = torch.where(mask, x_LD, kept[place]) if place in kept else x_LD
            return kept[place]

        states = [torch.where(mask, new, old) for new, old in zip(step(number, states, hold), states, strict=True)]
        for t in range(length):
            if not running[t]:
                continue
            halt, go_on = w["halting.q.weight"] @ states[0][t] + w["halting.q.bias"]
            p = 1 / (1 + torch.exp(go_on - halt))
            steps[t] += 1
            if total[t] + p >= 1 - epsilon or number == most:
                output[t] = output[t] + (1 - total[t]) * states[0][t]
                spent = spent + steps[t] + 1 - total[t]
                running[t] = False
            else:
                output[t] = output[t] + p * states[0][t]
                total[t] = total[t] + p
    return torch.stack(output), steps, spent


def flat_loop(tokens_L: Tensor, w: Weights, heads: int, most: int, epsilon: float) -> tuple[Tensor, list[int], Tensor]:
    """One block, with the embedding and a step's vector added before each application: logits, steps, steps + R."""
    embedded = w["embedding.weight"][tokens_L]

    def step(number: int, states: list[Tensor], hold: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        x = hold(0, states[0] + embedded + w["steps.weight"][number - 1])
        return [block(x, w, "block.", heads, heads)]

    output, steps, spent = adaptive(step, [embedded], w, most, epsilon)
    return rms_norm(output, w["norm.weight"]) @ w["embedding.weight"].T, steps, spent


def two_levels(tokens_L: Tensor, w: Weights, heads: int, most: int, epsilon: float) -> tuple[Tensor, list[int], Tensor]:
    """Two levels of one layer, 2 × 2 cycles, between two pre-norm blocks: logits, steps, steps + R."""
    x = block(w["embedding.weight"][tokens_L], w, "input_blocks.0.", heads, heads)

    def step(number: int, states: list[Tensor], hold: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        high, low = states
        for cycle in range(2):
            for inner in range(2):
                low = post_norm(hold(3 * cycle + inner, low + high + x), w, "L_level.0.", heads)
            high = post_norm(hold(3 * cycle + 2, high + low), w, "H_level.0.", heads)
        return [high, low]

    start = [w["H_init"].expand_as(x), w["L_init"].expand_as(x)]
    output, steps, spent = adaptive(step, start, w, most, epsilon)
    output = block(output, w, "output_blocks.0.", heads, heads)
    return rms_norm(output, w["norm.weight"]) @ w["embedding.weight"].T, steps, spent
