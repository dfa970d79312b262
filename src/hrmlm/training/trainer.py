"""The training loop. It knows the model interface, never a family.

Everything random is a function of (seed, step, micro-batch) and the data order a function of the batch index, so a run
that is killed and resumed repeats exactly what an uninterrupted one does, without any generator state to save.

Of several processes each draws the same micro-batches and trains on its share of their rows: so each knows the number
of targets of the whole step, by which the objective, a sum, is divided, and the number of processes changes nothing.
"""

import hashlib
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hrmlm.data.batch import IGNORE, Batch, SoftTargets
from hrmlm.errors import UserError
from hrmlm.models import LanguageModel
from hrmlm.models.base import PartialLoss
from hrmlm.parallel import ALONE, Parallel
from hrmlm.training.compiling import compile_model
from hrmlm.training.engine import Engine, total_norm
from hrmlm.training.optimizer import LearningRate, build_optimizer
from hrmlm.training.optimizer_state import load_named_state, named_state
from hrmlm.training.precision import autocast, computing_copies
from hrmlm.training.prefetch import prefetched
from hrmlm.training.recipe import Recipe


class TrainingDiverged(RuntimeError):
    """Loss or gradient is no longer finite; the weights are those before the bad step."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"step {step}: {what} is not finite")
        self.step = step


@dataclass
class StepResult:
    """What one optimizer step did, over all processes. nats: summed cross-entropy of `targets` tokens; norm: of the
    gradient, before it was clipped; extra: further sums by name; monitors: what the family watches, in this process;
    tokens: read by the model; depth: cycles or steps run; updated: False where there was no target in the whole step;
    mfu: share of the device's peak, where that is known.
    """

    step: int
    nats: float
    targets: int
    tokens: int
    norm: float
    lr: float
    depth: int
    seconds: float
    updated: bool = True
    mfu: float | None = None
    extra: dict[str, float] = field(default_factory=dict)
    monitors: dict[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Nats per target token: the task's cross-entropy alone."""
        return self.nats / self.targets if self.targets else math.nan

    @property
    def mean_steps(self) -> float | None:
        """Mean outer steps per target token, of models that decide their depth themselves."""
        return self.extra["steps"] / self.targets if self.targets and "steps" in self.extra else None


@dataclass
class Progress:
    """Where a run stands; all of it is saved.

    batches_without_targets: micro-batches that had nothing to learn from; best_loss, best_step: of the lowest
    validation loss; last_evaluation: step, nats per token, bits per byte; teacher: hash of the teacher's weights.
    """

    step: int = 0
    tokens: int = 0
    batches_without_targets: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    last_evaluation: tuple[int, float, float | None] | None = None
    teacher: str | None = None


def derived_seed(*parts: int) -> int:
    """A seed that depends on all parts and on nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def own_rows(batch: Batch, share: slice) -> Batch:
    """A process's share of the rows of a batch; if it has none, a row without targets, so that it takes part."""
    if share.stop - share.start == len(batch.inputs_BL):
        return batch  # with its number of targets, which on a GPU must not be counted again
    if share.start < share.stop:
        return Batch(batch.inputs_BL[share], batch.targets_BL[share])
    return Batch(batch.inputs_BL[:1], torch.full_like(batch.targets_BL[:1], IGNORE))


@dataclass
class _Sums:
    """What the parts of a step add up to. They stay on the device until the step is done: reading one waits for it."""

    depth: int = 0
    targets: int = 0
    parts: list[tuple[str, Tensor]] = field(default_factory=list)

    def add(self, part: PartialLoss) -> None:
        """Count a part; its nats in any case, as they show whether the loss is finite."""
        self.depth = part.depth
        self.parts.append(("nats" if part.counted else "uncounted", part.task_nats))
        if part.counted:
            self.targets += part.n_targets
            self.parts += part.extra.items()

    def total(self, parallel: Parallel) -> tuple[int, dict[str, float]]:
        """Targets, and the sums by name, of all processes."""
        here = _added((name, float(value)) for name, value in self.parts)
        everywhere = parallel.gather((self.targets, here))
        return sum(targets for targets, _ in everywhere), _added(i for _, there in everywhere for i in there.items())


