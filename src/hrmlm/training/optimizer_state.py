"""The state of an optimizer as named tensors, for checkpoints: "<parameter>::<quantity>"."""

import torch
from torch import Tensor, nn

from hrmlm.errors import UserError
from hrmlm.training.engine import like

QUANTITIES = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
"""What the optimizer of a group keeps of each parameter, by the group's kind. All but `step` has its shape."""


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by name, those themselves and no copies."""
    return {
        f"{name}::{key}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_named_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], where: str
) -> None:
    """Restore what `named_state` returned. Raises: UserError, beginning with `where`, if it does not fit."""
    parameters = dict(model.named_parameters())
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    _check(parameters, {name: groups[p]["kind"] for name, p in parameters.items() if p in groups}, tensors, where)
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("::")
        parameter = parameters[name]
        if key != "step":
            optimizer.state[parameter][key] = like(tensor, parameter)
        else:  # it lives beside the parameter if the optimizer is fused, else on the CPU
            fused = groups[parameter].get("fused")
            optimizer.state[parameter][key] = tensor.to(parameter.device) if fused else tensor.clone()


def _check(parameters: dict[str, nn.Parameter], kinds: dict[str, str], tensors: dict[str, Tensor], where: str) -> None:
    """Raise UserError unless each parameter has all quantities of its kind in its shape, or none (it had no gradient).

    kinds: of the parameters' groups, by name; the parameters that are not trained are missing in it.
    """
    names = {name.rpartition("::")[0] for name in tensors}
    problems = [f"unknown {name}" for name in sorted(names - kinds.keys())]
    expected = {
        f"{name}::{key}": () if key == "step" else tuple(parameters[name].shape)
        for name in sorted(names & kinds.keys())
        for key in QUANTITIES[kinds[name]]
    }
    problems += [f"missing {name}" for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        if name.rpartition("::")[0] in kinds and name not in expected:
            problems.append(f"unknown {name}")
        elif name in expected and tensor.shape != expected[name]:
            problems.append(f"{name} has shape {tuple(tensor.shape)} where {expected[name]} is needed")
    if problems:
        raise UserError(f"{where} does not fit the model: {'; '.join(problems)}")
