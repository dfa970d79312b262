"""`hrmlm demo`."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Directory for data, runs and picture.")] = Path("runs/demo"),
    minutes: Annotated[float, typer.Option(help="Training time to aim at, on this machine.")] = 4.0,
) -> None:
    """Train three small models on two centuries of presidential messages, compare them and generate text."""
    from hrmlm.demo import run

    run(out, minutes)
