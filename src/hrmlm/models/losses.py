"""What a training step minimises, as sums over positions of a loss of their logits; all at once, or in chunks.

The logits are the largest tensor of a training step: V numbers per position, where a block has some tens of D. In
chunks they never exist at once: the forward pass takes a few positions at a time through the head, and computes the
gradients of their states and of the head's weights there and then, so that nothing of size V is kept or computed twice.

Shapes: B rows, L positions, N = B·L positions, C of one chunk, D width, V vocabulary, K sums.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hrmlm.data.batch import IGNORE, Batch

PositionLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(logits of C of the N positions, which ones) → the objective summed over them, and K sums for the record."""


def text_loss(batch: Batch) -> PositionLoss:
    """Cross-entropy and, where a teacher has seen the batch, the distance to it, in nats: K = 1 or 2."""
    targets_N, soft = batch.targets_BL.flatten(), batch.soft
    theirs_NV = None if soft is None else soft.logits_BLV.flatten(0, 1)

    def loss(logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        nats = F.cross_entropy(logits_CV, targets_N[rows], ignore_index=IGNORE, reduction="sum")
        if soft is None or theirs_NV is None:
            return nats, nats.detach()[None]
        distance = distance_to_teacher(logits_CV, theirs_NV[rows], targets_N[rows] != IGNORE, soft.temperature)
        objective = (1 - soft.weight) * nats + soft.weight * soft.temperature**2 * distance
        return objective, torch.stack([nats, distance]).detach()

    return loss


def distance_to_teacher(logits_CV: Tensor, theirs_CV: Tensor, scored_C: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence of the prediction from the teacher's, both at this temperature, in nats, summed over
    the positions with a target (Hinton et al. 2015)."""
    return sum_of_divergences(logits_CV / temperature, theirs_CV.float() / temperature, scored_C)


def sum_of_divergences(ours_CV: Tensor, theirs_CV: Tensor, scored_C: Tensor) -> Tensor:
    """KL(theirs ‖ ours) of two predictions by their logits, in nats, summed over the scored positions."""
    ours_CV, theirs_CV = ours_CV.log_softmax(-1), theirs_CV.log_softmax(-1)
    each_C = F.kl_div(ours_CV, theirs_CV, log_target=True, reduction="none").sum(-1)
    return each_C.where(scored_C, 0.0).sum()


def in_chunks(x_ND: Tensor, weight_VD: Tensor, chunk: int, loss: PositionLoss) -> tuple[Tensor, Tensor]:
    """The loss of the logits x · Wᵀ in float32, summed over all positions, and its K sums for the record.

    Products are computed in autocast's precision where that is on; gradients of the weights add up in float32 at least.
    """
    objective, sums_K = _InChunks.apply(x_ND, weight_VD, chunk, loss)
    return objective, sums_K


class _InChunks(torch.autograd.Function):
    """See `in_chunks`. The gradients are those of the objective alone, and can be asked for once."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, chunk: int, loss: PositionLoss) -> tuple[Tensor, Tensor]:
        """The sums of both; and the gradients, where any is going to be asked for."""
        device = x_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
        inputs_ND, head_VD = x_ND.to(dtype), weight_VD.to(dtype)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_ND = torch.empty_like(x_ND) if wants_x else None
        grad_VD = None
        if wants_weight:
            grad_VD = torch.zeros_like(weight_VD, dtype=torch.promote_types(dtype, torch.float32))
        objectives, sums = [], []
        for start in range(0, max(1, len(x_ND)), chunk):
            rows = slice(start, min(start + chunk, len(x_ND)))
            logits_CV = F.linear(inputs_ND[rows], head_VD).float().requires_grad_(wants_x or wants_weight)
            with torch.enable_grad():
                objective, sums_K = loss(logits_CV, rows)
            objectives.append(objective.detach())
            sums.append(sums_K)
            if not logits_CV.requires_grad:
                continue
            grad_CV = torch.autograd.grad(objective, logits_CV)[0].to(dtype)
            del logits_CV, objective
            if grad_ND is not None:
                grad_ND[rows] = grad_CV @ head_VD
            if grad_VD is not None and grad_VD.dtype == dtype:
                grad_VD.addmm_(grad_CV.T, inputs_ND[rows])
            elif grad_VD is not None:
                grad_VD += grad_CV.T @ inputs_ND[rows]
        ctx.gradients = grad_ND, None if grad_VD is None else grad_VD.to(weight_VD.dtype)
        sums_K = torch.stack(sums).sum(0)
        ctx.mark_non_differentiable(sums_K)
        return torch.stack(objectives).sum(), sums_K

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """What is stored, times the gradient of the objective; in its place, as a copy would be as large again."""
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a loss in chunks can be asked for once")
        grad_ND, grad_VD = ctx.gradients
        ctx.gradients = None
        return (
            None if grad_ND is None else grad_ND.mul_(grad),
            None if grad_VD is None else grad_VD.mul_(grad),
            None,
            None,
        )
