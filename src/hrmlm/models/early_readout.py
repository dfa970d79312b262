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
from torch import Tensor

from hrmlm.models.blocks import Application
from hrmlm.models.losses import PositionLoss, sum_of_divergences


def exit_loss(readout: Callable[[Tensor], Tensor], last_BLD: Tensor, scored_BL: Tensor, every: int) -> PositionLoss:
    """KL(last ‖ early) in nats of the logits of an early readout, times `every`; the last readout gets no gradient.

    readout: state → logits; last_BLD, scored_BL: of the compared positions, which are offset, offset + every, …: over
    all offsets, `every` times their sum is on average that of all scored positions. The last logits are computed again
    for these positions alone, so that it does not matter whether all of them ever existed.
    """
    last_ND, scored_N = last_BLD.detach().flatten(0, 1), scored_BL.flatten()

    def loss(early_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            last_CV = readout(last_ND[rows])
        apart = every * sum_of_divergences(early_CV, last_CV, scored_N[rows])
        return apart, apart.detach()[None]

    return loss


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
