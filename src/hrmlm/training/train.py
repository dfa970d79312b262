"""A whole training run: recipe and prepared data in, run directory out. Resumable exactly, stoppable at any moment.

Of several processes all compute the same run; the first alone speaks, and writes what is not sharded.
"""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hrmlm
from hrmlm.checkpoint import Checkpoint, NotFiniteError, load_weights, read_tensors, save_checkpoint
from hrmlm.errors import UserError
from hrmlm.files import write_json
from hrmlm.models import LanguageModel
from hrmlm.parallel import Parallel
from hrmlm.signals import StopSignal
from hrmlm.training import depth
from hrmlm.training.metrics import supersede
from hrmlm.training.profiling import Profile
from hrmlm.training.recipe import Recipe
from hrmlm.training.record import Record
from hrmlm.training.reporter import Reporter, RunResult
from hrmlm.training.resume import FIXED_ON_RESUME, check_changes, progress_of
from hrmlm.training.run import RunDirectory, resolve_checkpoint
from hrmlm.training.setup import Setup, model_config_for, recipe_model
from hrmlm.training.trainer import StepResult, Trainer, TrainingDiverged
from hrmlm.training.utilisation import Utilisation, peak_flops
from hrmlm.training.validation import validate

__all__ = ["FIXED_ON_RESUME", "Reporter", "RunResult", "model_config_for", "recipe_model", "train"]


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    profile: Profile | None = None,
    parallel: Parallel | None = None,
) -> RunResult:
    """Train as the recipe says, into the directory `out`.

    profile: steps to look at more closely; filled in place. parallel: the processes that do it together (None: those
    that torchrun started, else this one alone).

    Raises: UserError before any work for bad input; TrainingDiverged if the loss or a gradient stops being finite;
    LostProcess if another process is gone, EndedElsewhere if another one tells why the run ended.
    """
    with nullcontext(parallel) if parallel else Parallel.opened() as group, group.watched():
        run = _Run(recipe, RunDirectory(out), reporter or Reporter(), profile if group.is_first else None, group)
        try:
            with group.together():
                run.begin(resume, overwrite)
            return run.loop()
        finally:
            run.close()


