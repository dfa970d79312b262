"""The precision a training step computes in. Weights, their gradients and the optimizer are float32 in all of them.

float32            everything
bfloat16           matrix products, by autocast; residual stream and norms stay float32
bfloat16_weights   everything between the weights and the loss: the float32 weights are masters, of which each
                   micro-batch uses bfloat16 copies. The cast is part of the graph, so gradients arrive at the masters
                   in float32, and updates far below the resolution of bfloat16 add up there (Micikevicius et al. 2018).
                   FSDP2's MixedPrecisionPolicy(param_dtype=bfloat16) does the same to sharded weights.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hrmlm.shards import local_part


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Around a forward pass."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def computing_copies(precision: str, model: nn.Module) -> AbstractContextManager[object]:
    """Around forward and backward of a micro-batch: backward too, since checkpointed activations are made again there.

    Inside it the parameters of the model are other tensors; whoever updates or saves them does so outside.
    """
    return in_place(model, _bfloat16) if precision == "bfloat16_weights" else nullcontext()


def _bfloat16(tensor: Tensor) -> Tensor | None:
    """A copy of whole float32; None of other tensors: FSDP2 makes the copies of sharded ones when it gathers them."""
    is_copied = tensor.dtype == torch.float32 and local_part(tensor) is tensor
    return tensor.to(torch.bfloat16) if is_copied else None


@contextmanager
def in_place(model: nn.Module, replacement: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """While this lasts, replacements stand in the places of parameters and buffers, where there is one (not None).

    A tensor that several modules share is replaced once.
    """
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    places = [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]
    unique = {id(tensor): tensor for _, _, tensor in places}
    found = {number: new for number, tensor in unique.items() if (new := replacement(tensor)) is not None}
    # The others are left alone: FSDP2 may exchange sharded for gathered weights in the meantime.
    places = [(table, name, tensor) for table, name, tensor in places if id(tensor) in found]
    try:
        for table, name, tensor in places:
            table[name] = found[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for table, name, tensor in places:
            table[name] = tensor  # type: ignore[assignment]
