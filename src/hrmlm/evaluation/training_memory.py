"""Peak memory of a training step: predicted without allocating it, for every way to save some.

The prediction runs a real training step on weights that are only shapes (torch's fake tensors) and counts the bytes of
all storages that live. What a program reads of such a tensor is 1: positions that may stop never do, so the number of
a model that learns its depth is the most there can be. What a kernel allocates within itself is not seen.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hrmlm.errors import UserError
from hrmlm.evaluation.measured_memory import measure, random_batches
from hrmlm.models import LanguageModel, ModelConfig, build_model
from hrmlm.training.recipe import Recipe, TrainingConfig
from hrmlm.training.run import resolve_checkpoint
from hrmlm.training.trainer import Trainer

if TYPE_CHECKING:
    from rich.console import Console

CHUNK = 1024
"""Positions per chunk of the loss, at most, that are shown beside a recipe that names none."""

_aten = torch.ops.aten


@dataclass(frozen=True)
class PeakMemory:
    """Bytes at the peak of a training step. weights: of the model, and of a teacher; optimizer: all that it keeps from
    step to step; activations: everything else, temporary tensors included."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Choice:
    """A way to train a recipe, and what it takes. is_own: as the recipe says; measured: bytes, None where not measured;
    note: why not."""

    precision: str
    checkpoint_activations: bool
    loss_chunk: int | None
    is_own: bool
    predicted: PeakMemory
    measured: int | None = None
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything, as values for JSON."""
        predicted = {**asdict(self.predicted), "total": self.predicted.total}
        return {**asdict(self), "predicted": predicted}


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of the storages that operations return, as long as anything holds them; `peak`: the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._living: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._living:
                continue

            def forget(_: Any, key: int = key, size: int = size) -> None:
                del self._living[key]
                self.now -= size

            self._living[key] = weakref.ref(storage, forget)
            self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or answer for shapes what only numbers can."""
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is _aten.bincount.default and isinstance(args[0], FakeTensor):
            out = args[0].new_empty(1)
        elif func is _aten.index.Tensor:
            out = func(args[0], _places(args[1]))
        else:
            out = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return out


def _places(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Indices in which masks are replaced by the places they choose: their number would be unknown otherwise."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
            found.append(index)
        else:
            found += index.nonzero().unbind(1)
    return found


def predict(recipe: Recipe) -> PeakMemory:
    """The peak of a training step after the first, on one device.

    Kernels are those of the recipe's device where this torch has it, else those of the CPU. Raises: UserError for a
    recipe without a vocabulary.
    """
    device = _device(recipe)
    here = device if device.type == "cuda" and torch.cuda.is_available() else torch.device("cpu")
    recipe = recipe.changed([f"training.device={here}", "training.compile=false"])
    with torch.random.fork_rng(), FakeTensorMode(allow_non_fake_inputs=True), torch.device(here):
        model, teacher = _fake(recipe.model), None
        if recipe.distillation is not None:
            teacher = _fake(resolve_checkpoint(recipe.distillation.teacher).model)
    live = LiveMemory()
    with torch.random.fork_rng(), live, torch.autograd.set_multithreading_enabled(False):
        given = [] if teacher is None else _tensors(teacher)
        live.add([*given, *_tensors(model)])
        trainer = Trainer(recipe, model, lambda start, stop: [], teacher)
        weights = sum(tensor.nbytes for tensor in [*given, *_tensors(model)])
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        optimizer = live.now - weights
        live.peak = live.now
        trainer.step(1, random_batches(recipe, model))
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return PeakMemory(weights, gradients, optimizer, live.peak - weights - optimizer - gradients)


def _device(recipe: Recipe) -> torch.device:
    """Raises: UserError for a device that torch has no name for."""
    try:
        return torch.device(recipe.training.device)
    except RuntimeError as error:
        raise UserError(f"training.device {recipe.training.device!r}: {str(error).splitlines()[0]}") from None


def _tensors(model: LanguageModel) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _fake(settings: Mapping[str, Any] | ModelConfig) -> LanguageModel:
    """A model of shapes. `Module.to` cannot convert those in place, as torch does it; here they are replaced."""
    model = build_model(settings)

    def apply(convert: Callable[[Tensor], Tensor], recurse: bool = True) -> LanguageModel:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(convert(parameter.detach()))
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else convert(buffer)
        return model

    vars(model)["_apply"] = apply
    return model


def choices(recipe: Recipe, measured: bool = False) -> Iterator[Choice]:
    """The recipe's precision with and without checkpointed activations and chunks; then the other precisions.

    Raises: UserError as `predict` and `measure`.
    """
    own = recipe.training
    positions = own.batch_size * recipe.window
    chunks = (None, own.loss_chunk or min(CHUNK, max(1, positions // 4)))  # as large as the batch it saves nothing
    ways = [(own.precision, again, chunk) for chunk in chunks for again in (False, True)]
    others = get_args(TrainingConfig.model_fields["precision"].annotation)
    ways += [(other, own.checkpoint_activations, own.loss_chunk) for other in others if other != own.precision]
    for way in ways:
        changes = dict(zip(("precision", "checkpoint_activations", "loss_chunk"), way, strict=True))
        changed = recipe.model_copy(update={"training": own.model_copy(update=changes)})
        choice = Choice(*way, changed.training == own, predict(changed))
        yield _with_measurement(choice, changed) if measured else choice


def _with_measurement(choice: Choice, recipe: Recipe) -> Choice:
    device = _device(recipe)
    if device.type == "cuda" and not torch.cuda.is_available():
        return Choice(**{**vars(choice), "note": f"no device {device} here"})
    free = _free(device)
    if choice.predicted.total > 0.9 * free:
        return Choice(**{**vars(choice), "note": f"{free / 2**30:,.1f} GiB are free"})
    return Choice(**{**vars(choice), "measured": measure(recipe)})


def _free(device: torch.device) -> int:
    """Bytes that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text("ascii").splitlines() if meminfo.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), sys.maxsize)


def show(recipe: Recipe, found: list[Choice], console: "Console", name: str) -> None:
    """Print the choices as a table for people, one column each: so it fits into 80 characters."""
    from rich.markup import escape
    from rich.table import Table

    own = recipe.training
    title = f"{name}: peak memory of a training step, {own.batch_size} x {recipe.window:,} tokens, MiB"
    table = Table(title=escape(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("")
    for choice in found:
        table.add_column("recipe" if choice.is_own else "", justify="right")

    def row(label: str, cells: "Iterable[str]") -> None:
        table.add_row(label, *cells)

    row("precision", (choice.precision.replace("_", "_\n") for choice in found))
    row("checkpoint_activations", (str(choice.checkpoint_activations).lower() for choice in found))
    row("loss_chunk", (str(choice.loss_chunk or "none") for choice in found))
    for part in ("weights", "gradients", "optimizer", "activations", "total"):
        row(part, (f"{getattr(choice.predicted, part) / 2**20:,.1f}" for choice in found))
    if any(choice.measured or choice.note for choice in found):
        row("measured", (f"{c.measured / 2**20:,.1f}" if c.measured else c.note or "" for c in found))
        row("ratio", (f"{c.predicted.total / c.measured:.2f}" if c.measured else "" for c in found))
    console.print(table)
    console.print("Predicted on one device without allocating it; ratio: predicted / measured.")
