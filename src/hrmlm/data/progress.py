"""Progress bars over bytes, on standard error, only when a person is looking."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def byte_bar(title: str, total: int | None, show: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of bytes done since the last call."""
    if not (show and sys.stderr.isatty()):
        yield lambda size: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=total)
        yield lambda size: bars.advance(task, size)
