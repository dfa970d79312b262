"""`hrmlm import`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from hrmlm.cli.common import Json, print_json


def import_command(
    format_name: Annotated[str, typer.Argument(metavar="FORMAT", help="Whose files they are: cosmicfish.")],
    weights: Annotated[Path, typer.Option(help="The released weights, a .safetensors file.")],
    config: Annotated[Path, typer.Option(help="The configuration released with them, a JSON file.")],
    out: Annotated[Path, typer.Option(help="Checkpoint directory to write; it must not exist.")],
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json to store with it.")] = None,
    as_json: Json = False,
) -> None:
    """Turn released weights into a checkpoint of this library.

    Example: hrmlm import cosmicfish --weights model.safetensors --config config.json --out runs/cosmicfish
    """
    from hrmlm.importing import import_weights

    model = import_weights(format_name, weights, config, out, tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if as_json:
        facts = {"out": str(out), "parameters": parameters, "model": model.config.model_dump(mode="json")}
        return print_json(facts)
    print(f"{out}: {parameters:,} parameters, {model.config.family}")
    if tokenizer is None:
        print("It holds no tokenizer: generate and evaluate need one, import again with --tokenizer.", file=sys.stderr)
