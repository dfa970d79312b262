"""What the benchmarks share: options whose help tells the defaults, and mistakes told in one line."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser described by the first line of a script's docstring."""
    description = (doc or "").split("\n")[0]
    return argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Mistakes of the user end the script with one line on standard error and exit code 2."""
    from hrmlm.errors import UserError

    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
