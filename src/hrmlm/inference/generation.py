"""Generating text: a batch of rows, each with its own options, advanced step by step."""

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.inference.decoding import Cached, Decoder, Depth, Drawn, Recomputing, Runner
from hrmlm.inference.drafting import Drafting, DraftOptions, check_drafting
from hrmlm.inference.rows import Completion, GenerationOptions, Row, TokenEvent
from hrmlm.inference.sampling import Sampler
from hrmlm.models.base import LanguageModel, evaluating
from hrmlm.models.cache import KVCache
from hrmlm.models.cache_policy import parse_cache_policy
from hrmlm.steps import depth_keywords

Prompt = str | bytes | Sequence[int]
Options = GenerationOptions | Sequence[GenerationOptions] | None
SHARED = ("cache", "cache_policy", "prefill_chunk", "depth", "halt_threshold", "exit", "draft", "draft_tokens")
"""Options that are the same for all rows of a batch."""


class Engine:
    """A batch of rows in the making. Rows that end leave the batch and cost nothing any more.

    `forwards` counts steps: without drafting as many as the longest row has new tokens. cache: what the rows go on from
    (None: nothing); it is used up.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        options: Options = None,
        runner: Runner | None = None,
        cache: KVCache | None = None,
    ) -> None:
        rows_options = _options_per_row(options, len(prompts))
        _check_vocabulary(model, tokenizer)
        shared = rows_options[0] if rows_options else GenerationOptions()
        self._depth = Depth(**depth_keywords(model, shared.depth, shared.halt_threshold, shared.exit))
        self._draft = _draft_options(shared)
        self._policy = parse_cache_policy(shared.cache_policy)
        if self._draft is not None:
            check_drafting(model, self._draft, self._depth)
        model.check_cache_policy(self._policy, self._depth.depth, self._depth.exit)
        self._interrupted = False
        context = model.sequence_limit
        self._model, self._runner = model, runner or Runner(model)
        self._rows = [
            Row(index, _prompt_ids(prompt, tokenizer, context), row_options, tokenizer, context)
            for index, (prompt, row_options) in enumerate(zip(prompts, rows_options, strict=True))
        ]
        sampler = Sampler(rows_options, next(model.parameters()).device)
        self._seeds = list(sampler.seeds)
        self._active = [row for row in self._rows if not row.finish_reason]  # one per row of the decoder
        self._decoder = self._new_decoder(sampler, shared, cache) if self._active else None

    def _new_decoder(self, sampler: Sampler, shared: GenerationOptions, cache: KVCache | None) -> Decoder:
        sampler.select(torch.tensor([row.index for row in self._active]))
        prompts = [row.fed_ids for row in self._active]
        depth = self._depth
        if not shared.cache:
            return Recomputing(self._runner, prompts, sampler, depth)
        longest = max(len(row.fed_ids) + row.limit - 1 for row in self._active)
        room: dict[str, Any] = {"max_length": longest, "prefill_chunk": shared.prefill_chunk, "policy": self._policy}
        if self._draft is None:
            return Cached(self._runner, prompts, sampler, depth, cache=cache, **room)
        return Drafting(self._runner, prompts, sampler, depth, draft=self._draft, **room)

    @property
    def decides_depth(self) -> bool:
        """Whether tokens can take different numbers of steps."""
        return self._depth.exit is not None or (self._model.learns_depth and self._depth.depth is None)

    @property
    def forwards(self) -> int:
        """Steps so far."""
        return self._decoder.forwards if self._decoder else 0

    def run(self) -> Iterator[TokenEvent]:
        """Steps until every row has ended."""
        while self._active:
            yield from self.step()

    @torch.no_grad()  # not inference_mode: tables that a model keeps from here must stay usable in training
    def step(self) -> list[TokenEvent]:
        """New tokens for every row that is still going, in the order of the prompts; one each, or as drafts hold.

        Raises: UserError if an earlier step was interrupted: nobody knows how far it came.
        """
        if self._interrupted:
            raise UserError("this generation was interrupted in the middle of a step; start it again")
        if self._decoder is None or not self._active:
            return []
        self._interrupted = True
        with evaluating(self._model):
            drawn = self._decoder.next(
                [len(row.ids) for row in self._active], [row.limit - len(row.ids) for row in self._active]
            )
        events = [event for row, tokens in zip(self._active, drawn, strict=True) for event in _accepted(row, tokens)]
        going = [place for place, row in enumerate(self._active) if not row.finish_reason]
        if going and len(going) < len(self._active):
            self._decoder.sampler.select(torch.tensor(going))
            self._decoder.select(torch.tensor(going))
        self._active = [self._active[place] for place in going]
        self._interrupted = False
        return events

    def completions(self) -> list[Completion]:
        """Results in the order of the prompts, once every row has ended."""
        return [row.completion(seed) for row, seed in zip(self._rows, self._seeds, strict=True)]


def _draft_options(shared: GenerationOptions) -> DraftOptions | None:
    if shared.draft is None:
        return None
    if not shared.cache:
        raise UserError("drafting needs the cache: it goes on from states whose keys and values are kept there")
    return DraftOptions(None if shared.draft == "auto" else shared.draft, shared.draft_tokens)


def _accepted(row: Row, tokens: list[Drawn]) -> Iterator[TokenEvent]:
    """Let a row take its new tokens, up to the one it ends with."""
    for token in tokens:
        _check_finite(token.logprob)
        yield row.accept(token)
        if row.finish_reason:
            return


def _options_per_row(options: Options, n_rows: int) -> list[GenerationOptions]:
    if options is None or isinstance(options, GenerationOptions):
        return [options or GenerationOptions()] * n_rows
    if len(options) != n_rows:
        raise UserError(f"{len(options)} options for {n_rows} prompts; give one for each, or one for all")
    for name in SHARED:
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


def _check_finite(logprob: float) -> None:
    if not math.isfinite(logprob):
        raise UserError("the model's predictions are not finite numbers: its weights are damaged or training diverged")
