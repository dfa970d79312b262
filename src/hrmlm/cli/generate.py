"""`hrmlm generate`."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hrmlm.cli.common import Exit, HaltThreshold, Json, print_json, warn_of_depth
from hrmlm.errors import UserError
from hrmlm.files import read_text


class Precision(StrEnum):
    """Precisions to generate in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run directory.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="File with one prompt per line.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw among the k likeliest tokens (0: all).")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given several times.")] = None,
    cache: Annotated[bool, typer.Option(help="Keep keys and values: the same text, much faster.")] = True,
    depth: Annotated[int | None, typer.Option(help="Cycles, steps or layers to run (default: as trained).")] = None,
    halt_threshold: HaltThreshold = None,
    exit: Exit = None,
    cache_policy: Annotated[
        str, typer.Option(help="Which cycles keep keys and values: full (exact), first, last or every:K.")
    ] = "full",
    draft: Annotated[
        str | None,
        typer.Option(help="Guess with so many cycles, verify together: the same text, faster. auto: as measured."),
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Guess so many tokens at a time (default: as measured).")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Precision to compute in.")] = Precision.float32,
    pack: Annotated[bool, typer.Option(help="Copy the weights to where they are read fastest (CPU).")] = True,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the step: a minute at first, then faster.")
    ] = False,
    show_depth: Annotated[bool, typer.Option("--show-depth", help="Colour each token by the steps it took.")] = False,
    state: Annotated[
        Path | None,
        typer.Option(help="Go on from this file if it exists, and write it at the end (models with a memory)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Continue text with a trained model.

    Example: hrmlm generate runs/demo/hrm-lm --prompt "The state of the Union" --temperature 0.8
    """
    import torch

    from hrmlm.checkpoint import load_model, load_tokenizer
    from hrmlm.inference.generator import Generator
    from hrmlm.inference.rows import GenerationOptions
    from hrmlm.inference.show import show_depths, visible
    from hrmlm.steps import depth_keywords
    from hrmlm.training.run import resolve_checkpoint

    texts = _prompts(prompt or [], prompts, state)
    settings = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": tuple(stop or ()),
        "cache": cache,
        "depth": depth,
        "halt_threshold": halt_threshold,
        "exit": exit,
        "cache_policy": cache_policy,
        "draft": int(draft) if draft and draft.isascii() and draft.isdecimal() and len(draft) < 10 else draft,
        "draft_tokens": draft_tokens,
    }
    options = GenerationOptions.parse(settings, "generate")
    source = resolve_checkpoint(checkpoint)
    model, tokenizer = load_model(source), load_tokenizer(source)
    depth = depth_keywords(model, depth, halt_threshold, exit)["depth"]
    warn_of_depth(model, depth)
    dtype = getattr(torch, precision.value)
    with Generator(model, tokenizer, pack=pack, compile=compile, dtype=dtype) as generator:
        if state is not None:
            if show_depth:
                raise UserError("--show-depth and --state exclude each other; --json tells the steps of every token")
            return _generate_from(state, source, generator, texts[0], options, as_json)
        if show_depth and not as_json:
            most = model.total_cycles(depth)
            return show_depths(generator.engine(texts, options), texts, most)
        if len(texts) == 1 and not as_json:
            events = generator.stream(texts[0], options)  # refuses a bad prompt before anything is printed
            print(texts[0], end="", flush=True)
            for event in events:
                print(visible(event.text) if sys.stdout.isatty() else event.text, end="", flush=True)
            return print()
        completions = generator.generate(texts, options)
    if as_json:
        return print_json([{"prompt": text, **vars(c)} for text, c in zip(texts, completions, strict=True)])
    for text, completion in zip(texts, completions, strict=True):
        shown = visible(completion.text) if sys.stdout.isatty() else completion.text
        print(f"{text}{shown}\n")


def _prompts(given: list[str], file: Path | None, state: Path | None) -> list[str]:
    """All texts to continue. Raises: UserError where there is none, or more than a state can go on with."""
    texts = list(given)
    if file is not None:
        content = read_text(file)
        if not content:
            raise UserError(f"{file} is empty: no prompt in it")
        texts += [line.removesuffix("\r") for line in content.removesuffix("\n").split("\n")]
    if state is not None and len(texts) > 1:
        raise UserError(f"{len(texts)} prompts with --state: a state belongs to one text; give one prompt")
    if state is not None and state.exists():
        texts = texts or [""]
    if not texts and state is not None:
        raise UserError(f"no prompt, and {state} does not exist to go on from; give --prompt TEXT to begin that text")
    if not texts:
        raise UserError("no prompt; give --prompt TEXT (an empty text starts a new document) or --prompts FILE")
    return texts


def _generate_from(path: Path, source: Any, generator: Any, prompt: str, options: Any, as_json: bool) -> None:
    """Continue a text from its state file and write the new state."""
    from hrmlm.inference.show import visible
    from hrmlm.inference.states import ContinuedText, TextState

    weights = source.weights_hash
    if not os.access(path.absolute().parent, os.W_OK):  # before the text is made, not after
        raise UserError(f"--state {path}: its directory does not exist or cannot be written; create it first")
    if path.exists():
        text = TextState.load(path, generator.model, generator.tokenizer, weights, options.depth)
    else:
        text = TextState.new(generator.model, options.depth)
    continued = ContinuedText(generator.model, generator.tokenizer, prompt, options, text)
    if not as_json:
        print(prompt, end="", flush=True)
    for event in continued.run():
        if not as_json:
            print(visible(event.text) if sys.stdout.isatty() else event.text, end="", flush=True)
    text.save(path, generator.tokenizer, weights)
    if as_json:
        return print_json([{"prompt": prompt, **vars(continued.completion())}])
    print()
