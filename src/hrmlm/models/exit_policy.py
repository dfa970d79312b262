"""How deep a model runs: early exit as small named policies, read from texts such as "change:0.1".

- `cycles:N`: every position the same number of cycles; the same as a depth.
- `change:X`: a position stops after the first cycle that changes the state which is read out by less than the share X.
- `kl:X`: it stops after the first cycle that changes the prediction which is read out by less than X nats.
- `halt:X`: the model's own halting head decides, at this sum of halting probabilities; the same as a halting threshold.

`change` and `kl` need no training and look at one position alone, so they are causal and hold with a cache and in any
batch. Both compare the first cycle with the state before it. Their cycles count over all supervision passes.

Shapes: … any, D width, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hrmlm.config import nearest
from hrmlm.errors import UserError

if TYPE_CHECKING:
    from hrmlm.models.base import LanguageModel

LOGITS_AT_ONCE = 1 << 24
"""`kl` reads out this many numbers at a time, so that a long prompt needs no table of all its predictions."""


@dataclass(frozen=True)
class BelowLimit(ABC):
    """An exit rule (see halting.ExitRule) that stops a position as soon as a number of its own is below a limit."""

    limit: float
    name: ClassVar[str]
    threshold: ClassVar[float] = 1.0  # its probabilities are 0 or 1

    def __call__(self, before: Tensor, after: Tensor) -> Tensor:
        """1 where a position stops, 0 elsewhere (…), for states (…, D) before and after a cycle."""
        return (self.measure(before, after) < self.limit).float()

    @abstractmethod
    def measure(self, before: Tensor, after: Tensor) -> Tensor:
        """The number (…) that is compared; not a number: the position goes on."""


@dataclass(frozen=True)
class StateChange(BelowLimit):
    """‖after − before‖ / ‖after‖. Divided by the new state, since the norm of a start vector says nothing."""

    name = "change"

    def measure(self, before: Tensor, after: Tensor) -> Tensor:
        """See BelowLimit."""
        dtype = torch.promote_types(after.dtype, torch.float32)
        before, after = before.to(dtype), after.to(dtype)
        return (after - before).norm(dim=-1) / after.norm(dim=-1)


@dataclass(frozen=True)
class ReadoutDivergence(BelowLimit):
    """KL(p_after ‖ p_before) in nats, of the predictions read out of both states."""

    readout: Callable[[Tensor], Tensor]
    n_predicted: int
    name = "kl"

    def measure(self, before: Tensor, after: Tensor) -> Tensor:
        """See BelowLimit."""
        states = torch.stack([before, after]).flatten(1, -2)  # (2, N, D): the head is read once for both
        parts = states.split(max(1, LOGITS_AT_ONCE // (2 * self.n_predicted)), dim=1)
        return torch.cat([self._divergence(part) for part in parts]).view(after.shape[:-1])

    def _divergence(self, states_2ND: Tensor) -> Tensor:
        before_NV, after_NV = self.readout(states_2ND).log_softmax(-1)
        return (after_NV.exp() * (after_NV - before_NV)).sum(-1)


@dataclass(frozen=True)
class ExitPolicy:
    """A policy and its number, as parsed by `parse_exit`."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"{self.name}:{self.value:g}"

    def keywords(self, model: "LanguageModel") -> dict[str, Any]:
        """The keywords `depth`, `halt_threshold` and `exit` with which the model's forward pass follows this policy.

        Raises: UserError if this model cannot.
        """
        return {"depth": None, "halt_threshold": None, "exit": None, **_KEYWORDS[self.name](model, self.value)}


def _cycles(model: "LanguageModel", value: float) -> dict[str, Any]:
    model.schedule(int(value))
    return {"depth": int(value)}


def _halt(model: "LanguageModel", value: float) -> dict[str, Any]:
    model.check_threshold(value, None)
    return {"halt_threshold": value}


def _change(model: "LanguageModel", value: float) -> dict[str, Any]:
    model.check_exit()
    return {"exit": StateChange(value)}


def _kl(model: "LanguageModel", value: float) -> dict[str, Any]:
    model.check_exit()
    if model.finishes:
        raise UserError(
            f"exit kl:{value:g}: what this model would predict after a cycle depends on how far other tokens have "
            f"come, as attention follows the cycles; give change:{value:g}"
        )
    return {"exit": ReadoutDivergence(value, model.readout, model.config.n_predicted)}


_KEYWORDS: dict[str, Callable[["LanguageModel", float], dict[str, Any]]] = {
    "cycles": _cycles,
    "change": _change,
    "kl": _kl,
    "halt": _halt,
}


def parse_exit(text: str) -> ExitPolicy:
    """The policy of a text such as "change:0.1". Raises: UserError."""
    name, _, number = text.partition(":")
    if name not in _KEYWORDS:
        raise UserError(f"unknown exit policy {text!r}, {nearest(name, _KEYWORDS)} (such as change:0.1 or cycles:4)")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf or (name == "cycles" and value != int(value)):
        kind = "a whole number" if name == "cycles" else "a number"
        example = {"cycles": 4, "change": 0.1, "kl": 0.01, "halt": 0.9}[name]
        raise UserError(f"exit policy {text!r}: {name} needs {kind} above 0, such as {name}:{example}")
    return ExitPolicy(name, value)
