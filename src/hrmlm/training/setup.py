"""What a run needs before its first step: data, model, teacher. All is checked before anything is written."""

import torch

from hrmlm.checkpoint import Checkpoint, load_model
from hrmlm.data.corpora import Corpora
from hrmlm.data.tokens import loader
from hrmlm.data.verify import verify
from hrmlm.errors import UserError
from hrmlm.models import LanguageModel, ModelConfig, build_model
from hrmlm.parallel import Parallel
from hrmlm.training.recipe import Recipe
from hrmlm.training.run import RunDirectory, resolve_checkpoint
from hrmlm.training.trackers import check_trackers
from hrmlm.training.trainer import Trainer


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


class Setup:
    """Data and settings of a run, opened and checked; makes its model and its trainer.

    notes: what is worth telling at the start. Raises: UserError for what cannot be used.
    """

    def __init__(self, recipe: Recipe, run: RunDirectory, parallel: Parallel) -> None:
        self.recipe, self.parallel = recipe, parallel
        self.notes: list[str] = []
        self.data = open_corpora(recipe)
        check_trackers(recipe.training.trackers)
        self.device = parallel.configure(recipe.parallel.timeout, recipe.training.device)
        # An id changed in place would make another run of this one, unnoticed.
        self.verified = parallel.from_first(lambda: verify(self.data.parts, recipe.data.verify, run.verified))
        if self.verified.unread:
            self.notes.append(f"{self.verified.unread:,} bytes of data not compared with their hashes (data.verify)")
        ours = {**recipe.to_dict(), "data": (self.data.fingerprint, recipe.window)}
        if any(theirs != ours for theirs in parallel.gather(ours)):
            raise UserError("the processes were given different recipes or data; give all of them the same command")
        training = recipe.training
        self.windows = self.data.windows(recipe.window, training.batch_size, training.seed)
        self.config = model_config_for(recipe, self.data.tokenizer.vocab_size)
        self.valid_ids = self.data.valid_ids(training.eval_tokens)

    def new_model(self) -> LanguageModel:
        """The model at its start, the same in every process."""
        torch.manual_seed(self.recipe.training.seed)
        model = build_model(self.config)
        model.check_training(self.recipe.window)
        return model

    def trainer(self, model: LanguageModel) -> Trainer:
        """The trainer of a model; its weights must be there already."""
        teacher, weights = self._open_teacher(model)
        workers, pin = self.recipe.data.workers, self.device.type == "cuda"
        trainer = Trainer(
            self.recipe,
            model,
            lambda start, stop: loader(self.windows, start, stop, workers, pin),
            teacher,
            self.parallel,
            self.device,
        )
        trainer.progress.teacher = weights
        return trainer

    def check_tokenizer(self, checkpoint: Checkpoint) -> None:
        """Raises: UserError if a checkpoint was trained with another tokenizer than the data's."""
        ours = self.data.tokenizer.fingerprint
        if checkpoint.tokenizer_fingerprint not in (None, ours):
            raise UserError(
                f"{checkpoint.path} was trained with tokenizer {checkpoint.tokenizer_fingerprint} and "
                f"{self.data.name} was prepared with {ours}"
            )

    def _open_teacher(self, student: LanguageModel) -> tuple[LanguageModel | None, str | None]:
        """The teacher of the recipe and the hash of its weights. Raises: UserError for one that cannot teach this."""
        settings = self.recipe.distillation
        if settings is None:
            return None, None
        source = self.parallel.from_first(lambda: resolve_checkpoint(settings.teacher))
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
        return teacher, source.weights_hash