def _added(items: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums by name."""
    sums: dict[str, float] = {}
    for name, value in items:
        sums[name] = sums.get(name, 0.0) + value
    return sums


class Trainer:
    """Model, optimizer and schedule of a run, one step at a time.

    batches: a function (start, stop) → micro-batches of these global indices, in order. teacher: of the recipe's
    distillation. parallel: the processes of the run; each has the same model, the same micro-batches, and a Trainer.
    device: of this process (None: the recipe's).
    """

    def __init__(
        self,
        recipe: Recipe,
        model: LanguageModel,
        batches: Callable[[int, int], Iterable[Batch]],
        teacher: LanguageModel | None = None,
        parallel: Parallel = ALONE,
        device: torch.device | None = None,
    ) -> None:
        self.recipe, self.config, self.parallel = recipe, recipe.training, parallel
        self.device = device or torch.device(self.config.device)
        self.model = model.to(self.device).train()
        self.engine = Engine(self.model, parallel, recipe.parallel.strategy, self.config.precision)
        model.loss_chunk, model.checkpoint_activations = self.config.loss_chunk, self.config.checkpoint_activations
        self.batches = batches
        self.teacher = None if teacher is None else teacher.to(self.device).eval()
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.rates = LearningRate.of(recipe.schedule, recipe.optimizer.lr, self.config.steps, model)
        self.max_norm = recipe.optimizer.clip * model.gradient_share
        self.progress = Progress()
        compile_model(model, self.config.compile)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Optimizer state as named tensors: "<parameter>::<quantity>"."""
        return named_state(self.model, self.optimizer)

    def load_optimizer_state(self, tensors: dict[str, Tensor], where: str = "the optimizer state") -> None:
        """Restore what `optimizer_state` returned. Raises: UserError, beginning with `where`, if it does not fit."""
        load_named_state(self.model, self.optimizer, tensors, where)
        if self.progress.step and not tensors:
            raise UserError(f"{where} is empty after {self.progress.step} steps; use another checkpoint of the run")

    def steps(self) -> Iterator[StepResult]:
        """Train from where the run stands to its last step; yield after each. Raises: TrainingDiverged."""
        accumulation = self.config.accumulation
        first, last = self.progress.step + 1, self.config.steps
        stream = prefetched(self.batches((first - 1) * accumulation, last * accumulation), self.device)
        for step in range(first, last + 1):
            micro_batches = list(islice(stream, accumulation))
            assert micro_batches, "the data ended before the run"
            yield self.step(step, micro_batches)

    def step(self, step: int, micro_batches: list[Batch]) -> StepResult:
        """One optimizer step over several micro-batches, weighted by token. Raises: TrainingDiverged."""
        started = time.perf_counter()
        lr = self.rates.at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_ratio"]
        targets = [batch.n_targets for batch in micro_batches]
        self.progress.batches_without_targets += targets.count(0)
        result = StepResult(step, 0.0, 0, sum(b.inputs_BL.numel() for b in micro_batches), 0.0, lr, 0, 0.0)
        self.optimizer.zero_grad(set_to_none=True)
        taught = [index for index, count in enumerate(targets) if count]
        if taught:
            sums = _Sums()
            for index in taught:
                batch = own_rows(micro_batches[index], self.parallel.share(len(micro_batches[index].inputs_BL)))
                batch = batch.to(self.device)
                batch.soft = self._soft_targets(batch)
                with computing_copies(self.config.precision, self.model):
                    self._backward(step, index, batch, sum(targets), sums, is_last=index == taught[-1])
            result.targets, result.extra = sums.total(self.parallel)
            result.nats, result.depth = result.extra.pop("nats"), sums.depth
            if not math.isfinite(result.nats + result.extra.pop("uncounted", 0.0)):
                raise TrainingDiverged(step, "the loss")
            self._update(result)
        result.monitors = self.model.monitors()
        result.updated = bool(taught)
        self.progress.step = step
        self.progress.tokens += result.tokens
        result.seconds = time.perf_counter() - started
        return result

    def _backward(
        self, step: int, index: int, batch: Batch, total_targets: int, sums: _Sums, is_last: bool = True
    ) -> None:
        """Forward and backward of one micro-batch's rows in this process. is_last: the step's last micro-batch."""
        own = (self.parallel.rank,) if self.parallel.size > 1 else ()  # other rows, other dropout
        torch.manual_seed(derived_seed(self.config.seed, step, index, *own))
        rng = random.Random(derived_seed(self.config.seed, step))  # depth: the same for all micro-batches of a step
        losses = self.model.losses(batch, rng, (step - 1) / self.config.steps)
        n_parts = self.model.n_parts(batch.inputs_BL.shape[1])
        for number in range(1, n_parts + 1):
            is_end = is_last and number == n_parts
            sums.add(self.engine.backward(losses, total_targets, is_end, self._autocast()))
        assert next(losses, None) is None, "more parts than the family said"

    def _soft_targets(self, batch: Batch) -> SoftTargets | None:
        """What the teacher says about a batch."""
        settings = self.recipe.distillation
        if self.teacher is None or settings is None:
            return None
        with torch.no_grad(), self._autocast(), computing_copies(self.config.precision, self.teacher):
            logits_BLV = self.teacher(batch.inputs_BL).logits
        return SoftTargets(logits_BLV, settings.temperature, settings.weight)

    def _update(self, result: StepResult) -> None:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        result.norm = total_norm(parameters, self.max_norm)
        if not math.isfinite(result.norm):
            raise TrainingDiverged(result.step, "the gradient")
        self.optimizer.step()

    def _autocast(self) -> AbstractContextManager:
        return autocast(self.config.precision, self.device)

    def position(self) -> dict[str, Any]:
        """What a checkpoint records about the run besides tensors."""
        return {**vars(self.progress), "recipe": self.recipe.to_dict()}