class _Run:
    """One process's work on a run."""

    trainer: Trainer
    saved: int | None = None  # step of the newest checkpoint; asked instead of the disk, so that all processes agree

    def __init__(
        self, recipe: Recipe, run: RunDirectory, reporter: Reporter, profile: Profile | None, parallel: Parallel
    ) -> None:
        self.recipe, self.run, self.profile, self.parallel = recipe, run, profile, parallel
        self.record = Record(run.metrics, reporter, silent=not parallel.is_first)
        self.stop = StopSignal(patient=parallel.size > 1)
        self.stopped_by: str | None = None  # the signal that all processes have agreed to stop for

    def begin(self, resume: bool, overwrite: bool) -> None:
        """Check everything, then start a new run, or go on with one."""
        self.setup = Setup(self.recipe, self.run, self.parallel)
        checkpoint = self.parallel.from_first(self._find) if resume else None
        if self.profile is not None:
            self.profile.check(self.recipe.training.steps - (checkpoint.step if checkpoint else 0))
        if checkpoint is not None:
            return self._resume(checkpoint)
        model = self.setup.new_model()
        if self.recipe.training.init_from:
            source = self.parallel.from_first(lambda: resolve_checkpoint(self.recipe.training.init_from or ""))
            self.setup.check_tokenizer(source)
            load_weights(model, source.weights)
            self.setup.notes.append(f"weights from {source.path}")
        self.trainer = self.setup.trainer(model)
        self.setup.notes.append(self.trainer.rates.note)
        self.parallel.from_first(lambda: self._start(resume, overwrite))

    def _start(self, resume: bool, overwrite: bool) -> None:
        if resume:
            self.setup.notes.insert(0, "there is no checkpoint yet: starting from the first step")
            supersede(self.run.metrics, -1)
        else:
            self.run.create(overwrite)
        self._open_record("start", recipe=self.recipe.to_dict(), parameters=self._parameters())

    def _open_record(self, event: str, **values: Any) -> None:
        self.run.write_recipe(self.recipe)
        self.setup.verified.write(self.run.verified)
        self.record.open(self.recipe, self.run.path)
        self._log(event, **values, version=hrmlm.__version__, processes=self.parallel.size)

    def _find(self) -> Checkpoint | None:
        """The newest whole checkpoint of the run; None for one that was killed before its first."""
        if not self.run.is_run():
            what = "is not a run directory" if self.run.path.exists() else "does not exist"
            raise UserError(f"{self.run.path} {what}; start the run without --resume")
        self.run.lock()
        return self.run.newest() if self.run.checkpoints() else None

    def _resume(self, checkpoint: Checkpoint) -> None:
        changes = check_changes(self.setup, checkpoint)
        assert checkpoint.optimizer is not None
        model = self.setup.new_model()
        load_weights(model, checkpoint.weights)
        self.trainer = self.setup.trainer(model)
        teacher = self.trainer.progress.teacher
        self.trainer.progress = progress_of(checkpoint)
        if self.trainer.progress.teacher != teacher:
            raise UserError(
                f"distillation.teacher is not the one the run was started with; give that one again, or start a new "
                f"run with training.init_from={checkpoint.path}"
            )
        self.trainer.load_optimizer_state(read_tensors(checkpoint.optimizer), str(checkpoint.optimizer))
        self.saved = checkpoint.step
        self.parallel.from_first(lambda: self._restore_record(checkpoint.step))
        self.parallel.from_first(
            lambda: self._open_record("resume", changes={key: list(values) for key, values in changes.items()})
        )

    def _restore_record(self, step: int) -> None:
        """Make everything in the run directory agree with the checkpoint of `step`."""
        progress = self.trainer.progress
        self.run.remove_after(step)
        supersede(self.run.metrics, step, progress.last_evaluation[0] if progress.last_evaluation else 0)
        (self.run.path / "result.json").unlink(missing_ok=True)
        best = progress.best_step
        if best is not None and progress.best_loss is not None and self.run.checkpoint_path(best).is_dir():
            self.run.mark_best(best, progress.best_loss)

    def loop(self) -> RunResult:
        """Train, evaluate and save until the run is complete or a signal asks to stop."""
        training, progress = self.recipe.training, self.trainer.progress
        started, rates, utilisation = time.perf_counter(), [], self._utilisation()
        self.record.reporter.start(self.recipe, progress.step, self.setup.notes)
        with self.stop.caught():
            try:
                if self._evaluation_is_due():  # a signal came between this step and its evaluation
                    self._evaluate()
                for result in self._steps():
                    rates.append(result.tokens / result.seconds)
                    result.mfu = utilisation.of(result.mean_steps or result.depth, rates[-1])
                    self.record.step(result, progress, rates[-1])
                    # Whichever process was asked, all end at this step; asked while they meet here, at the next one.
                    self.stopped_by = self.parallel.agree(self.stop.name)
                    if self.stopped_by:
                        break
                    if self._evaluation_is_due():
                        self._evaluate()
                    if _due(result.step, training.save_every):
                        self._save()
                if self.stopped_by is None and self._evaluation_is_old():
                    self._evaluate()
                self._save()
            except TrainingDiverged as error:
                self._log("stop", reason=str(error))
                raise
            finally:
                self.record.reporter.stop()
        self._log("stop", reason=self.stopped_by or "complete")
        return self._result(rates, time.perf_counter() - started)

    def _steps(self) -> Iterator[StepResult]:
        steps = self.trainer.steps()
        return steps if self.profile is None else self.profile.watch(steps, self.run.path / "profile")

    def _utilisation(self) -> Utilisation:
        training, trainer = self.recipe.training, self.trainer
        peak = training.peak_flops or peak_flops(trainer.device, training.precision)
        return Utilisation(trainer.model, self.recipe.window, peak, self.parallel.size)

    def _evaluation_is_due(self) -> bool:
        training, step = self.recipe.training, self.trainer.progress.step
        return 0 < step < training.steps and _due(step, training.eval_every) and self._evaluation_is_old()

    def _evaluation_is_old(self) -> bool:
        last = self.trainer.progress.last_evaluation
        return last is None or last[0] < self.trainer.progress.step

    def _evaluate(self) -> None:
        progress, model, setup = self.trainer.progress, self.trainer.model, self.setup
        with self.trainer.engine.whole():
            report = validate(
                model,
                setup.data,
                setup.valid_ids,
                self.recipe.window,
                batch_size=-(-self.recipe.training.batch_size // self.parallel.size),
                parallel=self.parallel,
            )
        loss, bits = report.loss, report.bits_per_byte
        if not math.isfinite(loss):
            raise TrainingDiverged(progress.step, "the validation loss")
        is_best = progress.best_loss is None or loss < progress.best_loss
        details = depth.of_evaluation(report.steps) | ({"corpora": report.corpora} if report.corpora else {})
        self._log("eval", loss=loss, bits_per_byte=bits, perplexity=report.perplexity, best=is_best, **details)
        self.record.warn_once(progress.step, depth.KIND, depth.constant_depth(model, report.steps))
        for kind, message in self.record.complaints(model, self.trainer.rates.warmup).items():
            self.record.warn_once(progress.step, kind, message)
        mean_steps = None if report.steps is None else report.steps.mean
        self.record.reporter.evaluation(progress.step, loss, bits, is_best, mean_steps)
        progress.last_evaluation = (progress.step, loss, bits)
        if is_best:
            progress.best_loss, progress.best_step = loss, progress.step
            self._save()
            self.parallel.from_first(lambda: self.run.mark_best(progress.step, loss))

    def _save(self) -> None:
        step = self.trainer.progress.step
        if self.saved == step:
            return
        with self.parallel.together():
            try:
                save_checkpoint(
                    self.run.checkpoint_path(step),
                    self.trainer.model,
                    tokenizer=self.setup.data.tokenizer,
                    optimizer_state=self.trainer.optimizer_state(),
                    training=self.trainer.position(),
                    data_fingerprint=self.setup.data.fingerprint,
                    parallel=self.parallel,
                )
            except NotFiniteError as error:
                raise TrainingDiverged(step, error.name) from None
            if self.parallel.is_first:
                self.run.prune(self.recipe.training.keep)
        self.saved = step

    def _result(self, rates: list[float], seconds: float) -> RunResult:
        training, progress = self.recipe.training, self.trainer.progress
        windows = progress.step * training.accumulation * training.batch_size
        _, loss, bits = progress.last_evaluation or (0, None, None)
        result = RunResult(
            out=str(self.run.path),
            step=progress.step,
            steps=self.recipe.training.steps,
            parameters=self._parameters(),
            tokens=progress.tokens,
            loss=loss,
            bits_per_byte=bits,
            best_step=self.parallel.from_first(self.run.best_step),
            best_loss=progress.best_loss,
            tokens_per_second=sorted(rates)[len(rates) // 2] if rates else 0.0,
            seconds=seconds,
            stopped_by=self.stopped_by,
            corpora=self.setup.data.usage(self.setup.windows, windows),
        )
        if self.stopped_by is None and self.parallel.is_first:
            write_json(self.run.path / "result.json", asdict(result))
        return result

    def _parameters(self) -> int:
        model: LanguageModel = self.trainer.model
        return sum(p.numel() for p in model.parameters())

    def _log(self, event: str, **values: Any) -> None:
        self.record.log(event, self.trainer.progress.step, **values)

    def close(self) -> None:
        """Close the record and let other processes use the directory."""
        self.record.close()
        self.run.close()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
