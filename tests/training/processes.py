"""Several processes on this machine that train together, as torchrun would start them, without its start-up time."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from hrmlm.parallel import Parallel

WITHIN = 120
"""Seconds after which processes that have not ended count as hanging."""


def start(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Fork `size` processes that each run function(*arguments) in the environment of torchrun; they are running."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = []
    for rank in range(size):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        process = context.Process(target=_enter, args=(environment, function, *arguments))
        process.start()
        processes.append(process)
    return processes


def _enter(environment: dict[str, Any], function: Callable[..., Any], *arguments: Any) -> None:
    signal.alarm(WITHIN)
    os.environ.update({key: str(value) for key, value in environment.items()})
    function(*arguments)


def codes(processes: list[Any]) -> list[int | None]:
    """Exit codes; negative: the signal that ended it, SIGALRM where it hung."""
    for process in processes:
        process.join(WITHIN + 10)
    return [process.exitcode for process in processes]


def run(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What function(parallel, *arguments) gives in each of `size` processes, by rank. All must end well."""
    queue = multiprocessing.get_context("fork").SimpleQueue()

    def work() -> None:
        with Parallel.opened() as parallel, parallel.watched():
            queue.put((parallel.rank, function(parallel, *arguments)))

    processes = start(size, work)
    results = dict(queue.get() for _ in range(size) if all(p.exitcode in (None, 0) for p in processes))
    assert codes(processes) == [0] * size
    return [results[rank] for rank in range(size)]
