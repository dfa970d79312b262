"""torch.compile in training: of blocks, or of whole applications (a gated cell with its block).

One graph serves every depth and every key/value slot: only the loop around it gets longer, and that stays plain Python.
What would still ask for further graphs is made alike first: the first step's states have no gradient and repeat one
vector, and those before the gradient window come without a graph. Evaluation runs as it does elsewhere, not compiled.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hrmlm.models import LanguageModel
from hrmlm.models.blocks import Block, KeyHistory


def compile_model(model: LanguageModel, what: str, backend: str | Callable[..., Any] = "inductor") -> list[nn.Module]:
    """Compile nothing ("none"), each block ("block"), or each module that the schedule applies ("application").

    In place, so that the names of the weights stay as they are. Returns the modules that are compiled now.
    """
    modules: list[nn.Module] = []
    if what != "none" and not hasattr(KeyHistory.mix, "_torchdynamo_disable"):
        # Which tensors it keeps differs from step to step, and would ask for a graph at each. No decorator there: the
        # compiler takes a second to import, and most processes never compile.
        KeyHistory.mix = torch.compiler.disable(KeyHistory.mix)  # type: ignore[method-assign]
    if what == "block":
        modules = [module for module in model.modules() if isinstance(module, Block)]
    elif what == "application":
        modules = [model.get_submodule(name) for name in dict.fromkeys(item.module for item in model.schedule())]
    for module in modules:
        module.forward = _in_training(module, torch.compile(module.forward, backend=backend))
    return modules


def _in_training(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The module's forward: compiled in training, as it was in evaluation."""
    plain = module.forward

    def forward(*inputs: Any) -> Any:
        return compiled(*_alike(inputs)) if module.training else plain(*inputs)

    return forward


def _alike(inputs: Any) -> Any:
    """The same numbers, contiguous; with gradients all tensors want one, without gradients none does."""
    if isinstance(inputs, list | tuple):
        return type(inputs)(_alike(item) for item in inputs)
    if not isinstance(inputs, Tensor):
        return inputs
    tensor = inputs.contiguous()
    if not torch.is_grad_enabled():
        return tensor.detach()
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
