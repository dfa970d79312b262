"""The gradients of one model over several processes: torch's DDP or FSDP2, several backward passes per step.

Why FSDP2 has one group, at the root: the weights of a looped model are needed again and again in every step, and the
embedding at its beginning and its end. Groups per block would gather the same block once per application, and the
tied embedding would belong to two. So all weights are gathered once at the start of a step and dropped at its end;
what stays sharded is the rest: between steps the weights, and always the optimizer's state and the reduced gradients.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hrmlm.models.base import LanguageModel, PartialLoss
from hrmlm.parallel import Parallel
from hrmlm.training.precision import in_place


class _NextPart(nn.Module):
    """The next part of a step's loss as the forward call of a module: there the engines hook in."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.part: PartialLoss | None = None

    def forward(self, losses: Iterator[PartialLoss]) -> Tensor:
        """The objective (a scalar) of the next part, which stays in `part`."""
        self.part = next(losses)
        return self.part.objective


class Engine:
    """Runs the parts of a step's loss forward and backward; gradients are averaged over processes at the last one.

    strategy: "ddp" (each process holds everything) or "fsdp" (each holds its share). With "fsdp" the parameters of
    `model` are DTensors from here on. The model must be the same in all processes. precision: `training.precision`.
    """

    def __init__(self, model: LanguageModel, parallel: Parallel, strategy: str, precision: str = "float32") -> None:
        self.parallel = parallel
        self.next_part = _NextPart(model)
        self.ddp: DistributedDataParallel | None = None
        self.fsdp: Any = None
        if parallel.size > 1 and strategy == "ddp":
            # Exit sampling, truncated windows and single segments leave parameters without a gradient.
            self.ddp = DistributedDataParallel(
                self.next_part,
                process_group=parallel.group,
                find_unused_parameters=True,
                gradient_as_bucket_view=True,
            )
        elif parallel.size > 1:
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            kind = next(model.parameters()).device.type
            mesh = DeviceMesh.from_group(parallel.group, kind)
            policy = MixedPrecisionPolicy()
            if precision == "bfloat16_weights":  # what precision.computing_copies does where weights are whole
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            self.fsdp = fully_shard(self.next_part, mesh=mesh, reshard_after_forward=False, mp_policy=policy)

    def backward(
        self, losses: Iterator[PartialLoss], divisor: float, is_last: bool, autocast: AbstractContextManager
    ) -> PartialLoss:
        """Run the next part of `losses` forward and backward: the objective over `divisor`, the sum over processes.

        is_last: no further part comes in this step.
        """
        with self._accumulating(is_last):
            with autocast:
                objective = (self.ddp or self.next_part)(losses)
            (objective / (divisor / self.parallel.size)).backward()  # the engines divide by the size
        part, self.next_part.part = self.next_part.part, None
        assert part is not None
        return part

    def _accumulating(self, is_last: bool) -> AbstractContextManager:
        if self.ddp is not None and not is_last:
            return self.ddp.no_sync()
        if self.fsdp is not None:
            self.fsdp.set_requires_gradient_sync(is_last)
            self.fsdp.set_reshard_after_backward(is_last)
            self.fsdp.set_is_last_backward(is_last)
        return nullcontext()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While this lasts, the model can be run without gradients as it is: all weights are here, in float32.

        FSDP2's own `unshard` would give them in the precision of training steps.
        """
        with torch.no_grad(), nullcontext() if self.fsdp is None else in_place(self.next_part, _gathered):
            yield


def _gathered(tensor: Tensor) -> Tensor | None:
    full_tensor: Any = getattr(tensor, "full_tensor", None)
    return None if full_tensor is None else full_tensor()


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor laid out as a parameter of the same shape: on its device, sharded as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return tensor.to(parameter.device)
    placed = tensor.to(parameter.to_local().device)
    return distribute_tensor(placed, parameter.device_mesh, parameter.placements, src_data_rank=None)


def total_norm(parameters: list[nn.Parameter], max_norm: float) -> float:
    """Clip the gradients of all processes together to `max_norm`; the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    return float(getattr(norm, "full_tensor", lambda: norm)())
