"""One row of a generation: its options, what it has produced so far, and when it ends."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from hrmlm.data.tokenizer import TextStream, Tokenizer
from hrmlm.inference.decoding import Drawn
from hrmlm.inference.sampling import SamplingOptions
from hrmlm.inference.stops import StopFilter
from hrmlm.models.cache_policy import parse_cache_policy
from hrmlm.models.exit_policy import parse_exit

FinishReason = Literal["stop", "end", "length"]


class GenerationOptions(SamplingOptions):
    """What one row is asked for. Read it from user input with `GenerationOptions.parse(settings, where)`."""

    max_new_tokens: int = Field(default=128, ge=0)
    """At most so many new tokens; 0 gives an empty completion."""
    stop: tuple[str, ...] = ()
    """Strings that end the row when they appear in its new text; a single string may be given as such."""
    cache: bool = True
    """Keep keys and values (the same tokens, much faster); False recomputes the whole text for every token."""
    prefill_chunk: int = Field(default=512, ge=1)
    """So many positions of the prompts are fed at a time: a bound on memory, not a change of results."""
    draft: Literal["auto"] | PositiveInt | None = None
    """Guess tokens with so many cycles and verify them together (the same tokens, faster); "auto": as measured."""
    draft_tokens: PositiveInt | None = None
    """Guess at most so many tokens at a time; None: as measured."""
    depth: int | None = None
    """Cycles, steps or layers to run; None: as trained."""
    halt_threshold: float | None = None
    """Sum of halting probabilities at which a position stops, of models that learn their depth; None: as trained."""
    exit: str | None = None
    """When a position stops: cycles:N, change:X, kl:X or halt:X (see hrmlm.models.exit_policy); None: as trained."""
    cache_policy: str = "full"
    """Which cycles keep keys and values: full (exact), first, last or every:K (see hrmlm.models.cache_policy)."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return (stop,) if isinstance(stop, str) else stop

    @field_validator("draft", mode="before")
    @classmethod
    def _cycles_or_auto(cls, draft: Any) -> Any:
        if draft is None or draft == "auto" or (isinstance(draft, int) and not isinstance(draft, bool) and draft > 0):
            return draft
        raise ValueError(f"{draft!r} is neither a number of cycles from 1 on nor auto")

    @field_validator("exit")
    @classmethod
    def _known_exit(cls, text: str | None) -> str | None:
        if text is not None:
            parse_exit(text)
        return text

    @field_validator("cache_policy")
    @classmethod
    def _known_cache_policy(cls, text: str) -> str:
        return parse_cache_policy(text).name

    @model_validator(mode="after")
    def _check_cache_policy(self) -> "GenerationOptions":
        if not self.cache and self.cache_policy != "full":
            raise ValueError(f"cache_policy {self.cache_policy} without effect: there is no cache")
        return self

    @model_validator(mode="after")
    def _check_draft(self) -> "GenerationOptions":
        if self.draft is None and self.draft_tokens is not None:
            raise ValueError("draft_tokens without effect: draft is not set")
        return self

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if not all(stop):
            raise ValueError("an empty stop string would stop everything; leave it out")
        return stop


@dataclass(frozen=True)
class TokenEvent:
    """One new token of a row.

    text: what can be shown now. Incomplete characters and what may become a stop string wait for later events; the last
    event of a row, the one with a finish_reason, brings what is left. logprob: natural logarithm of the probability
    that the model gave the token, before temperature, top-k and top-p. steps: cycles, steps or layers that the model
    spent on the position it read the token from. drafted: whether a draft had guessed it. pieces: `text` cut by tokens,
    each piece with the number (from 0) of the new token that brought it or made its character whole.
    """

    row: int
    id: int
    logprob: float
    text: str
    finish_reason: FinishReason | None
    steps: int
    drafted: bool = False
    pieces: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Completion:
    """The result of one prompt.

    ids, logprobs: the new tokens up to the last one drawn, which may be the end mark or the end of a stop string.
    text: their text without either. logprobs as in `TokenEvent`. finish_reason: "stop" (a stop string), "end" (the end
    mark) or "length" (max_new_tokens, or the context is full). seed: gives the same completion again. steps, drafted:
    of each of `ids`, as in `TokenEvent`. texts: what each of `ids` adds to the text; what a stop string or the end mark
    hides is left out, and of a character made of several tokens the last one brings it.
    """

    prompt_ids: list[int]
    ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: FinishReason
    seed: int
    steps: list[int]
    drafted: list[bool]
    texts: list[str]


class Row:
    """State of one row: ids and text so far, and whether it goes on."""

    def __init__(
        self, index: int, prompt_ids: list[int], options: GenerationOptions, tokenizer: Tokenizer, context: int
    ) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        # An empty prompt is the beginning of a new document, which is what follows an end mark in training.
        self.fed_ids = self.prompt_ids or [tokenizer.end_of_text]
        # The last token need not be fed, so one more fits than the context has room for.
        self.limit = min(options.max_new_tokens, context - len(self.fed_ids) + 1)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.steps: list[int] = []
        self.drafted: list[bool] = []
        self._texts: list[str] = []
        self.finish_reason: FinishReason | None = None if self.limit else "length"
        self._end_of_text = tokenizer.end_of_text
        self._characters = TextStream(tokenizer)
        self._stops = StopFilter(options.stop)
        self._pieces: list[str] = []
        self._owners: deque[tuple[int, int]] = deque()  # token and number of characters, of text not yet shown

    @property
    def text(self) -> str:
        """The text that can be shown so far."""
        return "".join(self._pieces)

    def accept(self, drawn: Drawn) -> TokenEvent:
        """Take the next token and decide whether the row ends with it."""
        token = drawn.id
        self.ids.append(token)
        self.logprobs.append(drawn.logprob)
        self.steps.append(drawn.cycles)
        self.drafted.append(drawn.drafted)
        self._texts.append("")
        piece = ""
        if token == self._end_of_text:
            self.finish_reason = "end"
        else:
            piece = self._stops.push(self._owned(self._characters.push(token)))
            if self._stops.stopped:
                self.finish_reason = "stop"
            elif len(self.ids) == self.limit:
                self.finish_reason = "length"
        if self.finish_reason:
            piece += self._stops.push(self._owned(self._characters.finish())) + self._stops.finish()
        self._pieces.append(piece)
        pieces = tuple(self._cut(piece))
        for text, owner in pieces:
            self._texts[owner] += text
        return TokenEvent(
            self.index, token, drawn.logprob, piece, self.finish_reason, drawn.cycles, drawn.drafted, pieces
        )

    def _owned(self, text: str) -> str:
        """Remember that `text` is the newest token's; it may be shown later, or never."""
        if text:
            self._owners.append((len(self.ids) - 1, len(text)))
        return text

    def _cut(self, text: str) -> Iterator[tuple[str, int]]:
        """The text that is shown now, which is the first of what is remembered, cut by tokens."""
        while text:
            token, length = self._owners.popleft()
            if length > len(text):
                self._owners.appendleft((token, length - len(text)))
            yield text[:length], token
            text = text[length:]

    def completion(self, seed: int) -> Completion:
        """The result of a row that has ended."""
        assert self.finish_reason is not None
        return Completion(
            self.prompt_ids,
            self.ids,
            self.text,
            self.logprobs,
            self.finish_reason,
            seed,
            self.steps,
            self.drafted,
            self._texts,
        )
