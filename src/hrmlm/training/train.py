"""A whole training run: recipe and prepared data in, run directory out. Resumable exactly, stoppable at any moment."""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

import hrmlm
from hrmlm.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    WEIGHTS,
    Checkpoint,
    NotFiniteError,
    load_model,
    load_weights,
    read_tensors,
    save_checkpoint,
)
from hrmlm.data.corpora import Corpora, Usage
from hrmlm.data.tokens import loader
from hrmlm.data.verify import verify
from hrmlm.errors import UserError
from hrmlm.files import write_json
from hrmlm.models import LanguageModel, ModelConfig, build_model
from hrmlm.signals import StopSignal
from hrmlm.training import depth
from hrmlm.training.metrics import Metrics, read_metrics, supersede
from hrmlm.training.profiling import Profile
from hrmlm.training.recipe import Recipe
from hrmlm.training.run import RunDirectory, difference, resolve_checkpoint, warn
from hrmlm.training.trackers import check_trackers, open_trackers
from hrmlm.training.trainer import Progress, StepResult, Trainer, TrainingDiverged
from hrmlm.training.validation import validate

FIXED_ON_RESUME = ("model.", "data.window", "training.seed", "training.batch_size", "training.accumulation")
"""What cannot change in the middle of a run: the weights' shapes and the order of the data."""


class Reporter:
    """What a run tells while it goes on; the command line's draws progress bars, this one is silent."""

    def start(self, recipe: Recipe, done: int, notes: list[str]) -> None:
        """Before the first step; `done` steps were done earlier."""

    def step(self, result: StepResult, tokens_per_second: float) -> None:
        """After every step."""

    def evaluation(
        self, step: int, loss: float, bits_per_byte: float | None, is_best: bool, mean_steps: float | None = None
    ) -> None:
        """After every evaluation. mean_steps: outer steps per validation token, of models that decide their depth."""

    def stop(self) -> None:
        """At the end, whatever the reason."""


@dataclass
class RunResult:
    """How a run ended. stopped_by: name of the signal that ended it early, None if it is complete; tokens_per_second:
    median over the steps of this process, evaluation and saving not included; corpora: what was read of each."""

    out: str
    step: int
    steps: int
    parameters: int
    tokens: int
    loss: float | None
    bits_per_byte: float | None
    best_step: int | None
    best_loss: float | None
    tokens_per_second: float
    seconds: float
    stopped_by: str | None
    corpora: list[Usage]


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    profile: Profile | None = None,
) -> RunResult:
    """Train as the recipe says, into the directory `out`.

    profile: steps to look at more closely; filled in place.

    Raises: UserError before any work for bad input; TrainingDiverged if the loss or a gradient stops being finite.
    """
    run = RunDirectory(out)
    session = _Session(recipe, run, reporter or Reporter(), profile)
    try:
        session.open_data()
        if resume:
            session.resume()
        else:
            session.start(overwrite)
        return session.loop()
    finally:
        session.close()


def model_config_for(recipe: Recipe, vocab_size: int) -> ModelConfig:
    """The recipe's model, with its vocabulary fitted to the tokenizer's. Raises: UserError if ids would not fit."""
    config = recipe.model_config_of()
    if config.vocab_size is None:
        return config.replace(vocab_size=vocab_size)
    if config.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size {config.vocab_size} is smaller than the data's vocabulary of {vocab_size}; "
            "leave it out, or prepare the data with a smaller tokenizer"
        )
    if config.used_vocab not in (None, vocab_size):
        raise UserError(f"model.used_vocab {config.used_vocab} is not the data's vocabulary of {vocab_size}")
    return config.replace(used_vocab=vocab_size if vocab_size < config.vocab_size else None)


def open_corpora(recipe: Recipe) -> Corpora:
    """The prepared data that a recipe names. Raises: UserError."""
    given = recipe.data.corpora
    if not given:
        raise UserError("data.path is not set; give the directory that `hrmlm prepare` wrote: data.path=DIR")
    return Corpora.open([corpus.path for corpus in given], [corpus.weight for corpus in given])


def recipe_model(recipe: Recipe) -> ModelConfig:
    """The model a recipe describes, its vocabulary from the recipe, else from the data it names. Raises: UserError."""
    config = recipe.model_config_of()
    if config.vocab_size is None and recipe.data.corpora:
        return model_config_for(recipe, open_corpora(recipe).tokenizer.vocab_size)
    return config


