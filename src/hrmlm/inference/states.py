"""Text that goes on in a later call: the state of a model that carries a memory, in one safetensors file.

The file holds the tensors of the state and, as JSON in its header, what they belong to: the weights, the tokenizer, the
depth, and the ids that were drawn or given but not read yet. It is replaced in one step, when the text has ended.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import hrmlm
from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.files import write_atomic
from hrmlm.inference.generation import Engine
from hrmlm.inference.rows import Completion, GenerationOptions, TokenEvent
from hrmlm.models import LanguageModel
from hrmlm.models.memory import MemoryState

FORMAT = 1
HEADER = "hrmlm_state"


@dataclass
class TextState:
    """A text in the making. state: of the model, one row; waiting: ids at its end that the model has not read yet."""

    state: MemoryState
    waiting: list[int] = field(default_factory=list)

    @classmethod
    def new(cls, model: LanguageModel, depth: int | None = None) -> "TextState":
        """Before any token. Raises: UserError for a model that has no state of constant size."""
        state = model.new_state(1, depth)
        assert isinstance(state, MemoryState)
        return cls(state)

    @property
    def tokens(self) -> int:
        """Tokens the model has read."""
        return int(self.state.lengths_B[0])

    def save(self, path: str | Path, tokenizer: Tokenizer, weights: str | None = None) -> None:
        """Write it, in one step. weights: what tells the weights apart, such as the hash of their file."""
        facts = {
            "format": FORMAT,
            "version": hrmlm.__version__,
            "weights": weights,
            "tokenizer": tokenizer.fingerprint,
            "depth": self.state.n_slots,
            "waiting": self.waiting,
            "tokens": self.tokens,
        }
        tensors = {name: tensor.detach().cpu() for name, tensor in self.state.tensors().items()}
        write_atomic(path, safetensors.torch.save(tensors, metadata={HEADER: json.dumps(facts)}))

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: LanguageModel,
        tokenizer: Tokenizer,
        weights: str | None = None,
        depth: int | None = None,
    ) -> "TextState":
        """Read what `save` wrote for this model.

        Raises: UserError if the file is missing, damaged, foreign, or of other weights, another tokenizer or depth.
        """
        text = cls.new(model, depth)
        facts, tensors = _read(Path(path))
        if facts.get("format") != FORMAT:
            raise UserError(
                f"{path} is a state of format {facts.get('format')!r} and this version reads {FORMAT}; "
                f"it was written by hrmlm {facts.get('version')}"
            )
        if weights is not None and facts.get("weights") not in (None, weights):
            raise UserError(
                f"{path} is the state of a text that other weights have read ({str(facts['weights'])[:16]}, the "
                f"checkpoint's are {weights[:16]}); go on with the checkpoint it was written with, or name a new file"
            )
        if facts.get("tokenizer") != tokenizer.fingerprint:
            raise UserError(
                f"{path} is the state of a text of tokenizer {facts.get('tokenizer')} and the model's is "
                f"{tokenizer.fingerprint}"
            )
        if facts.get("depth") != text.state.n_slots:
            raise UserError(
                f"{path} was written at depth {facts.get('depth')} and depth {text.state.n_slots} was asked for; "
                "a text goes on at the depth it was begun with"
            )
        kept, own = (part["memory"].dtype if "memory" in part else None for part in (tensors, text.state.tensors()))
        if kept in (torch.float32, torch.bfloat16) and kept != own:
            raise UserError(
                f"{path} was written in {str(kept).removeprefix('torch.')} and the model is in "
                f"{str(own).removeprefix('torch.')}; a text goes on in the precision it was begun with"
            )
        waiting = facts.get("waiting")
        if not isinstance(waiting, list) or not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in waiting):
            raise UserError(f"{path} is damaged: its waiting ids are no token ids")
        try:
            text.state.load(tensors)
        except UserError as error:
            raise UserError(f"{path} does not fit the model: {error}") from None
        text.waiting = waiting
        return text


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise UserError(f"{path} is no state file: {'it is a directory' if path.is_dir() else 'it does not exist'}")
    try:
        with safe_open(path, framework="pt", device="cpu") as stored:
            facts = json.loads((stored.metadata() or {}).get(HEADER, "null"))
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  not a mapping
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged or no state file: {error}") from None
    if not isinstance(facts, dict):
        raise UserError(f"{path} is no state file: it does not say what it belongs to")
    return facts, tensors


class ContinuedText:
    """One prompt continued from a state, token by token; afterwards the state stands behind the new text.

    prompt: text or ids, put behind what is waiting; empty: the text simply goes on. Options as in `generate`, always
    with the state, so `cache` must be on.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        prompt: str | list[int],
        options: GenerationOptions,
        text: TextState,
    ) -> None:
        if not options.cache:
            raise UserError("a state takes the place of the cache: leave --no-cache out")
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not text.waiting and not ids:
            ids = [tokenizer.end_of_text]  # as for any empty prompt: a new document
        self.text = text
        self._ids = [*text.waiting, *ids]
        self.engine = Engine(model, tokenizer, [self._ids], options, cache=text.state)

    def run(self) -> Iterator[TokenEvent]:
        """The new tokens."""
        yield from self.engine.run()
        drawn = self.engine.completions()[0].ids
        self.text.waiting = drawn[-1:] if drawn else self._ids

    def completion(self) -> Completion:
        """The result, once `run` has ended."""
        return self.engine.completions()[0]
