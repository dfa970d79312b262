"""Training the readout of a smaller depth beside the full one: self-distillation from last to earlier.

Early exit and drafting are fast where the readout after r < N cycles says the same as the readout after all N. A step
of full depth computes both states anyway, so the earlier readout costs one more product with the head, at a share of
the positions. (Exits are pulled to the last one as in Phuong & Lampert 2019, "Distillation-Based Training for
Multi-Exit Architectures".)

Shapes: B rows, L positions, D width, V vocabulary, P compared positions.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hrmlm.models.blocks import Application


def divergence(
    readout: Callable[[Tensor], Tensor],
    early_BLD: Tensor,
    last_BLV: Tensor,
    scored_BL: Tensor,
    every: int,
    offset: int,
) -> Tensor:
    """KL(last ‖ early) in nats, as an estimate of its sum over the scored positions; the last readout gets no gradient.

    readout: state → logits. Compared are the scored ones among the positions offset, offset + every, …; their sum times
    `every` is, over all offsets, on average that of all scored positions.
    """
    places_L = torch.arange(scored_BL.shape[1], device=scored_BL.device)
    compared_BL = scored_BL & (places_L % every == offset)
    early_PV = readout(early_BLD[compared_BL]).log_softmax(-1)
    last_PV = last_BLV.detach()[compared_BL].log_softmax(-1)
    return every * F.kl_div(early_PV, last_PV, reduction="sum", log_target=True)


def join_windows(early: list[Application], full: list[Application]) -> tuple[list[Application], bool]:
    """The full schedule, with a gradient window for the readout after `early`, of which it is the continuation.

    An early readout inside the window of the full one shares it: its gradient ends where that of the last readout ends.
    One before the window would teach no block at all. So it gets the window that a training step of its depth has, and
    the states are cut after the early readout.

    Returns: the schedule to run, and whether the states are cut after the early readout.
    """
    if full[len(early) - 1].in_window:
        return full, False
    head, rest = full[: len(early)], full[len(early) :]
    joined = [replace(ours, in_window=theirs.in_window) for ours, theirs in zip(head, early, strict=True)]
    return joined + rest, True
