"""A model made ready to generate many times: weights packed once, the step compiled if asked for."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.inference.decoding import Runner
from hrmlm.inference.generation import Engine, Options, Prompt
from hrmlm.inference.packing import packed
from hrmlm.inference.rows import Completion, GenerationOptions, TokenEvent
from hrmlm.models.base import LanguageModel


class Generator:
    """A model and its tokenizer, ready to generate.

        with Generator.load("runs/book") as generator:
            for event in generator.stream("It was", temperature=0.8):
                print(event.text, end="")

    pack: keep a copy of the matrices in the layout that is read fastest, which about doubles the memory of the weights
    and the speed of decoding; on the CPU only, elsewhere without effect. compile: let PyTorch compile the step that
    makes a token (some 10 to 60 seconds at the first token, once more when a second length is seen; then faster, most
    for small models). dtype: of a copy of the weights to compute in, such as torch.bfloat16 (None: as they are).

    While it is open the model's weights must not change. Closing it gives the copies back; leaving `with` closes it.

    Raises: UserError where compiling is asked for and there is no C++ compiler.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        pack: bool = True,
        compile: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        if dtype is not None and dtype != model.embedding.weight.dtype:
            model = converted(model, dtype)
        self.model, self.tokenizer = model, tokenizer
        self._runner = CompiledRunner(model) if compile else Runner(model)
        self._open = ExitStack()
        if pack:
            self._open.enter_context(packed(model))

    @classmethod
    def load(cls, path: str | Path, **settings: Any) -> Self:
        """Of a checkpoint or run directory. settings: as of the class. Raises: UserError naming what is wrong."""
        import hrmlm

        return cls(hrmlm.load(path), hrmlm.load_tokenizer(path), **settings)

    def generate(
        self, prompts: str | bytes | Sequence[Prompt], options: Options = None, **settings: Any
    ) -> list[Completion]:
        """Continue every prompt, all in one batch: see `hrmlm.inference.generate`. settings: instead of options."""
        prompts = [prompts] if isinstance(prompts, str | bytes) else prompts
        engine = self.engine(prompts, _options(options, settings))
        for _ in engine.run():
            pass
        return engine.completions()

    def stream(self, prompt: Prompt, options: GenerationOptions | None = None, **settings: Any) -> Iterator[TokenEvent]:
        """Continue one prompt, one event per token as it comes; mistakes are raised at once. settings: as options."""
        return self.engine([prompt], _options(options, settings)).run()

    def engine(self, prompts: Sequence[Prompt], options: Options = None) -> Engine:
        """The batch in the making, for who wants its steps."""
        engine = Engine(self.model, self.tokenizer, prompts, options, self._runner)
        if isinstance(self._runner, CompiledRunner) and engine.decides_depth:
            raise UserError("an exit policy decides token by token what runs, and such steps cannot be compiled")
        return engine

    def close(self) -> None:
        """Give the packed copies back. It can still generate, more slowly."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CompiledRunner(Runner):
    """The same functions, compiled by PyTorch with the weights as constants."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        if model.carries_state:
            raise UserError("this model writes a memory between tokens, and such steps cannot be compiled")
        if model.learns_depth:
            raise UserError("this model decides its depth token by token, and such steps cannot be compiled")
        compilers = [os.environ.get("CXX"), "g++", "clang++"]
        if model.embedding.weight.device.type == "cpu" and not any(shutil.which(name) for name in compilers if name):
            raise UserError("compiling needs a C++ compiler (g++ or clang++); install one, or leave compile out")
        self.first = compiled(super().first)  # type: ignore[method-assign]
        self.rest = compiled(super().rest)  # type: ignore[method-assign]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors and a model, compiled with the model's weights as constants: packed ones must be."""
    from torch._inductor import config

    compile = torch.compile(function)

    def call(*arguments: Any) -> Any:
        with config.patch(freezing=True):  # looked at whenever it compiles, which may be at any call
            return compile(*arguments)

    return call


def converted(model: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    """A copy of a model in another precision. Raises: UserError for one that is not float32 or bfloat16."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise UserError(f"{dtype} is not a precision to generate in; use torch.float32 or torch.bfloat16")
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.to(model.embedding.weight.device, dtype).eval()


def generate(
    model: LanguageModel, tokenizer: Tokenizer, prompts: str | bytes | Sequence[Prompt], options: Options = None
) -> list[Completion]:
    """Continue every prompt (text or token ids), all in one batch.

    Each completion is what its prompt would give alone, so equal prompts with equal seeds give equal texts. Rules: an
    empty prompt starts a new document; a prompt that ends with the end mark goes on with a new document; a row ends at
    the end mark, at a stop string, after max_new_tokens, or when the context is full, which is after
    context - len(prompt) + 1 new tokens.

    Args: options: for all rows, or one for each; some must be the same in all (generation.SHARED).

    Raises: UserError for a prompt longer than the model's context, ids outside the vocabulary, a tokenizer of another
    size than the model's vocabulary, an impossible depth, a cache for a model that cannot have one, or a model whose
    predictions are not finite.
    """
    with Generator(model, tokenizer) as generator:
        return generator.generate(prompts, options)


def stream(
    model: LanguageModel, tokenizer: Tokenizer, prompt: Prompt, options: GenerationOptions | None = None
) -> Iterator[TokenEvent]:
    """Continue one prompt, one event per token as it comes; their joined texts are the text of `generate`.

    Raises: UserError as `generate`; mistakes in the prompt are raised at once, not with the first token.
    """
    events = Engine(model, tokenizer, [prompt], options).run()

    def run() -> Iterator[TokenEvent]:
        with packed(model):
            yield from events

    return run()


def _options(options: Options, settings: dict[str, Any]) -> Options:
    if not settings:
        return options
    if options is not None:
        raise UserError("give options or settings by name, not both")
    return GenerationOptions.parse(settings, "generate")
