"""`hrmlm export`."""

from pathlib import Path
from typing import Annotated

import typer


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