class _Session:
    """One process's work on a run."""

    def __init__(self, recipe: Recipe, run: RunDirectory, reporter: Reporter, profile: Profile | None = None) -> None:
        self.recipe, self.run, self.reporter, self.profile = recipe, run, reporter, profile
        self.metrics: Metrics | None = None
        self.notes: list[str] = []
        self.stop = StopSignal()

    def open_data(self) -> None:
        """Open and check the data; nothing is written before this has worked."""
        self.data = open_corpora(self.recipe)
        check_trackers(self.recipe.training.trackers)
        if self.profile is not None:
            self.profile.check(self.recipe.training.steps)
        try:
            torch.zeros(1, device=self.recipe.training.device).item()  # not only names it: it holds numbers
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"training.device {self.recipe.training.device!r} cannot be used: {reason}") from None
        # An id changed in place would make another run of this one, unnoticed.
        self.verified = verify(self.data.parts, self.recipe.data.verify, self.run.verified)
        if self.verified.unread:
            self.notes.append(f"{self.verified.unread:,} bytes of data not compared with their hashes (data.verify)")
        training = self.recipe.training
        self.windows = self.data.windows(self.recipe.window, training.batch_size, training.seed)
        self.config = model_config_for(self.recipe, self.data.tokenizer.vocab_size)
        self.valid_ids = self.data.valid_ids(training.eval_tokens)

    def _new_trainer(self) -> Trainer:
        torch.manual_seed(self.recipe.training.seed)
        model = build_model(self.config)
        model.check_training(self.recipe.window)  # before anything is written
        workers = self.recipe.data.workers
        teacher, weights = self._open_teacher(model)
        trainer = Trainer(
            self.recipe, model, lambda start, stop: loader(self.windows, start, stop, workers=workers), teacher
        )
        trainer.progress.teacher = weights
        return trainer

    def _open_teacher(self, student: LanguageModel) -> tuple[LanguageModel | None, str | None]:
        """The teacher of the recipe and the hash of its weights. Raises: UserError for one that cannot teach this."""
        settings = self.recipe.distillation
        if settings is None:
            return None, None
        source = resolve_checkpoint(settings.teacher)
        ours = self.data.tokenizer.fingerprint
        if source.tokenizer_fingerprint != ours:
            theirs = source.tokenizer_fingerprint or "none"
            raise UserError(
                f"distillation.teacher {source.path} has tokenizer {theirs} and {self.data.name} was prepared "
                f"with {ours}: a student learns from a teacher of the same tokenizer"
            )
        teacher = load_model(source)
        if teacher.config.n_predicted != student.config.n_predicted:
            raise UserError(
                f"distillation.teacher {source.path} predicts {teacher.config.n_predicted} ids and the student "
                f"{student.config.n_predicted}"
            )
        if teacher.sequence_limit < self.recipe.window:
            raise UserError(
                f"distillation.teacher {source.path} reads at most {teacher.sequence_limit} tokens and the training "
                f"windows have {self.recipe.window}; set data.window={teacher.sequence_limit} or less"
            )
        self.notes.append(f"teacher {source.path}, {teacher.config.family}")
        return teacher, source.files[WEIGHTS]["sha256"]

    def _open_metrics(self) -> None:
        self.metrics = Metrics(self.run.metrics, open_trackers(self.recipe, self.run.path))

    def start(self, overwrite: bool) -> None:
        """Begin a new run."""
        self.trainer = self._new_trainer()
        self._take_weights()
        self.run.create(overwrite)
        self._begin()

    def _take_weights(self) -> None:
        if self.recipe.training.init_from:
            source = resolve_checkpoint(self.recipe.training.init_from)
            self._check_tokenizer(source)
            load_weights(self.trainer.model, source.path / WEIGHTS)
            self.notes.append(f"weights from {source.path}")

    def _begin(self) -> None:
        self.run.write_recipe(self.recipe)
        self.verified.write(self.run.verified)
        self._open_metrics()
        self._log("start", recipe=self.recipe.to_dict(), parameters=self._parameters(), version=hrmlm.__version__)
        self.notes.append(self.trainer.rates.note)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint of the run; one that was killed before its first starts again."""
        if not self.run.is_run():
            what = "is not a run directory" if self.run.path.exists() else "does not exist"
            raise UserError(f"{self.run.path} {what}; start the run without --resume")
        self.run.lock()
        if not self.run.checkpoints():
            self.notes.append("there is no checkpoint yet: starting from the first step")
            self.trainer = self._new_trainer()
            self._take_weights()
            supersede(self.run.metrics, -1)
            return self._begin()
        checkpoint = self.run.newest()
        if checkpoint.training is None or OPTIMIZER not in checkpoint.files:
            raise UserError(
                f"{checkpoint.path} holds weights only, so training cannot go on from it; start a new run from these "
                f"weights with training.init_from={checkpoint.path}"
            )
        changes = self._check_changes(checkpoint)
        if self.profile is not None:
            self.profile.check(self.recipe.training.steps - checkpoint.step)
        self.trainer = self._new_trainer()
        load_weights(self.trainer.model, checkpoint.path / WEIGHTS)
        teacher = self.trainer.progress.teacher
        self.trainer.progress = _progress_of(checkpoint)
        if self.trainer.progress.teacher != teacher:
            raise UserError(
                f"distillation.teacher is not the one the run was started with; give that one again, or start a new "
                f"run with training.init_from={checkpoint.path}"
            )
        self.trainer.load_optimizer_state(read_tensors(checkpoint.path / OPTIMIZER), str(checkpoint.path / OPTIMIZER))
        self._restore_record(checkpoint.step, self.trainer.progress)
        self.run.write_recipe(self.recipe)
        self.verified.write(self.run.verified)
        self._open_metrics()
        self._log("resume", changes={key: list(values) for key, values in changes.items()})

    def _restore_record(self, step: int, progress: Progress) -> None:
        """Make everything in the run directory agree with the checkpoint of `step`."""
        self.run.remove_after(step)
        supersede(self.run.metrics, step, progress.last_evaluation[0] if progress.last_evaluation else 0)
        (self.run.path / "result.json").unlink(missing_ok=True)
        best = progress.best_step
        if best is not None and progress.best_loss is not None and self.run.checkpoint_path(best).is_dir():
            self.run.mark_best(best, progress.best_loss)

    def _check_changes(self, checkpoint: Checkpoint) -> dict[str, tuple[Any, Any]]:
        """Differences to the recipe the run was started with; what is given now wins, and is announced."""
        assert checkpoint.training is not None
        self._check_tokenizer(checkpoint)
        if checkpoint.data_fingerprint != self.data.fingerprint:
            raise UserError(
                f"{self.data.name} has fingerprint {self.data.fingerprint} and the run was trained on "
                f"{checkpoint.data_fingerprint}; give the same prepared data in the same shares, or start a new run "
                f"with training.init_from={checkpoint.path}"
            )
        old = Recipe.parse(checkpoint.training["recipe"], f"{checkpoint.path}: recipe")
        changes = difference(old.to_dict(), self.recipe.to_dict())
        fixed = [key for key in changes if key.startswith(FIXED_ON_RESUME)]
        if fixed:
            told = ", ".join(f"{key} (was {changes[key][0]!r}, now {changes[key][1]!r})" for key in fixed)
            raise UserError(
                f"cannot change in the middle of a run: {told}; start a new run with "
                f"training.init_from={checkpoint.path}"
            )
        done, steps = checkpoint.step, self.recipe.training.steps
        if steps < done:
            raise UserError(f"training.steps={steps} but the run has done {done} steps; give at least {done}")
        self.notes.append(f"resumed after step {done} of {steps} from {checkpoint.path}")
        for key, (before, after) in changes.items():
            self.notes.append(f"{key}: {before!r} in the checkpoint, {after!r} given now; the value given now is used")
        if any(key.startswith(("optimizer.lr", "schedule.", "training.steps")) for key in changes):
            self.notes.append(
                f"the learning rate follows the new schedule from step {done + 1} on, without restarting it"
            )
        return changes

    def _check_tokenizer(self, checkpoint: Checkpoint) -> None:
        ours = self.data.tokenizer.fingerprint
        if checkpoint.tokenizer_fingerprint not in (None, ours):
            raise UserError(
                f"{checkpoint.path} was trained with tokenizer {checkpoint.tokenizer_fingerprint} and "
                f"{self.data.name} was prepared with {ours}"
            )

    def loop(self) -> RunResult:
        """Train, evaluate and save until the run is complete or a signal asks to stop."""
        training, progress = self.recipe.training, self.trainer.progress
        started, rates = time.perf_counter(), []
        self.reporter.start(self.recipe, progress.step, self.notes)
        with self.stop.caught():
            try:
                if self._evaluation_is_due():  # a signal came between this step and its evaluation
                    self._evaluate()
                for result in self._steps():
                    rates.append(result.tokens / result.seconds)
                    self._record(result, rates[-1])
                    if self.stop.name:
                        break
                    if self._evaluation_is_due():
                        self._evaluate()
                    if _due(result.step, training.save_every):
                        self._save()
                if self.stop.name is None and self._evaluation_is_old():
                    self._evaluate()
                self._save()
            except TrainingDiverged as error:
                self._log("stop", reason=str(error))
                raise
            finally:
                self.reporter.stop()
        self._log("stop", reason=self.stop.name or "complete")
        return self._result(rates, time.perf_counter() - started)

    def _steps(self) -> Iterator[StepResult]:
        steps = self.trainer.steps()
        return steps if self.profile is None else self.profile.watch(steps, self.run.path / "profile")

    def _evaluation_is_due(self) -> bool:
        training, step = self.recipe.training, self.trainer.progress.step
        return 0 < step < training.steps and _due(step, training.eval_every) and self._evaluation_is_old()

    def _evaluation_is_old(self) -> bool:
        last = self.trainer.progress.last_evaluation
        return last is None or last[0] < self.trainer.progress.step

    def _record(self, result: StepResult, tokens_per_second: float) -> None:
        self._log(
            "step",
            loss=result.loss if result.updated else None,
            lr=result.lr,
            gradient_norm=result.norm,
            tokens=self.trainer.progress.tokens,
            targets=result.targets,
            depth=result.depth,
            batches_without_targets=self.trainer.progress.batches_without_targets,
            tokens_per_second=round(tokens_per_second, 1),
            **depth.per_target(result.extra, result.targets),
            **result.monitors,
        )
        self.reporter.step(result, tokens_per_second)

    def _evaluate(self) -> None:
        progress, model = self.trainer.progress, self.trainer.model
        batch_size = self.recipe.training.batch_size
        report = validate(model, self.data, self.valid_ids, self.recipe.window, batch_size=batch_size)
        loss, bits = report.loss, report.bits_per_byte
        if not math.isfinite(loss):
            raise TrainingDiverged(progress.step, "the validation loss")
        is_best = progress.best_loss is None or loss < progress.best_loss
        details = depth.of_evaluation(report.steps) | ({"corpora": report.corpora} if report.corpora else {})
        self._log("eval", loss=loss, bits_per_byte=bits, perplexity=report.perplexity, best=is_best, **details)
        self._warn_once(depth.KIND, depth.constant_depth(model, report.steps))
        for kind, message in self._complaints().items():
            self._warn_once(kind, message)
        mean_steps = None if report.steps is None else report.steps.mean
        self.reporter.evaluation(progress.step, loss, bits, is_best, mean_steps)
        progress.last_evaluation = (progress.step, loss, bits)
        if is_best:
            progress.best_loss, progress.best_step = loss, progress.step
            self._save()
            self.run.mark_best(progress.step, loss)

    def _complaints(self) -> dict[str, str]:
        """What the family has to say about its monitors: now, against the first step after the warm-up."""
        lines = [line for line in read_metrics(self.run.metrics) if line["event"] == "step"]
        settled = [line for line in lines if line["step"] > self.trainer.rates.warmup]
        return self.trainer.model.complaints(lines[-1], settled[0]) if settled else {}

    def _warn_once(self, kind: str, message: str | None) -> None:
        """Tell a warning on standard error and in the record, unless the record has one of its kind already."""
        if message and not any(line.get("kind") == kind for line in read_metrics(self.run.metrics)):
            warn(message)
            self._log("warning", kind=kind, message=message)

    def _save(self) -> None:
        path = self.run.checkpoint_path(self.trainer.progress.step)
        if path.exists():
            return
        try:
            save_checkpoint(
                path,
                self.trainer.model,
                tokenizer=self.data.tokenizer,
                optimizer_state=self.trainer.optimizer_state(),
                training=self.trainer.position(),
                data_fingerprint=self.data.fingerprint,
            )
        except NotFiniteError as error:
            raise TrainingDiverged(self.trainer.progress.step, error.name) from None
        self.run.prune(self.recipe.training.keep)

    def _result(self, rates: list[float], seconds: float) -> RunResult:
        training, progress = self.recipe.training, self.trainer.progress
        _, loss, bits = progress.last_evaluation or (0, None, None)
        result = RunResult(
            out=str(self.run.path),
            step=progress.step,
            steps=self.recipe.training.steps,
            parameters=self._parameters(),
            tokens=progress.tokens,
            loss=loss,
            bits_per_byte=bits,
            best_step=self.run.best_step(),
            best_loss=progress.best_loss,
            tokens_per_second=sorted(rates)[len(rates) // 2] if rates else 0.0,
            seconds=seconds,
            stopped_by=self.stop.name,
            corpora=self.data.usage(self.windows, progress.step * training.accumulation * training.batch_size),
        )
        if self.stop.name is None:
            write_json(self.run.path / "result.json", asdict(result))
        return result

    def _parameters(self) -> int:
        model: LanguageModel = self.trainer.model
        return sum(p.numel() for p in model.parameters())

    def _log(self, event: str, **values: Any) -> None:
        assert self.metrics is not None
        self.metrics.write(event, self.trainer.progress.step if hasattr(self, "trainer") else 0, **values)

    def close(self) -> None:
        """Close the record and let other processes use the directory."""
        if self.metrics is not None:
            self.metrics.close()
        self.run.close()


def _progress_of(checkpoint: Checkpoint) -> Progress:
    """Where the run of a checkpoint stands. Raises: UserError if the record of that is damaged."""
    position = {k: v for k, v in (checkpoint.training or {}).items() if k in Progress.__dataclass_fields__}
    try:
        return TypeAdapter(Progress).validate_python(position)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(f"{checkpoint.path / MANIFEST} is damaged: training.{where} is no valid value") from None


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
