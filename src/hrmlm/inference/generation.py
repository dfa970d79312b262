"""Generating text: a batch of rows, each with its own options, advanced by one token per step.

B rows, L positions fed in one step, V ids that can be predicted.
"""

import math
import operator
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.inference.rows import Completion, GenerationOptions, Row, TokenEvent
from hrmlm.inference.sampling import Sampler
from hrmlm.models.base import LanguageModel, evaluating
from hrmlm.steps import check_depth

Prompt = str | bytes | Sequence[int]
Options = GenerationOptions | Sequence[GenerationOptions] | None


def generate(
    model: LanguageModel, tokenizer: Tokenizer, prompts: str | bytes | Sequence[Prompt], options: Options = None
) -> list[Completion]:
    """Continue every prompt (text or token ids), all in one batch.

    Each completion is what its prompt would give alone, so equal prompts with equal seeds give equal texts. Rules: an
    empty prompt starts a new document; a prompt that ends with the end mark goes on with a new document; a row ends at
    the end mark, at a stop string, after max_new_tokens, or when the context is full, which is after
    context - len(prompt) + 1 new tokens.

    Args: options: for all rows, or one for each; `cache`, `depth` and `halt_threshold` must be the same in all.

    Raises: UserError for a prompt longer than the model's context, ids outside the vocabulary, a tokenizer of another
    size than the model's vocabulary, an impossible depth, a cache for a model that cannot have one, or a model whose
    predictions are not finite.
    """
    engine = Engine(model, tokenizer, [prompts] if isinstance(prompts, str | bytes) else prompts, options)
    for _ in engine.run():
        pass
    return engine.completions()


def stream(
    model: LanguageModel, tokenizer: Tokenizer, prompt: Prompt, options: GenerationOptions | None = None
) -> Iterator[TokenEvent]:
    """Continue one prompt, one event per token as it comes; their joined texts are the text of `generate`.

    Raises: UserError as `generate`; mistakes in the prompt are raised at once, not with the first token.
    """
    return Engine(model, tokenizer, [prompt], options).run()


class Engine:
    """A batch of rows in the making. Rows that end leave the batch and cost nothing any more.

    `forwards` counts calls of the model: as many as the longest row has new tokens.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[Prompt], options: Options = None
    ) -> None:
        rows_options = _options_per_row(options, len(prompts))
        _check_vocabulary(model, tokenizer)
        shared = rows_options[0] if rows_options else GenerationOptions()
        check_depth(model, shared.depth, shared.halt_threshold)
        self._depth, self._halt_threshold = shared.depth, shared.halt_threshold
        context = model.config.context
        self.forwards = 0
        self._model = model
        self._device = next(model.parameters()).device
        self._rows = [
            Row(index, _prompt_ids(prompt, tokenizer, context), row_options, tokenizer, context)
            for index, (prompt, row_options) in enumerate(zip(prompts, rows_options, strict=True))
        ]
        self._sampler = Sampler(rows_options, self._device)
        self._seeds = list(self._sampler.seeds)
        self._active = [row for row in self._rows if not row.finish_reason]  # one per row of the tensors below
        if not self._active:
            return
        self._sampler.select(torch.tensor([row.index for row in self._active]))
        # What the next step feeds: right-padded ids, and how many of each row are real.
        self._lengths_B = torch.tensor([len(row.fed_ids) for row in self._active])
        self._tokens_BL = _right_padded([row.fed_ids for row in self._active]).to(self._device)
        self._cache = None
        if shared.cache:
            longest = max(len(row.fed_ids) + row.limit - 1 for row in self._active)
            self._cache = model.new_cache(len(self._active), longest, depth=shared.depth)

    def run(self) -> Iterator[TokenEvent]:
        """Steps until every row has ended."""
        while self._active:
            yield from self.step()

    @torch.no_grad()  # not inference_mode: tables that a model keeps from here must stay usable in training
    def step(self) -> list[TokenEvent]:
        """One new token for every row that is still going, in the order of the prompts."""
        logits_BV, steps_B = self._forward()
        ids_B = self._sampler(logits_BV)
        logprobs_B = logits_BV.gather(1, ids_B[:, None])[:, 0] - logits_BV.logsumexp(-1)
        new = zip(self._active, ids_B.tolist(), logprobs_B.tolist(), steps_B, strict=True)
        events = [row.accept(token, _finite(logprob), steps) for row, token, logprob, steps in new]
        self._advance(ids_B)
        return events

    def completions(self) -> list[Completion]:
        """Results in the order of the prompts, once every row has ended."""
        return [row.completion(seed) for row, seed in zip(self._rows, self._seeds, strict=True)]

    def _forward(self) -> tuple[Tensor, list[int] | list[None]]:
        """Logits (B, V) that follow each row's last real token, and the outer steps spent on that token."""
        self.forwards += 1
        with evaluating(self._model):
            output = self._model(
                self._tokens_BL,
                cache=self._cache,
                lengths_B=self._lengths_B,
                read_B=self._lengths_B - 1,
                depth=self._depth,
                halt_threshold=self._halt_threshold,
            )
        logits_BV = output.logits[:, 0]
        if output.steps_BL is None:
            return logits_BV, [None] * len(logits_BV)
        ends_B1 = (self._lengths_B - 1)[:, None].to(output.steps_BL.device)
        return logits_BV, output.steps_BL.gather(1, ends_B1)[:, 0].tolist()

    def _advance(self, ids_B: Tensor) -> None:
        """Let the rows that ended go, and prepare the next step of the others."""
        going = [place for place, row in enumerate(self._active) if not row.finish_reason]
        if going and len(going) < len(self._active):
            places_B = torch.tensor(going)
            self._sampler.select(places_B)
            self._lengths_B = self._lengths_B[places_B]
            ids_B, self._tokens_BL = ids_B[places_B], self._tokens_BL[places_B]
            if self._cache is not None:
                self._cache.select(places_B)
        self._active = [self._active[place] for place in going]
        if self._cache is not None:
            self._tokens_BL, self._lengths_B = ids_B[:, None], torch.ones(len(ids_B), dtype=torch.long)
        elif going:
            ends_B1 = self._lengths_B.to(self._device)[:, None]
            self._tokens_BL = F.pad(self._tokens_BL, (0, 1)).scatter(1, ends_B1, ids_B[:, None])
            self._lengths_B = self._lengths_B + 1
            self._tokens_BL = self._tokens_BL[:, : int(self._lengths_B.max())]  # a long row may have left


