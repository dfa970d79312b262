"""The command line: parses, calls, prints. It decides nothing. One file per command."""

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import hrmlm
from hrmlm.cli.common import fail
from hrmlm.cli.demo import demo
from hrmlm.cli.evaluate import evaluate
from hrmlm.cli.export import export
from hrmlm.cli.generate import generate
from hrmlm.cli.importing import import_command
from hrmlm.cli.info import info
from hrmlm.cli.prepare import prepare
from hrmlm.cli.probe import probe
from hrmlm.cli.study import study
from hrmlm.cli.train import train
from hrmlm.errors import EndedElsewhere, LostProcess, UserError

app = typer.Typer(
    help="Train, study, run and deploy hierarchical recurrent language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Older releases of typer use click, newer ones a copy of their own: this finds the class in either.
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


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
        fail(f"{error.format_message()} (see hrmlm --help and hrmlm COMMAND --help)", 2)
    except SystemExit:
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # what click puts there when the reader is gone
            sys.exit(0)  # it has seen enough, as `head` does
        raise
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except UserError as error:
        fail(str(error), 2)
    except EndedElsewhere:
        sys.exit(0)  # the process that tells why has the exit code
    except LostProcess as error:
        fail(str(error), 1)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}", 2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):  # what torch says on the CPU
            raise
        fail(
            f"not enough memory: {str(error).splitlines()[0] if str(error) else 'the sizes asked for are too large'}", 2
        )


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


for _command in (prepare, info, train, export, evaluate, generate):
    app.command()(_command)
app.command("import")(import_command)
app.command()(demo)
app.add_typer(probe, name="probe")
app.add_typer(study, name="study")