def _options_per_row(options: Options, n_rows: int) -> list[GenerationOptions]:
    if options is None or isinstance(options, GenerationOptions):
        return [options or GenerationOptions()] * n_rows
    if len(options) != n_rows:
        raise UserError(f"{len(options)} options for {n_rows} prompts; give one for each, or one for all")
    for name in ("cache", "depth", "halt_threshold"):
        if len({getattr(row, name) for row in options}) > 1:
            raise UserError(f"{name} must be the same for all prompts of a batch; generate in two calls")
    return list(options)


def _check_vocabulary(model: LanguageModel, tokenizer: Tokenizer) -> None:
    if model.config.n_predicted != tokenizer.vocab_size:
        raise UserError(
            f"the model predicts {model.config.n_predicted} ids and the tokenizer has {tokenizer.vocab_size}: "
            "use the tokenizer the model was trained with (used_vocab tells padding rows apart)"
        )


def _prompt_ids(prompt: Prompt, tokenizer: Tokenizer, context: int) -> list[int]:
    """Ids of a prompt. Raises: UserError if there are too many, or one that the tokenizer does not have."""
    if isinstance(prompt, int):
        raise UserError(f"prompt {prompt} is a number; give texts or lists of ids, so one prompt of ids as [[...]]")
    ids = tokenizer.encode(prompt) if isinstance(prompt, str | bytes) else _whole(prompt)
    if len(ids) > context:
        raise UserError(f"a prompt of {len(ids)} tokens is longer than the model's context of {context}; shorten it")
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise UserError(f"prompt id {token} is outside the vocabulary 0..{tokenizer.vocab_size - 1}")
    return ids


def _whole(ids: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in ids]
    except TypeError:
        raise UserError(f"prompt {str(ids)[:60]!r} is neither a text nor a list of ids (whole numbers)") from None


def _right_padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids (B, L), zeros behind shorter rows, which no real token sees."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _finite(logprob: float) -> float:
    if not math.isfinite(logprob):
        raise UserError("the model's predictions are not finite numbers: its weights are damaged or training diverged")
    return logprob
